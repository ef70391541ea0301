"""The rows whose kept set is larger than the groups with the largest logits: two kernels of `triton_filtered` draw in them.

Between two logits, the gap, it is open what is kept. So a group has two scores in the race, without its tokens in the gap and
with them, and the winner is in a piece whose best score with them is at least the best of all without: mostly in one piece.
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import kept, noise, race
from pallas_kernels import triton_prefix as prefix
from pallas_kernels.kept import Mass
from pallas_kernels.triton_filter_search import search
from pallas_kernels.triton_kept import in_winner, kept_of, race_in_chunks
from pallas_kernels.triton_prefix import Span, Tokens
from pallas_kernels.triton_rows import (
    barrier,
    fetch,
    few_of,
    for_pieces,
    groups_from,
    listed_ids,
    padded_load,
    put,
    row_of,
    scatter,
    split,
    spread_iota,
    spread_load,
    tokens_at,
    tokens_of,
)
from pallas_kernels.triton_shapes import DRAWN, IN_SPAN, SETTLED, STREAMED, WHOLE, Raced, Shape

ROUNDING = 1e-3  # more than what float32 loses of a score; groups where weights vanish are too light to win


def sweep(*refs, shape: Shape, trees):
    """Pieces of rows that are not drawn: the two scores, the mass above the gap, and the tokens in it.

    What it does with a token it does to all of a row, so instructions count: scores are compared as `mass / -log(u)`.
    """
    refs, summary, state, out = split(refs, trees)

    def of_piece(row, kind, piece, groups, is_there):
        @pl.when(kind != WHOLE)
        def _():
            known = fetch(shape, state, row)
            own = row_of(shape, refs, row, known.top, known.total)
            group_top = jnp.where(is_there, shape.plt.load(summary.group_top.at[row, groups]), -jnp.inf)
            first_ids = noise.GROUP * jnp.where(group_top > -jnp.inf, groups, 0)  # from a load: each thread makes its own noise
            exists = jnp.full(groups.shape, True)  # groups are left out by their sums
            _, _, x = tokens_of(shape, refs, row, groups, exists)  # not in the branch: so all are fetched at once
            over, low = kept.logits_of(known.high), kept.logits_of(known.low)
            bit = jnp.int32(1) << lax.broadcasted_iota(jnp.int32, (1, noise.GROUP), 1)

            def of_groups(where, what):
                return jnp.where(is_there, jnp.sum(jnp.where(where, what, 0), axis=1, dtype=what.dtype), 0)

            def look():
                weights = prefix.weight_of(x, own)
                is_over = x >= over
                sure = of_groups(is_over if own.min_p is None else is_over & prefix.is_above(x, own), weights)
                speed = jnp.where(own.t > 0.0, 1.0 / race.group_noise(own.keys, 0, first_ids, noise.exponential), 1.0)
                best = lambda a: jnp.max(speed * jnp.where(own.t > 0.0, a, jnp.minimum(a, 1.0)))  # noqa: E731
                if not shape.has_prefix:
                    return (best(sure), best(sure), jnp.sum(sure)), (), ()
                # Loaded again: else what was compared before is kept, which takes more instructions than to compare once more.
                low, high = (kept.logits_of(shape.plt.load(ref.at[row], volatile=True)) for ref in (state.low, state.high))
                bits = of_groups((x >= low) & (x < high), bit)
                open_ = lax.population_count(bits).astype(jnp.float32) * jnp.minimum(prefix.weight_of(over, own), 1.0)
                mass = jnp.sum(sure if own.min_p is None else of_groups(is_over, weights))
                number = jnp.int32(0) if own.top_k is None else jnp.sum(of_groups(is_over, jnp.ones_like(bit)), dtype=jnp.int32)
                return (best(sure), best(sure + open_), jnp.sum(sure)), (number, mass), bits

            def nothing():
                none = jnp.float32(0.0)
                searched = ((jnp.int32(0), none), jnp.zeros(groups.shape, jnp.int32)) if shape.has_prefix else ((), ())
                return (none, none, none), *searched

            scores, above, bits = prefix.branch(jnp.max(group_top) >= low, look, nothing)
            put(shape, (out.lower, out.upper, out.total), (row, piece), scores)
            if not shape.has_prefix:
                return
            number, total = above
            mass: Mass = Mass(number, jnp.int32(0))
            if own.top_p is not None:
                weight = Mass(*map(prefix.number, kept.fixed_point(total[None, None], own.total[None])))
                mass = kept.either(own.top_p < 1.0, weight, mass)
            put(shape, (out.whole, out.fine), (row, piece), tuple(mass))
            scatter(shape, out.bits, row, groups, bits, is_there)

    for_pieces(shape, state.kind, of_piece)


def conclude(*refs, shape: Shape, trees):
    """One row: the end of its prefix, and the draw."""
    refs, summary, state, settled, swept, out, draw, list_ref, few_ref = split(refs, trees)
    row = pl.program_id(0)
    kind = shape.plt.load(state.kind.at[row])

    @pl.when(kind == DRAWN)
    def _():
        put(shape, (out, draw), row, fetch(shape, (state.end, settled), row))

    @pl.when(kind != DRAWN)
    def _():
        known, few = fetch(shape, state, row), few_of(shape, refs, few_ref, row)
        own = row_of(shape, refs, row, known.top, known.total)

        def in_row():
            """Among all tokens."""
            size = min(STREAMED, pl.next_power_of_2(shape.num_groups))

            def load(block):
                ids, _, x = tokens_of(shape, refs, row, *groups_from(block * size, size, shape.num_groups))
                return x, ids

            span = Span(kept.ordered_keys(jnp.float32(prefix.LEAST_FINITE)), kept.ordered_keys(known.top) + 1, prefix.nothing())
            tokens = Tokens((), load, pl.cdiv(shape.num_groups, size))
            return search(tokens, own, span, few, jnp.bool_(True), shape.vocab).end

        def in_gap():
            """Among the tokens that the sweep listed, if it is there; and what is kept of them."""
            bits = spread_load(shape, swept.bits, row, shape.num_groups, 0)
            places, number = prefix.places_in_lanes([lax.population_count(x) for x in bits])
            groups = spread_iota(shape.num_groups)

            def write_down(state):
                """One token of each group that has any left."""
                left = []
                for first, bits, place in zip(groups, *state, strict=True):
                    lowest = bits & -bits
                    ids = noise.GROUP * first + lax.population_count(lowest - 1)
                    scatter(shape, list_ref, row, place, ids, (bits != 0) & (place < shape.in_gap))
                    left.append((bits ^ lowest, place + 1))
                return tuple(map(list, zip(*left, strict=True)))

            is_any = lambda state: jnp.max(prefix.in_lanes(jnp.max, jnp.maximum, state[0])) > 0  # noqa: E731
            lax.while_loop(is_any, write_down, (bits, places))
            barrier(shape)
            place = lax.broadcasted_iota(jnp.int32, (shape.in_gap // noise.GROUP, noise.GROUP), 0) * noise.GROUP
            place += lax.broadcasted_iota(jnp.int32, place.shape, 1)
            ids = listed_ids(shape, list_ref, row, place, number)
            x = tokens_at(shape, refs, row, ids, place < number)[1]
            above = kept.carried(*(prefix.number(padded_load(shape, ref, row, shape.num_pieces, 0))
                                   for ref in (swept.whole, swept.fine)))
            span = Span(known.low, known.high, above)
            found = search(Tokens(((x, ids),)), own, span, few, jnp.bool_(False), shape.vocab)
            weights = jnp.where(kept_of(x, ids, own, found.end), prefix.weight_of(x, own), 0.0)
            return *found.end, found.is_found & (number <= shape.in_gap), jnp.sum(jnp.sum(weights, axis=1))

        key, id, is_found, total = *known.end, known.kind == SETTLED, jnp.float32(0.0)
        if shape.has_prefix:
            key, id, is_found, total = prefix.branch(kind == IN_SPAN, in_gap, lambda: (key, id, is_found, total))
            key, id = prefix.branch(is_found, lambda: (key, id), lambda: tuple(in_row()))
        end = type(known.end)(key, id)
        put(shape, out, row, end)
        lower, upper, above = (padded_load(shape, ref, row, shape.num_pieces, other) for ref, other in (
            (swept.lower, 0.0), (swept.upper, 0.0), (swept.total, 0.0)))
        may_win = (upper > 0.0) & (upper >= (1.0 - ROUNDING) * jnp.max(lower))
        is_there = lax.broadcasted_iota(jnp.int32, upper.shape, 0) < shape.num_pieces
        raced = race_in_chunks(shape, refs, own, end, row, is_there & (may_win | ~is_found))
        won: Raced = raced._replace(total=jnp.where(is_found, total + jnp.sum(above), raced.total))
        put(shape, draw, row, in_winner(shape, refs, own, end, summary, won, row))
