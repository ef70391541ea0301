"""The rows whose kept set is larger than the groups with the largest logits: two kernels of `triton_filtered` find its end."""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import kept, noise
from pallas_kernels import triton_prefix as prefix
from pallas_kernels.kept import Mass
from pallas_kernels.triton_filter_search import Found, search
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
    tokens_at,
    tokens_of,
)
from pallas_kernels.triton_shapes import IN_GAP, IN_SPAN, SETTLED, STREAMED, Shape


def sweep(*refs, shape: Shape, trees):
    """Pieces of rows that are not settled."""
    refs, state, out = split(refs, trees)

    def of_piece(row, kind, piece, groups, is_there):
        @pl.when(kind == IN_SPAN)
        def _():
            known = fetch(shape, state, row)
            own = row_of(shape, refs, row, known.top, known.total)
            ids, _model, x = tokens_of(shape, refs, row, groups, is_there)
            is_over = x >= kept.logits_of(known.high)
            mass: Mass = Mass(prefix.number(is_over), jnp.int32(0))
            if own.top_p is not None:
                over = jnp.sum(jnp.sum(jnp.where(is_over, prefix.weight_of(x, own), 0.0), axis=1))
                over = Mass(*map(prefix.number, kept.fixed_point(over[None, None], own.total[None])))
                mass = prefix.either(own.top_p < 1.0, over, mass)
            is_in = (x >= kept.logits_of(known.low)) & ~is_over
            bit = jnp.int32(1) << lax.broadcasted_iota(jnp.int32, (1, noise.GROUP), 1)
            bits = jnp.sum(jnp.where(is_in, bit, 0), axis=1, dtype=jnp.int32)
            of_group = lax.population_count(bits)
            num_listed = prefix.number(of_group)
            put(shape, (out.whole, out.fine, out.num_listed), (row, piece), (*mass, num_listed))

            @pl.when((num_listed > 0) & (num_listed <= IN_GAP))
            def _():
                of_piece = piece * IN_GAP + prefix.cumsum(of_group) - of_group
                places = of_piece[:, None] + lax.population_count(bits[:, None] & (bit - 1))
                scatter(shape, out.ids, row, places, ids, (bits[:, None] & bit) != 0)

    for_pieces(shape, state.kind, of_piece)


def conclude(*refs, shape: Shape, trees):
    """One row: the end of its prefix, if that is not settled yet."""
    refs, state, swept, out, list_ref, few_ref = split(refs, trees)
    row = pl.program_id(0)
    known, few = fetch(shape, state, row), few_of(shape, refs, few_ref, row)

    def in_row():
        """Among all tokens."""
        size = min(STREAMED, pl.next_power_of_2(shape.num_groups))

        def load(block):
            ids, _, x = tokens_of(shape, refs, row, *groups_from(block * size, size, shape.num_groups))
            return x, ids

        span = Span(kept.ordered_keys(jnp.float32(prefix.LEAST_FINITE)), kept.ordered_keys(known.top) + 1, prefix.nothing())
        own = row_of(shape, refs, row, known.top, known.total)
        tokens = Tokens((), load, pl.cdiv(shape.num_groups, size))
        return search(tokens, own, span, few, jnp.bool_(True), shape.vocab).end

    def in_gap():
        """Among the tokens that the sweep listed, if it is there."""
        number = padded_load(shape, swept.num_listed, row, shape.num_pieces, 0)
        pieces, slots = (lax.broadcasted_iota(jnp.int32, (number.shape[0], IN_GAP), axis) for axis in range(2))
        is_there = slots < jnp.where(number <= IN_GAP, number, 0)[:, None]
        ids = shape.plt.load(swept.ids.at[row, pieces * IN_GAP + slots], mask=is_there, other=0)
        place = (prefix.cumsum(number) - number)[:, None] + slots
        scatter(shape, list_ref, row, place, ids, is_there)
        barrier(shape)
        num_listed, size = prefix.number(number), shape.listed * noise.GROUP

        def load(block):
            place = lax.broadcasted_iota(jnp.int32, (shape.listed, noise.GROUP), 0) * noise.GROUP
            place = block * size + place + lax.broadcasted_iota(jnp.int32, (shape.listed, noise.GROUP), 1)
            ids = listed_ids(shape, list_ref, row, place, num_listed)
            return tokens_at(shape, refs, row, ids, place < num_listed)[1], ids

        own = row_of(shape, refs, row, known.top, known.total)
        above = kept.carried(*(prefix.number(padded_load(shape, ref, row, shape.num_pieces, 0))
                               for ref in (swept.whole, swept.fine)))
        tokens = Tokens((load(0), load(1)), load, lax.div(num_listed + size - 1, jnp.int32(size)))
        found = search(tokens, own, Span(known.low, known.high, above), few, jnp.bool_(False), shape.vocab)
        return Found(found.end, found.is_found & (jnp.max(number) <= IN_GAP))

    found = prefix.branch(known.kind == IN_SPAN, in_gap, lambda: Found(known.end, known.kind <= SETTLED))
    put(shape, out, row, prefix.branch(found.is_found, lambda: found.end, in_row))
