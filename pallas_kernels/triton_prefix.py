"""The kept prefix of one row inside a kernel: the search of `kept`, over tokens that a program holds or streams.

Numbers of the row are scalars here. Tokens come in blocks `[groups, 16]`; the first stays in registers, so that a search over
few tokens touches no memory. The rules and the integers are those of `kept`, but for the mass of a whole row, which is a
float32 sum here: what top_p keeps is that of `kept` to 1e-6 of p.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import kept, noise, race
from pallas_kernels.kept import LOWEST, Kept, Mass
from pallas_kernels.logits import LOG2_E, inverse_temperature

MOST = 2**31 - 1
LEAST_FINITE = -3.4028235e38
FEW = 512  # tokens among which 16 edges are tried at a time


class Row(NamedTuple):
    """What a program knows about its row; a filter that is not there is None."""

    keys: tuple  # the two words of the row's key
    t: Any
    top: Any  # of the processed logits
    total: Any  # sum exp((l - top) / T)
    top_k: Any
    top_p: Any
    min_p: Any


class Tokens(NamedTuple):
    """Blocks of (logits, ids), each `[groups, 16]`; logits of what does not exist are -inf. The first are `held`, in registers;
    `load(block)` fetches any of them, and then they are in order of id. Without `load` one is held, and that is all."""

    held: tuple
    load: Callable | None = None
    num_blocks: Any = 0


class Span(NamedTuple):
    """Where a prefix ends: at a key in [low, high). `above` is the mass from `high` on that the tokens given do not have."""

    low: Any
    high: Any
    above: Mass


class Few(NamedTuple):
    """Memory for the ids of a few tokens: `store(places, ids, mask)` writes them, `load(number)` reads them back with their
    logits, (logits, ids) `[1, FEW]`; from `number` on the logits are -inf."""

    store: Callable
    load: Callable


def fold(tokens: Tokens, f, init, start=0):
    """`carry = f(carry, logits, ids)` over the blocks; `start` is the first of those that are fetched."""
    carry = init
    for x, ids in tokens.held:
        carry = f(carry, x, ids)
    if (load := tokens.load) is None:
        return carry
    one = lambda block, carry: f(carry, *load(jnp.asarray(block, jnp.int32)))  # noqa: E731
    return lax.fori_loop(max(start, len(tokens.held)), tokens.num_blocks, one, carry)


def branch(condition, a, b):
    """`lax.cond(condition, a, b)`, whose results may be constants: Triton's lowering wants operations."""
    made = lambda f: lambda: jax.tree.map(lambda x: jnp.where(condition, x, x), f())  # noqa: E731
    return lax.cond(condition, made(a), made(b))


def number(x):
    """Sum of a tile to an int32 scalar."""
    return jnp.sum(x, dtype=jnp.int32)


def cumsum(x):
    """Along the last axis, int32."""
    return lax.cumsum(x, axis=x.ndim - 1)


def total_of(mass: Mass, where, axis=None) -> Mass:
    """The mass of the tokens where the condition holds, along an axis or altogether, not carried."""
    add = lambda words: jnp.sum(jnp.where(where, words, 0), axis=axis, dtype=jnp.int32)  # noqa: E731
    whole = add(mass.whole)
    return Mass(whole, whole - whole if mass.fine is None else add(mass.fine))


def plus(a: Mass, b: Mass) -> Mass:
    """Their sum, carried."""
    return kept.carried(a.whole + b.whole, a.fine + b.fine)


def add_up(tokens: Tokens, measure, where, start: Mass) -> Mass:
    """`start` and the mass of the tokens where the condition, of logits and ids, holds."""
    def f(carry, x, ids):
        mass = total_of(measure(x, ids), where(x, ids))
        return carry[0] + mass.whole, carry[1] + mass.fine

    return kept.carried(*fold(tokens, f, tuple(start)))


def nothing() -> Mass:
    """The mass of no token."""
    return Mass(jnp.int32(0), jnp.int32(0))


def no_end(vocab: int) -> Kept:
    """The end of a prefix that is everything."""
    return Kept(jnp.int32(LOWEST), jnp.int32(vocab))


