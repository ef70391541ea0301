"""Draws under filters on NVIDIA GPUs: XLA's product leaves the logits, four kernels do the rest, and nothing is sorted.

    summarise   a program per piece of a row: its mass, the largest logit of every group, and one logit of every group as a sample
    settle      a program per row: the kept prefix, if the groups with the largest logits hold it, and the draw; otherwise from
                the samples, between which logits the prefix is likely to end
    sweep       a program per piece of a row that is not settled: the race of the groups that lie on one side of that gap as a
                whole, the exact mass above it, and a mark on the other groups
    conclude    a program per row: the end of the prefix among the marked groups, their race, and the draw. If the gap missed the
                end, or where both top_k and top_p need more than the largest groups, it searches the whole row.

What is kept is decided by the integers of `kept` in any case; guesses cost time only.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import filtered, finish, kept, noise, race
from pallas_kernels import triton_prefix as prefix
from pallas_kernels.finish import Draw
from pallas_kernels.kept import Filters, Kept, Mass
from pallas_kernels.logits import Elementwise, model_logits, processed_logits
from pallas_kernels.tiles import TritonTiles
from pallas_kernels.triton import operands
from pallas_kernels.triton_finish import given, like
from pallas_kernels.triton_prefix import Row, Span, Tokens, Won

PIECE = 4096  # tokens of a program that reads whole rows
LISTED = 512  # groups that a program holds in registers, 16 warps of it
SETTLED, IN_SPAN, WHOLE = range(3)


class Shape(NamedTuple):
    """What is fixed when a kernel is traced."""

    plt: Any
    vocab: int
    scale: float | None
    soft_cap: float | None
    dense: tuple[str, ...]
    filters: tuple[str, ...]
    with_model: bool
    interpret: bool

    @property
    def num_groups(self) -> int:
        return pl.cdiv(self.vocab, noise.GROUP)

    @property
    def piece(self) -> int:
        """Groups of a piece."""
        return min(PIECE // noise.GROUP, pl.next_power_of_2(self.num_groups))

    @property
    def num_pieces(self) -> int:
        return pl.cdiv(self.num_groups, self.piece)

    @property
    def listed(self) -> int:
        return min(LISTED, pl.next_power_of_2(self.num_groups))


class Summary(NamedTuple):
    """Of the rows: `[rows, pieces]` and `[rows, groups]`."""

    top: Any
    total: Any
    model_top: Any  # None without log-probs, as the next
    model_total: Any
    group_top: Any
    sample: Any


class State(NamedTuple):
    """What is known about each row before the sweep, `[rows]`."""

    state: Any
    top: Any
    total: Any
    low: Any  # keys between which the prefix ends
    high: Any
    model_top: Any
    model_total: Any


class Answer(NamedTuple):
    """Each `[rows]`: the draw, and the last token of the prefix that top_k and top_p keep."""

    token: Any
    model_log_prob: Any
    tempered_log_prob: Any
    processed_log_prob: Any
    log_normalizer: Any
    key: Any
    id: Any


class Sweep(NamedTuple):
    """Of the pieces, `[rows, pieces]`: the best of the decided groups, and the mass above the gap; `[rows, groups]`: marks."""

    high: Any
    low: Any
    winner: Any
    total: Any
    whole: Any
    fine: Any
    is_marked: Any


class Inputs(NamedTuple):
    """Refs that every kernel reads: raw logits f32 [rows, vocab], and by row or by token what `given` lists."""

    raw: Any
    t: Any
    keys: tuple
    filters: tuple
    dense: tuple


def split(refs, trees):
    """The flat list of refs as these structures, in turn."""
    refs, out = list(refs), []
    for tree in trees:
        out.append(jax.tree.unflatten(tree, refs[:tree.num_leaves]))
        refs = refs[tree.num_leaves:]
    return out


def tokens_at(shape: Shape, refs: Inputs, row, ids, exists):
    """(model logits, processed logits) of token ids of one row, of any shape; -inf where they do not exist."""
    def read(ref, other):
        x = shape.plt.load(ref.at[ids] if len(ref.shape) == 1 else ref.at[row, ids], mask=exists, other=other)
        return x != 0 if x.dtype == jnp.int8 else x

    own = Elementwise(**{name: read(ref, 0) for name, ref in zip(shape.dense, refs.dense, strict=True)})
    model = model_logits(read(refs.raw, 0.0), shape.scale, shape.soft_cap, own.weight_scale)
    return processed_logits(model, Elementwise(), exists), processed_logits(model, own, exists)


def ids_of(groups):
    """Token ids `[groups, 16]`."""
    return noise.GROUP * groups[:, None] + lax.broadcasted_iota(jnp.int32, (1, noise.GROUP), 1)


def row_of(shape: Shape, refs: Inputs, row, top=None, total=None) -> Row:
    number = lambda ref: shape.plt.load(ref.at[row])  # noqa: E731
    filters = dict(zip(shape.filters, map(number, refs.filters), strict=True))
    return Row(tuple(map(number, refs.keys)), number(refs.t), top, total, *map(filters.get, Filters._fields))


def put(shape: Shape, refs, where, values):
    """Stores scalars."""
    for ref, value in zip(jax.tree.leaves(refs), jax.tree.leaves(values), strict=True):
        shape.plt.store(ref.at[where], value)


def padded_load(shape: Shape, ref, row, size: int, other):
    """`[next power of 2]`: the first `size` entries of a row."""
    place = lax.broadcasted_iota(jnp.int32, (pl.next_power_of_2(size),), 0)
    return shape.plt.load(ref.at[row, place], mask=place < size, other=other)


def write_list(shape: Shape, list_ref, row, is_listed):
    """Writes the indices of marked groups `[padded groups]` in order, and returns how many there are."""
    place = jnp.cumsum(is_listed.astype(jnp.int32)) - 1
    groups = lax.broadcasted_iota(jnp.int32, is_listed.shape, 0)
    shape.plt.store(list_ref.at[row, jnp.where(is_listed, place, shape.num_groups)], groups, mask=is_listed)
    if not shape.interpret:
        shape.plt.debug_barrier()  # other threads of this program read the list
    return jnp.sum(is_listed, dtype=jnp.int32)


def listed_tokens(shape: Shape, refs: Inputs, list_ref, row, num_listed, is_whole=None) -> Tokens:
    """The tokens of the listed groups, or of all groups, `shape.listed` groups at a time."""
    def load(block):
        place = block * shape.listed + lax.broadcasted_iota(jnp.int32, (shape.listed,), 0)
        groups = shape.plt.load(list_ref.at[row, place], mask=place < num_listed, other=0)
        exists = place < num_listed
        if is_whole is not None:
            groups, exists = jnp.where(is_whole, place, groups), jnp.where(is_whole, place < shape.num_groups, exists)
        ids = ids_of(groups)
        return tokens_at(shape, refs, row, ids, exists[:, None] & (ids < shape.vocab))[1], ids

    if is_whole is None:
        return Tokens(load(0))
    groups = jnp.where(is_whole, shape.num_groups, num_listed)
    return Tokens(load(0), load, lax.div(groups + shape.listed - 1, jnp.int32(shape.listed)))


def answer(shape: Shape, refs: Inputs, row, own: Row, end: Kept, won: Won, model_top, model_total) -> Answer:
    """The draw in the winning group."""
    first = jnp.where(won.winner == race.NO_ID, 0, won.winner)
    ids = first + lax.broadcasted_iota(jnp.int32, (noise.GROUP,), 0)
    model, x = tokens_at(shape, refs, row, ids, ids < shape.vocab)
    is_kept = kept.is_kept(kept.ordered_keys(x), ids, end) & prefix.is_above(x, own)
    x = jnp.where(is_kept, x, -jnp.inf)
    total = jnp.where(finish.has_law(own.top, own.total), won.total, jnp.nan)
    race_won = race.Race(*(a[None] for a in (won.high, won.low, won.winner, own.top, total)))
    mass = race.Mass(model_top[None], None, model_total[None]) if shape.with_model else None
    t = own.t[None]
    draw = finish.draw_in_group(tuple(key[None] for key in own.keys), t, race_won, mass, first[None], ids[:, None],
                                model[:, None], x[:, None], vocab=shape.vocab, sample=0)
    draw = filtered.with_tempered(draw, total[None], own.top[None], own.total[None], t)
    return Answer(*map(jnp.sum, draw), end.key, end.id)


def summarise(*refs, shape: Shape, trees):
    """One piece: masses, the largest logit of each group, and one of its logits."""
    refs, out = split(refs, trees)
    row, piece = lax.div(pl.program_id(0), jnp.int32(shape.num_pieces)), lax.rem(pl.program_id(0), jnp.int32(shape.num_pieces))
    own = row_of(shape, refs, row)
    groups = piece * shape.piece + lax.broadcasted_iota(jnp.int32, (shape.piece,), 0)
    ids = ids_of(groups)
    model, x = tokens_at(shape, refs, row, ids, ids < shape.vocab)
    group_top = jnp.max(x, axis=1)
    top = jnp.max(group_top)
    total = jnp.sum(prefix.weight_of(x, own._replace(top=top)))
    lane = (ids + 5 * (groups + (groups >> 4))[:, None]) & (noise.GROUP - 1)
    sample = jnp.max(jnp.where(lane == 0, x, -jnp.inf), axis=1)
    put(shape, (out.top, out.total), (row, piece), (top, total))
    if shape.with_model:
        model_top = jnp.max(model)
        put(shape, (out.model_top, out.model_total), (row, piece),
            (model_top, jnp.sum(jnp.exp(model - race.finite_or_zero(model_top)))))
    for ref, value in ((out.group_top, group_top), (out.sample, sample)):
        shape.plt.store(ref.at[row, groups], value, mask=groups < shape.num_groups)


def settle(*refs, shape: Shape, trees):
    """One row: its kept set and draw, or where to look for them."""
    refs, given, state, out, list_ref = split(refs, trees)
    row = pl.program_id(0)
    pieces = lambda ref, other: padded_load(shape, ref, row, shape.num_pieces, other)  # noqa: E731
    t = shape.plt.load(refs.t.at[row])
    top, total = race.mass_of(pieces(given.top, -jnp.inf), pieces(given.total, 0.0), t)
    model_top = model_total = jnp.float32(0.0)
    if shape.with_model:
        model_top, model_total = race.mass_of(pieces(given.model_top, -jnp.inf), pieces(given.model_total, 0.0), jnp.float32(1))
    own = row_of(shape, refs, row, top, total)
    has_law = finish.has_law(top, total)
    if own.top_k is not None:
        own = own._replace(top_k=jnp.where(has_law, own.top_k, 0))
    if own.top_p is not None:
        own = own._replace(top_p=jnp.where(has_law, own.top_p, 1.0))

    group_top = padded_load(shape, given.group_top, row, shape.num_groups, -jnp.inf)
    over = lambda low: jnp.sum(group_top >= low, dtype=jnp.int32)  # noqa: E731
    lowest = jnp.min(jnp.where(group_top > -jnp.inf, group_top, jnp.inf))
    is_whole = jnp.sum(group_top > -jnp.inf, dtype=jnp.int32) <= shape.listed

    def halve(state):
        low, high, num_over, rounds = state
        middle = 0.5 * low + 0.5 * high
        num = over(middle)
        fits = num <= shape.listed
        return (jnp.where(fits, low, middle), jnp.where(fits, middle, high), jnp.where(fits, num, num_over), rounds + 1)

    def is_open(state):
        return ~is_whole & (state[2] < shape.listed // 2) & (state[3] < 24)

    _, high, num_over, _ = lax.while_loop(is_open, halve, (lowest, top, over(top), jnp.int32(0)))
    lowest_listed = jnp.where(is_whole, prefix.LEAST_FINITE, jnp.where(num_over > shape.listed, jnp.inf, high))
    is_listed = has_law & (group_top >= lowest_listed) & (group_top < jnp.inf)
    tokens = listed_tokens(shape, refs, list_ref, row, write_list(shape, list_ref, row, is_listed))
    span = Span(kept.ordered_keys(lowest_listed), kept.ordered_keys(top) + 1, prefix.nothing())
    found = prefix.search(tokens, own, span, is_whole, shape.vocab)
    is_k, is_p = prefix.is_on(own, shape.vocab)
    is_settled = ~has_law | is_whole | found.is_found
    if own.min_p is not None:  # and neither of the others is left in the dark
        is_settled |= ~prefix.is_above(lowest_listed, own) & ~(is_k & is_p)

    def drawn():
        x, ids = tokens.first
        is_kept = kept.is_kept(kept.ordered_keys(x), ids, found.end) & prefix.is_above(x, own)
        won = prefix.race_of(jnp.where(is_kept, x, -jnp.inf), ids, own)
        zero = jnp.int32(0)
        return answer(shape, refs, row, own, found.end, won, model_top, model_total), (jnp.int32(SETTLED), zero, zero)

    def guessed():
        samples = padded_load(shape, given.sample, row, shape.num_groups, jnp.inf)
        start = jnp.min(jnp.where(samples > -jnp.inf, samples, jnp.inf))
        low, high = prefix.undecided_span(samples, own, is_k, start, shape.vocab)
        low = kept.ordered_keys(jnp.where(low > start, low, prefix.LEAST_FINITE))
        high = kept.ordered_keys(high) + (high >= top).astype(jnp.int32)
        is_off = ~is_k & ~is_p  # all is above the span
        least = kept.ordered_keys(jnp.float32(prefix.LEAST_FINITE))
        low, high = jnp.where(is_off, least, low), jnp.where(is_off, least, high)
        none = Answer(jnp.int32(-1), *[jnp.float32(jnp.nan)] * 4, jnp.int32(0), jnp.int32(0))
        return none, (jnp.where(is_k & is_p, jnp.int32(WHOLE), jnp.int32(IN_SPAN)), low, high)

    drawn_or_not, (kind, low, high) = prefix.branch(is_settled, drawn, guessed)
    put(shape, out, row, drawn_or_not)
    put(shape, state, row, State(kind, top, total, low, high, model_top, model_total))


def state_of(shape: Shape, state: State, row) -> State:
    return State(*(shape.plt.load(ref.at[row]) for ref in state))


def sweep(*refs, shape: Shape, trees):
    """One piece of a row in which no group is settled yet."""
    refs, state, out = split(refs, trees)
    row, piece = lax.div(pl.program_id(0), jnp.int32(shape.num_pieces)), lax.rem(pl.program_id(0), jnp.int32(shape.num_pieces))

    @pl.when(shape.plt.load(state.state.at[row]) == IN_SPAN)
    def _():
        known = state_of(shape, state, row)
        own = row_of(shape, refs, row, known.top, known.total)
        groups = piece * shape.piece + lax.broadcasted_iota(jnp.int32, (shape.piece,), 0)
        ids = ids_of(groups)
        x = tokens_at(shape, refs, row, ids, ids < shape.vocab)[1]
        keys = kept.ordered_keys(x)
        is_over = keys >= known.high
        is_marked = jnp.max(((keys >= known.low) & ~is_over).astype(jnp.int32), axis=1)
        is_k, is_p = prefix.is_on(own, shape.vocab)
        mass = prefix.ones(x, ids)
        if own.top_p is not None:
            mass = Mass(*(jnp.where(is_p, a, b) for a, b in zip(prefix.masses(own)(x, ids), mass, strict=True)))
        mass = prefix.chosen(mass, is_over)
        is_kept = is_over & (is_marked == 0)[:, None] & prefix.is_above(x, own)
        won = prefix.race_of(jnp.where(is_kept, x, -jnp.inf), ids, own)
        whole, fine = kept.carried(*map(prefix.number, mass))
        put(shape, out[:6], (row, piece), (*won, whole, fine))
        shape.plt.store(out.is_marked.at[row, groups], is_marked, mask=groups < shape.num_groups)


def conclude(*refs, shape: Shape, trees):
    """One row: its draw, if it has none yet."""
    refs, state, settled, swept, out, list_ref = split(refs, trees)
    row = pl.program_id(0)
    kind = shape.plt.load(state.state.at[row])

    def copied():
        return Answer(*(shape.plt.load(ref.at[row]) for ref in settled))

    def found():
        known = state_of(shape, state, row)
        own = row_of(shape, refs, row, known.top, known.total)
        is_k, is_p = prefix.is_on(own, shape.vocab)
        is_swept = kind == IN_SPAN
        pieces = lambda ref, other: jnp.where(is_swept, padded_load(shape, ref, row, shape.num_pieces, other), other)  # noqa: E731
        above = kept.carried(prefix.number(pieces(swept.whole, 0)), prefix.number(pieces(swept.fine, 0)))
        marks = padded_load(shape, swept.is_marked, row, shape.num_groups, 0)
        num_listed = write_list(shape, list_ref, row, is_swept & (marks != 0))

        def in_span():
            tokens = listed_tokens(shape, refs, list_ref, row, num_listed, jnp.bool_(False))
            span = Span(known.low, known.high, above)
            found = prefix.search(tokens, own, span, jnp.bool_(False), shape.vocab)
            return found.end, found.is_found | ~(is_k | is_p)

        def nowhere():
            return prefix.no_end(shape.vocab), jnp.bool_(False)

        end, is_found = prefix.branch(is_swept, in_span, nowhere)
        tokens = listed_tokens(shape, refs, list_ref, row, num_listed, ~is_found)

        def in_row():
            span = Span(kept.ordered_keys(jnp.float32(prefix.LEAST_FINITE)), kept.ordered_keys(own.top) + 1, prefix.nothing())
            return prefix.search(tokens, own, span, jnp.bool_(True), shape.vocab).end

        end = prefix.branch(is_found, lambda: end, in_row)
        use = lambda ref, other: jnp.where(is_found, pieces(ref, other), other)  # noqa: E731
        decided = Won(*race.best_score(use(swept.high, -jnp.inf), use(swept.low, 0.0), use(swept.winner, race.NO_ID)),
                      jnp.sum(use(swept.total, 0.0)))

        def raced(won, x, ids):
            is_kept = kept.is_kept(kept.ordered_keys(x), ids, end) & prefix.is_above(x, own)
            return Won(*prefix.merged(Won(*won), prefix.race_of(jnp.where(is_kept, x, -jnp.inf), ids, own)))

        won = prefix.fold(tokens, raced, decided)
        return answer(shape, refs, row, own, end, won, known.model_top, known.model_total)

    put(shape, out, row, prefix.branch(kind == SETTLED, copied, found))


def draw(h, w, keys, t, options: Elementwise, filters: Filters, *, plt, vocab, vocab_axis=0, precision=None,
         with_log_probs=False, interpret=False) -> tuple[Draw, Kept]:
    """As `filtered.draw` for one token per row; and the end of the prefix that top_k and top_p keep, each leaf `[rows]`."""
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

    piece, group, groups = of(f32, shape.num_pieces), of(f32, shape.num_groups), of(i32, shape.num_groups)
    count, model = of(i32, shape.num_pieces), piece if with_log_probs else None
    programs = rows * shape.num_pieces
    summary, = launch(summarise, programs, 4, (inputs,), (Summary(piece, piece, model, model, group, group),))
    state = State(of(i32), of(f32), of(f32), of(i32), of(i32), of(f32), of(f32))
    answers = Answer(of(i32), *[of(f32)] * 4, of(i32), of(i32))
    state, settled, _ = launch(settle, rows, 16, (inputs, summary), (state, answers, groups))
    swept, = launch(sweep, programs, 4, (inputs, state), (Sweep(piece, piece, count, piece, count, count, groups),))
    answers, _ = launch(conclude, rows, 16, (inputs, state, settled, swept), (answers, groups))
    return Draw(*answers[:5]), Kept(answers.key, answers.id)
