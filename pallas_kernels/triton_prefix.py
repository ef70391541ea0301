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
    """Blocks of (logits, ids), each `[groups, 16]`, in order of id; logits of what does not exist are -inf. Those of `held` are
    in registers, and `load(block)` fetches further ones."""

    held: tuple
    load: Callable | None = None
    num_blocks: Any = 0


class Span(NamedTuple):
    """Where a prefix ends: at a key in [low, high). `above` is the mass from `high` on that the tokens given do not have."""

    low: Any
    high: Any
    above: Mass


def fold(tokens: Tokens, f, init):
    """`carry = f(carry, logits, ids)` over the blocks."""
    carry = init
    for x, ids in tokens.held:
        carry = f(carry, x, ids)
    if (load := tokens.load) is None:
        return carry
    one = lambda block, carry: f(carry, *load(jnp.asarray(block, jnp.int32)))  # noqa: E731
    return lax.fori_loop(len(tokens.held), tokens.num_blocks, one, carry)


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


def add_up(tokens: Tokens, measure, start: Mass) -> Mass:
    """`start` and the mass of the tokens."""
    def f(carry, x, ids):
        whole, fine = measure(x, ids)
        return carry[0] + number(whole), carry[1] + number(fine)

    return kept.carried(*fold(tokens, f, tuple(start)))


def nothing() -> Mass:
    """The mass of no token."""
    return Mass(jnp.int32(0), jnp.int32(0))


def no_end(vocab: int) -> Kept:
    """The end of a prefix that is everything."""
    return Kept(jnp.int32(LOWEST), jnp.int32(vocab))


def chosen(mass: Mass, where) -> Mass:
    """The masses of the tokens where the condition holds, 0 elsewhere."""
    return Mass(*(jnp.where(where, m, 0) for m in mass))


def has_mass(mass: Mass):
    """Where it is not 0."""
    return (mass.whole | mass.fine) != 0


def either(condition, a, b):
    """`a` where the scalar condition holds, else `b`; tuples of scalars."""
    return type(a)(*(jnp.where(condition, x, y) for x, y in zip(a, b, strict=True)))


def least_of(a: Mass, b: Mass) -> Mass:
    """The smaller of two scalar masses."""
    return either(kept.at_least(a, b), b, a)


def ones(x, ids) -> Mass:
    """The measure of a count: tokens that are there."""
    del ids
    return Mass((x > -jnp.inf).astype(jnp.int32), jnp.zeros_like(x, jnp.int32))


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


def end_of_prefix(tokens: Tokens, measure, target: Mass, span: Span, vocab: int) -> Kept:
    """The end of the shortest prefix whose mass is at least `target`; it lies in the span.

    The gap of the span is cut in the middle of its logits and in the middle of its keys by turns, and its ends jump to the
    nearest tokens: as many rounds as it takes to halve the tokens a few times, and never more than some 70.
    """
    def one_round(state):
        low, high, above_whole, above_fine, by_value = state
        value = 0.5 * kept.logits_of(low) + 0.5 * kept.logits_of(high)
        middle = jnp.where(by_value, kept.ordered_keys(value), (low >> 1) + (high >> 1) + (low & high & 1))
        middle = jnp.minimum(jnp.maximum(middle, low + 1), high - 1)

        def look(carry, x, ids):
            whole, fine, least, most = carry
            keys = kept.ordered_keys(x)
            is_over = (keys >= middle) & (keys < high)
            mass = chosen(measure(x, ids), is_over)
            return (whole + number(mass.whole), fine + number(mass.fine),
                    jnp.minimum(least, jnp.min(jnp.where(is_over, keys, MOST))),
                    jnp.maximum(most, jnp.max(jnp.where(keys < middle, keys, LOWEST))))

        whole, fine, least, most = fold(tokens, look, (above_whole, above_fine, jnp.int32(MOST), low))
        whole, fine = kept.carried(whole, fine)
        yes = kept.at_least(Mass(whole, fine), target)
        return (jnp.where(yes, least, low), jnp.where(yes, high, most + 1), jnp.where(yes, above_whole, whole),
                jnp.where(yes, above_fine, fine), ~by_value)

    key, _, *above, _ = lax.while_loop(lambda state: state[0] + 1 < state[1], one_round,
                                       (span.low, span.high, *span.above, jnp.bool_(True)))
    above = Mass(*above)

    def look_at_tie(carry, x, ids):
        mass = chosen(measure(x, ids), kept.ordered_keys(x) == key)
        count, whole, fine = carry
        return count + number(has_mass(mass)), jnp.maximum(whole, jnp.max(mass.whole)), jnp.maximum(fine, jnp.max(mass.fine))

    num_tied, *one = fold(tokens, look_at_tie, (jnp.int32(0),) * 3)  # equal logits have equal masses

    def too_few(n):
        return ~kept.at_least(kept.carried(above.whole + n * one[0], above.fine + n * one[1]), target)

    def first_ids():
        """The id of the last of as many tied tokens as it takes. Blocks, and the ids in them, are in order."""
        needed = kept.bisect(too_few, jnp.int32(0), num_tied, vocab.bit_length())[1]

        def count_ties(carry, x, ids):
            count, last = carry
            tied = (has_mass(measure(x, ids)) & (kept.ordered_keys(x) == key)).astype(jnp.int32)
            of_group = jnp.sum(tied, axis=1, dtype=jnp.int32)
            place = (count + cumsum(of_group) - of_group)[:, None] + cumsum(tied)
            return count + number(of_group), jnp.maximum(last, jnp.max(jnp.where((tied > 0) & (place == needed), ids, -1)))

        return fold(tokens, count_ties, (jnp.int32(0), jnp.int32(-1)))[1]

    return Kept(key, branch(num_tied > 1, first_ids, lambda: jnp.int32(vocab)))