def has_mass(mass: Mass):
    """Where it is not 0."""
    return (mass.whole if mass.fine is None else mass.whole | mass.fine) != 0


def either(condition, a, b):
    """`a` where the scalar condition holds, else `b`; tuples of scalars."""
    return type(a)(*(jnp.where(condition, x, y) for x, y in zip(a, b, strict=True)))


def least_of(a: Mass, b: Mass) -> Mass:
    """The smaller of two scalar masses."""
    return either(kept.at_least(a, b), b, a)


def ones(x, ids) -> Mass:
    """The measure of a count: tokens that are there. It has no fine words."""
    del ids
    return Mass((x > -jnp.inf).astype(jnp.int32), None)


def weight_of(x, row: Row):
    """`exp((x - top) / T)`"""
    return weight_below(x - race.finite_or_zero(row.top), row)


def weight_below(gap, row: Row):
    """`exp(gap / T)`, as a power of 2, which takes half the instructions."""
    return jnp.exp2(gap * (LOG2_E * inverse_temperature(row.t)))


def is_in_prefix(x, ids, end: Kept):
    """As `kept.is_kept`, by the order of the logits themselves; what is -inf or NaN is in no prefix."""
    edge = jnp.where(end.key == LOWEST, LEAST_FINITE, kept.logits_of(end.key))
    return (x > edge) | ((x == edge) & (ids <= end.id))


def masses(row: Row):
    """The measure of top_p, in fixed point."""
    return lambda x, ids: kept.fixed_point(weight_of(x, row), row.total[None])


def everything(row: Row) -> Mass:
    """The mass of the whole row, from its float32 sum."""
    return Mass(*(number(m) for m in kept.fixed_point(row.total[None, None], row.total[None])))


def is_above(x, row: Row):
    """What min_p keeps."""
    if row.min_p is None:
        return x > -jnp.inf
    return (x > -jnp.inf) & kept.is_above(x, row.t, row.top, row.min_p)


