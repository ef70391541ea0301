"""Tokens, masses and filters of one row inside a kernel, whose numbers are scalars there.

The rules and the integers are those of `kept`, but for the mass of a whole row, which is a float32 sum here: what top_p keeps
is that of `kept` to 1e-6 of p.
"""

import functools
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
TINY = 1e-37
LEAST_NORMAL = 1 << 23  # the key of 2^-126


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
    """Tokens that are read in blocks `[size, 16]`, in order of id: `fold(f, init)` is `carry = f(carry, logits, ids)` over
    them; logits of what does not exist are -inf."""

    fold: Callable
    size: int


class Bracket(NamedTuple):
    """Logits [low, high) among which a prefix ends, low -inf if they are all below high; what these measure together, and what
    of it is not in the prefix, float32."""

    low: Any
    high: Any
    total: Any
    dropped: Any


def branch(condition, a, b):
    """`lax.cond(condition, a, b)`, whose results may be constants: Triton's lowering wants operations."""
    made = lambda f: lambda: jax.tree.map(lambda x: jnp.where(condition, x, x), f())  # noqa: E731
    return lax.cond(condition, made(a), made(b))


def number(x):
    """Sum of a tile to an int32 scalar."""
    return jnp.sum(x, dtype=jnp.int32)


def in_lanes(reduce, join, tiles):
    """Tiles `[n, lanes]` reduced to `[lanes]`."""
    return functools.reduce(join, (reduce(tile, axis=0) for tile in tiles))


def places_in_lanes(counts):
    """(how many come before each of the things counted, for tiles `[n, lanes]`; how many there are): lane after lane."""
    of_lane = in_lanes(functools.partial(jnp.sum, dtype=jnp.int32), jnp.add, counts)
    before, places = cumsum(of_lane) - of_lane, []
    for tile in counts:
        places.append(before[None] + lax.cumsum(tile, axis=0) - tile)
        before += jnp.sum(tile, axis=0, dtype=jnp.int32)
    return places, number(of_lane)


def places_in_order(counts):
    """As `places_in_lanes`: row after row."""
    of_all, places = jnp.int32(0), []
    for tile in counts:
        of_row = jnp.sum(tile, axis=1, dtype=jnp.int32)
        places.append((of_all + cumsum(of_row) - of_row)[:, None] + cumsum(tile) - tile)
        of_all += number(of_row)
    return places, of_all


def cumsum(x):
    """Along the last axis, int32."""
    return lax.cumsum(x, axis=x.ndim - 1)


def total_of(mass: Mass, where, axis=None) -> Mass:
    """The mass of the tokens where the condition holds, along an axis or altogether, not carried."""
    add = lambda words: jnp.sum(jnp.where(where, words, 0), axis=axis, dtype=jnp.int32)  # noqa: E731
    whole = add(mass.whole)
    return Mass(whole, whole - whole if mass.fine is None else add(mass.fine))


def add_up(tokens: Tokens, measure, where) -> Mass:
    """The mass of the tokens where the condition, of logits and ids, holds."""
    def f(carry, x, ids):
        mass = total_of(measure(x, ids), where(x, ids))
        return carry[0] + mass.whole, carry[1] + mass.fine

    return kept.carried(*tokens.fold(f, tuple(nothing())))


def nothing() -> Mass:
    """The mass of no token."""
    return Mass(jnp.int32(0), jnp.int32(0))


def counted(number) -> Mass:
    """A count, as a scalar mass."""
    return Mass(number, jnp.int32(0))


def after(key):
    """The next key, past the subnormal numbers: where they are flushed to zero, no logit would be below the one after 0."""
    return jnp.where(key >= 0, jnp.maximum(key + 1, LEAST_NORMAL), key + 1)


def no_end(vocab: int) -> Kept:
    """The end of a prefix that is everything."""
    return Kept(jnp.int32(LOWEST), jnp.int32(vocab))


def least_of(a: Mass, b: Mass) -> Mass:
    """The smaller of two scalar masses."""
    return kept.either(kept.at_least(a, b), b, a)


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
    return lambda x, ids: kept.in_units(weight_of(x, row), kept.units(row.total))


def everything(row: Row) -> Mass:
    """The mass of the whole row, from its float32 sum."""
    return kept.in_units(row.total, kept.units(row.total))


def is_above(x, row: Row):
    """What min_p keeps."""
    if row.min_p is None:
        return x > -jnp.inf
    return (x > -jnp.inf) & kept.is_above(x, row.t, row.top, row.min_p)


def is_on(row: Row, vocab: int):
    """Whether top_k and top_p cut this row."""
    off = row.t > row.t  # Triton's lowering negates no constant
    is_k = off if row.top_k is None else (row.top_k > 0) & (row.top_k < vocab)
    return is_k, off if row.top_p is None else row.top_p < 1.0


def undecided_span(samples, row: Row, by_count, bracket: Bracket):
    """(low, high): logits in the bracket between which the end of the prefix is likely to lie, from one logit of each group, in
    tiles; -inf if there is none below.

    Two guesses say what is below a logit: 16 times the samples there, and what 16 times those above leave. Their variances are
    about 16^2 times the sums of their squares, to which one more sample is added lest there be none; they are weighed by these.
    """
    is_in = [(x >= bracket.low) & (x < bracket.high) for x in samples]
    weights = [jnp.where(y, jnp.where(by_count, 1.0, weight_of(x, row)), 0.0) for x, y in zip(samples, is_in, strict=True)]
    add_up = lambda tiles: jnp.sum(in_lanes(jnp.sum, jnp.add, tiles))  # noqa: E731
    total, squares = add_up(weights), add_up([x * x for x in weights])

    def below(value):
        under = [jnp.where(x < value, y, 0.0) for x, y in zip(samples, weights, strict=True)]
        mass, of_squares = add_up(under), add_up([x * x for x in under])
        one = jnp.where(by_count, 1.0, weight_of(value, row))
        of_below, of_above = of_squares + one * one, jnp.maximum(squares - of_squares, 0.0) + one * one
        share = of_above / jnp.maximum(of_below + of_above, jnp.float32(TINY))
        mass = share * noise.GROUP * mass + (1.0 - share) * (bracket.total - noise.GROUP * (total - mass))
        return mass, 3.5 * noise.GROUP * jnp.sqrt(share * of_below)

    def halve(_, ends):
        low, low_end, high_start, high = ends
        middle_low, middle_high = 0.5 * (low + low_end), 0.5 * (high_start + high)
        mass, spread = below(middle_low)
        is_low = mass + spread <= bracket.dropped
        mass, spread = below(middle_high)
        is_high = mass - spread >= bracket.dropped
        return (jnp.where(is_low, middle_low, low), jnp.where(is_low, low_end, middle_low),
                jnp.where(is_high, high_start, middle_high), jnp.where(is_high, middle_high, high))

    finite = [jnp.where(y & (x > -jnp.inf), x, jnp.inf) for x, y in zip(samples, is_in, strict=True)]
    top = jnp.minimum(bracket.high, row.top)
    start = jnp.minimum(jnp.min(in_lanes(jnp.min, jnp.minimum, finite)), top)
    low, _, _, high = lax.fori_loop(0, 11, halve, (start, top, start, top))
    return jnp.where(low > start, low, bracket.low), high
