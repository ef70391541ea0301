"""Draws under filters on NVIDIA GPUs: XLA's product leaves the logits, six small kernels do the rest, and nothing is
sorted.

    summarise   a program per piece of a row: its mass, the largest logit of every group, one logit of every group as a sample
    settle      a program per row: the end of the kept prefix, if the groups with the largest logits hold it; else, from the
                samples, a gap between two logits in which it is likely to be
    sweep       a program per piece of a row that is not settled: the mass above that gap, and a list of the tokens in it
    conclude    a program per row that is not settled: the end among the listed tokens. If the gap missed it, or where top_k and
                top_p both need more than the largest groups, this searches the whole row
    race        a program per piece: the race of the groups that keep a token
    finish      a program per row: the token

What is kept is decided by the rules of `kept`; guesses cost time only. Two masses of top_p are float32 sums and not its
integers, that of the whole row and that above the gap: its set is the one of `kept` to 1e-6 of p.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import filtered, kept, noise, race
from pallas_kernels import finish as finishing
from pallas_kernels import triton_prefix as prefix
from pallas_kernels.finish import Draw
from pallas_kernels.kept import Filters, Kept, Mass
from pallas_kernels.logits import Elementwise
from pallas_kernels.tiles import TritonTiles
from pallas_kernels.triton import operands
from pallas_kernels.triton_finish import given, like
from pallas_kernels.triton_prefix import Span, Tokens
from pallas_kernels.triton_rows import (
    IN_GAP,
    IN_SPAN,
    SETTLED,
    STREAMED,
    WHOLE,
    Inputs,
    Raced,
    Shape,
    State,
    Summary,
    Sweep,
    barrier,
    fetch,
    padded_load,
    piece_of,
    put,
    row_of,
    scatter,
    split,
    tokens_at,
    tokens_of,
)


def summarise(*refs, shape: Shape, trees):
    """One piece: masses, the largest logit of each group, and one of its logits."""
    refs, out = split(refs, trees)
    row, piece, groups = piece_of(shape)
    own = row_of(shape, refs, row)
    is_there = groups < shape.num_groups
    _, model, x = tokens_of(shape, refs, row, groups, is_there)
    group_top = jnp.max(x, axis=1)
    top = jnp.max(group_top)
    own = own._replace(top=top)
    put(shape, (out.top, out.total), (row, piece), (top, jnp.sum(prefix.weight_of(x, own))))
    if shape.with_model:
        top = jnp.max(model)
        total = jnp.sum(jnp.exp(model - race.finite_or_zero(top)))
        put(shape, (out.model_top, out.model_total), (row, piece), (top, total))
    ids = noise.GROUP * groups + ((5 * (groups + (groups >> 4))) & (noise.GROUP - 1))
    sample = tokens_at(shape, refs, row, ids, ids < shape.vocab)[1]
    for ref, value in ((out.group_top, group_top), (out.sample, sample)):
        shape.plt.store(ref.at[row, groups], value, mask=is_there)


def settle(*refs, shape: Shape, trees):
    """One row: the end of its prefix, or where to look for it."""
    refs, given, out, list_ref = split(refs, trees)
    row = pl.program_id(0)
    pieces = lambda ref, other: padded_load(shape, ref, row, shape.num_pieces, other)  # noqa: E731
    t = shape.plt.load(refs.t.at[row])
    top, total = race.mass_of(pieces(given.top, -jnp.inf), pieces(given.total, 0.0), t)
    own = row_of(shape, refs, row, top, total)
    has_law = finishing.has_law(top, total)
    is_k, is_p = (has_law & on for on in prefix.is_on(own, shape.vocab))
    if own.top_k is not None:
        own = own._replace(top_k=jnp.where(is_k, own.top_k, 0))
    if own.top_p is not None:
        own = own._replace(top_p=jnp.where(is_p, own.top_p, 1.0))

    group_top = padded_load(shape, given.group_top, row, shape.num_groups, -jnp.inf)
    over = lambda low: jnp.sum(group_top >= low, dtype=jnp.int32)  # noqa: E731
    lowest = jnp.min(jnp.where(group_top > -jnp.inf, group_top, jnp.inf))
    is_whole = jnp.sum(group_top > -jnp.inf, dtype=jnp.int32) <= shape.listed
    wanted = jnp.int32(shape.listed // 2)
    if own.top_k is not None:
        wanted = jnp.minimum(jnp.maximum(wanted, own.top_k), shape.listed - shape.listed // 8)

    def halve(state):
        low, high, num_over, rounds = state
        middle = 0.5 * low + 0.5 * high
        num = over(middle)
        fits = num <= shape.listed
        return jnp.where(fits, low, middle), jnp.where(fits, middle, high), jnp.where(fits, num, num_over), rounds + 1

    _, high, num_over, _ = lax.while_loop(lambda state: ~is_whole & (state[2] < wanted) & (state[3] < 24), halve,
                                          (lowest, top, over(top), jnp.int32(0)))
    lowest_listed = jnp.where(is_whole, prefix.LEAST_FINITE, jnp.where(num_over > shape.listed, jnp.inf, high))
    is_listed = (group_top >= lowest_listed) & (group_top < jnp.inf)
    place = prefix.cumsum(is_listed.astype(jnp.int32)) - 1
    num_listed = jnp.sum(is_listed, dtype=jnp.int32)
    groups = lax.broadcasted_iota(jnp.int32, is_listed.shape, 0)
    scatter(shape, list_ref, row, place, groups, is_listed & (place < shape.listed))
    barrier(shape)
    place = lax.broadcasted_iota(jnp.int32, (shape.listed,), 0)
    groups = shape.plt.load(list_ref.at[row, place], mask=place < num_listed, other=0)
    ids, _, x = tokens_of(shape, refs, row, groups, place < num_listed)
    span = Span(kept.ordered_keys(lowest_listed), kept.ordered_keys(top) + 1, prefix.nothing())
    found = prefix.search(Tokens(((x, ids),)), own, span, is_whole, shape.vocab)
    is_settled = ~has_law | is_whole | found.is_found | ~(is_k | is_p)
    if own.min_p is not None:  # it ends before the others do
        is_settled |= ~prefix.is_above(lowest_listed, own) & ~(is_k & is_p)

    def guessed():
        samples = padded_load(shape, given.sample, row, shape.num_groups, jnp.inf)
        start = jnp.min(jnp.where(samples > -jnp.inf, samples, jnp.inf))
        low, high = prefix.undecided_span(samples, own, is_k, start, shape.vocab)
        low = kept.ordered_keys(jnp.where(low > start, low, prefix.LEAST_FINITE))
        high = kept.ordered_keys(high) + (high >= top).astype(jnp.int32)
        return jnp.where(is_k & is_p, jnp.int32(WHOLE), jnp.int32(IN_SPAN)), low, high

    kind, low, high = prefix.branch(is_settled, lambda: (jnp.int32(SETTLED), jnp.int32(0), jnp.int32(0)), guessed)
    put(shape, out, row, State(kind, top, total, low, high, found.end))


def sweep(*refs, shape: Shape, trees):
    """One piece of a row that is not settled."""
    refs, state, out = split(refs, trees)
    row, piece, groups = piece_of(shape)

    @pl.when(shape.plt.load(state.kind.at[row]) == IN_SPAN)
    def _():
        known = fetch(shape, state, row)
        own = row_of(shape, refs, row, known.top, known.total)
        ids, _model, x = tokens_of(shape, refs, row, groups, groups < shape.num_groups)
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


def conclude(*refs, shape: Shape, trees):
    """One row: the end of its prefix, if that is not settled yet."""
    refs, state, swept, out, list_ref = split(refs, trees)
    row = pl.program_id(0)
    known = fetch(shape, state, row)

    def in_row():
        """Among all tokens."""
        size = min(STREAMED, pl.next_power_of_2(shape.num_groups))

        def load(block):
            groups = block * size + lax.broadcasted_iota(jnp.int32, (size,), 0)
            ids, _, x = tokens_of(shape, refs, row, groups, groups < shape.num_groups)
            return x, ids

        span = Span(kept.ordered_keys(jnp.float32(prefix.LEAST_FINITE)), kept.ordered_keys(known.top) + 1, prefix.nothing())
        own = row_of(shape, refs, row, known.top, known.total)
        tokens = Tokens((), load, pl.cdiv(shape.num_groups, size))
        return prefix.search(tokens, own, span, jnp.bool_(True), shape.vocab).end

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
            ids = shape.plt.load(list_ref.at[row, place], mask=place < num_listed, other=0)
            return tokens_at(shape, refs, row, ids, place < num_listed)[1], ids

        own = row_of(shape, refs, row, known.top, known.total)
        above = kept.carried(*(prefix.number(padded_load(shape, ref, row, shape.num_pieces, 0))
                               for ref in (swept.whole, swept.fine)))
        tokens = Tokens((load(0), load(1)), load, lax.div(num_listed + size - 1, jnp.int32(size)))
        found = prefix.search(tokens, own, Span(known.low, known.high, above), jnp.bool_(False), shape.vocab)
        is_found = found.is_found & (jnp.max(number) <= IN_GAP)
        return prefix.branch(is_found, lambda: found.end, in_row)

    def unsettled():
        return prefix.branch(known.kind == IN_SPAN, in_gap, in_row)

    put(shape, out, row, prefix.branch(known.kind == SETTLED, lambda: known.end, unsettled))


def race_piece(*refs, shape: Shape, trees):
    """One piece: the race of its groups over their kept tokens."""
    refs, state, end, group_top_ref, out = split(refs, trees)
    row, piece, groups = piece_of(shape)
    top, total, end = fetch(shape, (state.top, state.total, end), row)
    own = row_of(shape, refs, row, top, total)
    is_there = groups < shape.num_groups
    group_top = shape.plt.load(group_top_ref.at[row, groups], mask=is_there, other=-jnp.inf)
    may_win = (kept.ordered_keys(group_top) >= end.key) & prefix.is_above(group_top, own)

    def raced():
        ids, _, x = tokens_of(shape, refs, row, groups, may_win)
        is_kept = prefix.is_in_prefix(x, ids, end)
        if own.min_p is not None:
            is_kept &= prefix.is_above(x, own)
        weight = prefix.weight_below(x - race.finite_or_zero(group_top)[:, None], own)
        of_group = jnp.sum(jnp.where(is_kept, weight, 0.0), axis=1)
        # The largest logit of a group is kept if any is.
        own_top = jnp.where(of_group > 0.0, group_top, -jnp.inf)
        first_ids = noise.GROUP * jnp.where(may_win, groups, 0)  # from a load: so each thread makes the noise of its own groups
        high, low = race.scores(own_top, of_group, race.group_noise(own.keys, 0, first_ids), own.t)
        return Raced(*race.best_score(high, low, first_ids), jnp.sum(of_group * prefix.weight_of(own_top, own)))

    def nobody():
        return Raced(jnp.float32(-jnp.inf), jnp.float32(0.0), jnp.int32(race.NO_ID), jnp.float32(0.0))

    put(shape, out, (row, piece), prefix.branch(jnp.max(may_win.astype(jnp.int32)) > 0, raced, nobody))


def finish(*refs, shape: Shape, trees):
    """One row: the draw in the winning group."""
    refs, state, end, summary, raced, out = split(refs, trees)
    row = pl.program_id(0)
    pieces = lambda ref, other: padded_load(shape, ref, row, shape.num_pieces, other)  # noqa: E731
    top, total, end = fetch(shape, (state.top, state.total, end), row)
    own = row_of(shape, refs, row, top, total)
    high, low, winner = race.best_score(pieces(raced.high, -jnp.inf), pieces(raced.low, 0.0), pieces(raced.winner, race.NO_ID))
    kept_total = jnp.where(finishing.has_law(top, total), jnp.sum(pieces(raced.total, 0.0)), jnp.nan)
    first = jnp.where(winner == race.NO_ID, 0, winner)
    ids = first + lax.broadcasted_iota(jnp.int32, (noise.GROUP,), 0)
    model, x = tokens_at(shape, refs, row, ids, ids < shape.vocab)
    x = jnp.where(prefix.is_in_prefix(x, ids, end) & prefix.is_above(x, own), x, -jnp.inf)
    won = race.Race(*(a[None] for a in (high, low, winner, top, kept_total)))
    mass, t = None, own.t[None]
    if shape.with_model:
        masses = pieces(summary.model_top, -jnp.inf), pieces(summary.model_total, 0.0)
        model_top, model_total = race.mass_of(*masses, jnp.float32(1.0))
        mass = race.Mass(model_top[None], None, model_total[None])
    keys = tuple(key[None] for key in own.keys)
    draw = finishing.draw_in_group(keys, t, won, mass, first[None], ids[:, None], model[:, None], x[:, None], vocab=shape.vocab,
                                   sample=0)
    draw = filtered.with_tempered(draw, kept_total[None], top[None], total[None], t)
    put(shape, out, row, Draw(*(x.reshape(()) for x in draw)))


def draw(h, w, keys, t, options: Elementwise, filters: Filters, *, plt, vocab, vocab_axis=0, precision=None,
         with_log_probs=False, interpret=False) -> tuple[Draw, Kept]:
    """As `filtered.draw` for one token per row; and the last token of the prefix that top_k and top_p keep. Leaves `[rows]`."""
    raw, _ = operands(h, w, TritonTiles(stored=True), vocab=vocab, vocab_axis=vocab_axis, precision=precision)
    rows = raw.shape[0]
    on = {name: x for name, x in filters._asdict().items() if x is not None}
    shape = Shape(plt, vocab, options.scale, options.soft_cap, tuple(options.dense()), tuple(on), with_log_probs, interpret)
    inputs = Inputs(raw, t, tuple(keys), tuple(on.values()), tuple(given(options)))
    leaves = jax.tree.leaves(inputs)
    f32, i32 = jnp.float32, jnp.int32

    def of(kind, *size):
        return like(leaves, (rows, *size), kind)

    def launch(kernel, programs, num_warps, arguments, outputs):
        body = functools.partial(kernel, shape=shape, trees=tuple(map(jax.tree.structure, (*arguments, *outputs))))
        out = pl.pallas_call(body, grid=(programs,), out_shape=jax.tree.leaves(outputs), interpret=interpret,
                             compiler_params=plt.CompilerParams(num_warps=num_warps, num_stages=1),
                             name=f"gumbeljax_{kernel.__name__}")(*jax.tree.leaves(arguments))
        return jax.tree.unflatten(jax.tree.structure(outputs), out)

    programs, row = rows * shape.num_pieces, of(f32)
    piece, count, group = of(f32, shape.num_pieces), of(i32, shape.num_pieces), of(f32, shape.num_groups)
    model = piece if with_log_probs else None
    end, listed = Kept(of(i32), of(i32)), of(i32, shape.num_pieces * IN_GAP)
    summary, = launch(summarise, programs, 4, (inputs,), (Summary(piece, piece, model, model, group, group),))
    state = State(of(i32), row, row, of(i32), of(i32), end)
    state, _ = launch(settle, rows, 16, (inputs, summary), (state, of(i32, shape.listed)))
    swept, = launch(sweep, programs, 4, (inputs, state), (Sweep(count, count, count, listed),))
    end, _ = launch(conclude, rows, 16, (inputs, state, swept), (end, listed))
    raced, = launch(race_piece, programs, 4, (inputs, state, end, summary.group_top), (Raced(piece, piece, count, piece),))
    out, = launch(finish, rows, 1, (inputs, state, end, summary, raced), (Draw(of(i32), row, row, row, row),))
    return out, end