def end_of_prefix(tokens: Tokens, measure, target: Mass, span: Span, few: Few, vocab: int) -> Kept:
    """The end of the shortest prefix whose mass is at least `target`; it lies in the span.

    While the span holds more than a few tokens it is cut in the middle of its logits and in the middle of its keys by turns.
    The few are written down and read again, one by a thread, and a round cuts their span into 16.
    """
    in_span = lambda keys: (keys >= span.low) & (keys < span.high)  # noqa: E731

    def measured(x, ids):
        return kept.ordered_keys(x), measure(x, ids)

    held = tuple(measured(*block) for block in tokens.held)

    def fold_measured(f, init):
        """As `fold`, with keys and masses, those of `held` computed once."""
        carry = init
        for block in held:
            carry = f(carry, *block)
        rest = lambda carry, x, ids: f(carry, *measured(x, ids))  # noqa: E731
        return fold(tokens._replace(held=()), rest, carry, start=len(held))

    def halve(state):
        low, high, above_whole, above_fine, left, by_value = state
        value = 0.5 * kept.logits_of(low) + 0.5 * kept.logits_of(high)
        middle = jnp.where(by_value, kept.ordered_keys(value), (low >> 1) + (high >> 1) + (low & high & 1))
        middle = jnp.minimum(jnp.maximum(middle, low + 1), high - 1)

        def look(carry, keys, mass):
            whole, fine, least, number_over = carry
            is_over = (keys >= middle) & (keys < high)
            mass = total_of(mass, is_over)
            return (whole + mass.whole, fine + mass.fine, jnp.minimum(least, jnp.min(jnp.where(is_over, keys, MOST))),
                    number_over + number(is_over))

        *mass, least, number_over = fold_measured(look, (above_whole, above_fine, jnp.int32(MOST), jnp.int32(0)))
        whole, fine = kept.carried(*mass)
        yes = kept.at_least(Mass(whole, fine), target)
        return (jnp.where(yes, least, low), jnp.where(yes, high, middle), jnp.where(yes, above_whole, whole),
                jnp.where(yes, above_fine, fine), jnp.where(yes, number_over, left - number_over), ~by_value)

    left = fold_measured(lambda left, keys, mass: left + number(in_span(keys)), jnp.int32(0))
    low, high, *above, left, _ = lax.while_loop(lambda state: (state[0] + 1 < state[1]) & (state[4] > FEW), halve,
                                                (span.low, span.high, *span.above, left, jnp.bool_(True)))

    def write_down(count, x, ids):
        is_in = (kept.ordered_keys(x) >= low) & (kept.ordered_keys(x) < high)
        in_group = is_in.astype(jnp.int32)
        of_group = jnp.sum(in_group, axis=1, dtype=jnp.int32)
        few.store((count + cumsum(of_group) - of_group)[:, None] + cumsum(in_group) - 1, ids, is_in)
        return count + number(of_group)

    def cut_in_16():
        fold(tokens, write_down, jnp.int32(0))
        keys, mass = jax.tree.map(lambda a: jnp.max(a, axis=0)[:, None], measured(*few.load(left)))

        def cut(ends):
            def edges(shape):
                """15 keys inside, and the high end."""
                gap = lax.bitcast_convert_type(ends[1] - ends[0], jnp.uint32)
                step = lax.broadcasted_iota(jnp.uint32, shape, len(shape) - 1) + jnp.uint32(1)
                width = (gap >> jnp.uint32(4)) * step + (((gap & jnp.uint32(15)) * step) >> jnp.uint32(4))
                return ends[0] + lax.bitcast_convert_type(width, jnp.int32)

            yes = kept.at_least(plus(Mass(*above), total_of(mass, keys >= edges((1, 16)), axis=0)), target)
            return jnp.max(jnp.where(yes, edges((16,)), ends[0])), jnp.min(jnp.where(yes, ends[1], edges((16,))))

        return lax.while_loop(lambda ends: ends[0] + 1 < ends[1], cut, (low, high))[0]

    key = branch(low + 1 < high, cut_in_16, lambda: low)
    is_tied = lambda keys, mass: (keys == key) & has_mass(mass)  # noqa: E731
    num_tied = fold_measured(lambda count, keys, mass: count + number(is_tied(keys, mass)), jnp.int32(0))

    def first_ids():
        """The id of the last of as many tied tokens as it takes. Where there are more blocks than one, ids are in order."""
        def look_at_tie(carry, keys, mass):
            over, tied = total_of(mass, (keys > key) & (keys < span.high)), is_tied(keys, mass)
            most = [jnp.int32(0) if m is None else jnp.max(jnp.where(tied, m, 0)) for m in mass]
            return carry[0] + over.whole, carry[1] + over.fine, *map(jnp.maximum, carry[2:], most)

        *over, whole, fine = fold_measured(look_at_tie, (*span.above, jnp.int32(0), jnp.int32(0)))  # equal logits, equal masses
        over = kept.carried(*over)

        def too_few(n):
            return ~kept.at_least(kept.carried(over.whole + n * whole, over.fine + n * fine), target)

        needed = kept.bisect(too_few, jnp.int32(0), num_tied, vocab.bit_length())[1]

        if tokens.load is None:
            ((keys, mass),), ((_, ids),) = held, tokens.held
            tied = is_tied(keys, mass)
            fewer = lambda id: number(tied & (ids < id)) < needed  # noqa: E731
            return kept.bisect(fewer, jnp.int32(0), jnp.int32(vocab), vocab.bit_length())[0]

        def count_ties(carry, x, ids):
            count, last = carry
            tied = is_tied(*measured(x, ids)).astype(jnp.int32)
            of_group = jnp.sum(tied, axis=1, dtype=jnp.int32)
            place = (count + cumsum(of_group) - of_group)[:, None] + cumsum(tied)
            return count + number(of_group), jnp.maximum(last, jnp.max(jnp.where((tied > 0) & (place == needed), ids, -1)))

        return fold(tokens._replace(held=()), count_ties, (jnp.int32(0), jnp.int32(-1)))[1]

    return Kept(key, branch(num_tied > 1, first_ids, lambda: jnp.int32(vocab)))


class Found(NamedTuple):
    """The end of the prefix that top_k and top_p keep, and whether the tokens given settle it."""

    end: Kept
    is_found: Any