class Found(NamedTuple):
    """The end of the prefix that top_k and top_p keep, and whether the tokens given settle it."""

    end: Kept
    is_found: Any


def search(tokens: Tokens, row: Row, span: Span, is_whole, vocab: int) -> Found:
    """The prefix that top_k, then top_p keep. The tokens given have all tokens in the span, and `is_whole` says that they have
    all those below it that exist, too. A span with a mass above it has only one of the two filters on.

    Where the end is not in the span the prefix is longer, and this says that it was not found.
    """
    is_k, is_p = is_on(row, vocab)
    end, k_found, p_found = no_end(vocab), ~is_k, is_k & ~is_k

    def in_span(measure):
        return lambda x, ids: chosen(measure(x, ids), (kept.ordered_keys(x) >= span.low) & (kept.ordered_keys(x) < span.high))

    if row.top_k is not None:
        there = add_up(tokens, in_span(ones), span.above)
        k_found = ~is_k | is_whole | ((there.whole >= row.top_k) & (span.above.whole < row.top_k))
        target = Mass(jnp.minimum(row.top_k, there.whole), jnp.int32(0))
        end = branch(is_k & k_found, lambda: end_of_prefix(tokens, ones, target, span, vocab), lambda: no_end(vocab))
    if row.top_p is not None:
        measure = masses(row)
        inside = lambda x, ids: chosen(measure(x, ids), kept.is_kept(kept.ordered_keys(x), ids, end))  # noqa: E731
        base = everything(row)
        if row.top_k is not None:
            base = either(is_k, branch(is_k & is_p, lambda: add_up(tokens, inside, nothing()), nothing), base)
        target = kept.share(base, row.top_p)
        there = add_up(tokens, in_span(inside), span.above)
        enough = kept.at_least(there, target) & ~kept.at_least(span.above, target)
        p_found = is_p & k_found & (is_whole | enough)
        target = least_of(target, there)
        of_k = end
        key, id = branch(p_found, lambda: end_of_prefix(tokens, inside, target, span, vocab), lambda: of_k)
        end = Kept(key, jnp.where(key == of_k.key, jnp.minimum(id, of_k.id), id))  # more may be tied than top_k left
    return Found(end, ~(is_p & ~k_found) & ((is_k & k_found) | p_found))


def is_on(row: Row, vocab: int):
    """Whether top_k and top_p cut this row."""
    off = row.t > row.t  # Triton's lowering negates no constant
    is_k = off if row.top_k is None else (row.top_k > 0) & (row.top_k < vocab)
    return is_k, off if row.top_p is None else row.top_p < 1.0


def undecided_span(samples, row: Row, by_count, lowest, vocab: int):
    """(low, high): logits between which the end of the prefix is likely to lie, from one logit of each group, `[groups]`.

    What is dropped has nearly known mass: that of the samples below a logit, 16 times, has a standard deviation of at most
    `sqrt(16 w mass)` for weights up to w. Of a count, where w is 1, the share that is not below takes its part away from it.
    """
    dropped = jnp.float32(0.0) if row.top_p is None else (1.0 - row.top_p) * row.total
    if row.top_k is not None:
        dropped = jnp.where(by_count, (vocab - row.top_k).astype(jnp.float32), dropped)
    weights = jnp.where(by_count, 1.0, weight_of(samples, row))

    def below(value):
        mass = noise.GROUP * jnp.sum(jnp.where(samples < value, weights, 0.0))
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

    low, _, _, high = lax.fori_loop(0, 14, halve, (lowest, row.top, lowest, row.top))
    return low, high