def search(tokens: Tokens, row: Row, span: Span, few: Few, is_whole, vocab: int) -> Found:
    """The prefix that top_k, then top_p keep. The tokens given have all tokens in the span, and `is_whole` says that they have
    all those below it that exist, too. A span with a mass above it has only one of the two filters on.

    Where the end is not in the span the prefix is longer, and this says that it was not found.
    """
    is_k, is_p = is_on(row, vocab)
    end, k_found, p_found = no_end(vocab), ~is_k, is_k & ~is_k
    in_span = lambda x, ids: (kept.ordered_keys(x) >= span.low) & (kept.ordered_keys(x) < span.high)  # noqa: E731
    if row.top_k is not None:
        there = add_up(tokens, ones, in_span, span.above)
        k_found = ~is_k | is_whole | ((there.whole >= row.top_k) & (span.above.whole < row.top_k))
        target = Mass(jnp.minimum(row.top_k, there.whole), jnp.int32(0))
        end = branch(is_k & k_found, lambda: end_of_prefix(tokens, ones, target, span, few, vocab), lambda: no_end(vocab))
    if row.top_p is not None:
        measure, of_k = masses(row), end
        is_inside = lambda x, ids: kept.is_kept(kept.ordered_keys(x), ids, of_k)  # noqa: E731
        inside, base = measure, everything(row)
        if row.top_k is not None:
            inside = lambda x, ids: Mass(*(jnp.where(is_inside(x, ids), m, 0) for m in measure(x, ids)))  # noqa: E731
            base = either(is_k, branch(is_k & is_p, lambda: add_up(tokens, measure, is_inside, nothing()), nothing), base)
        target = kept.share(base, row.top_p)
        there = add_up(tokens, inside, in_span, span.above)
        enough = kept.at_least(there, target) & ~kept.at_least(span.above, target)
        p_found = is_p & k_found & (is_whole | enough)
        target = least_of(target, there)
        key, id = branch(p_found, lambda: end_of_prefix(tokens, inside, target, span, few, vocab), lambda: of_k)
        end = Kept(key, jnp.where(key == of_k.key, jnp.minimum(id, of_k.id), id))  # more may be tied than top_k left
    return Found(end, ~(is_p & ~k_found) & ((is_k & k_found) | p_found))


def is_on(row: Row, vocab: int):
    """Whether top_k and top_p cut this row."""
    off = row.t > row.t  # Triton's lowering negates no constant
    is_k = off if row.top_k is None else (row.top_k > 0) & (row.top_k < vocab)
    return is_k, off if row.top_p is None else row.top_p < 1.0


def undecided_span(samples, row: Row, by_count, lowest, vocab: int):
    """(low, high): logits between which the end of the prefix is likely to lie, from one logit of each group, of any shape.

    What is dropped has nearly known mass: that of the samples below a logit, 16 times, has a standard deviation of at most
    `sqrt(16 w mass)` for weights up to w. Of a count, where w is 1, the share that is not below takes its part away from it.
    """
    dropped = jnp.float32(0.0) if row.top_p is None else (1.0 - row.top_p) * row.total
    if row.top_k is not None:
        dropped = jnp.where(by_count, (vocab - row.top_k).astype(jnp.float32), dropped)
    weights = jnp.where(by_count, 1.0, weight_of(samples, row))

    def below(value):
        mass = noise.GROUP * jnp.sum(jnp.sum(jnp.where(samples < value, weights, 0.0), axis=0))
        largest = jnp.where(by_count, jnp.maximum(1.0 - mass / vocab, 0.0), weight_of(value, row))
        return mass, 3.5 * jnp.sqrt(noise.GROUP * largest * mass)

    def halve(_, ends):
        low, low_end, high_start, high = ends
        middle_low, middle_high = 0.5 * (low + low_end), 0.5 * (high_start + high)
        mass, spread = below(middle_low)
        is_low = mass + spread <= dropped
        mass, spread = below(middle_high)
        is_high = mass - spread >= dropped
        return (jnp.where(is_low, middle_low, low), jnp.where(is_low, low_end, middle_low),
                jnp.where(is_high, high_start, middle_high), jnp.where(is_high, middle_high, high))

    low, _, _, high = lax.fori_loop(0, 11, halve, (lowest, row.top, lowest, row.top))
    return low, high
