"""The kept set: what top-k, top-p and min-p leave of a row, found without sorting the vocabulary.

Order the tokens of a row by logit, largest first, lowest id first among equals. Each filter keeps a prefix of that order, so
all of them together do:

    top_k   the first k tokens
    top_p   the shortest prefix whose mass is at least p times the mass of what top_k left (the crossing token is kept)
    min_p   the tokens with exp((l - max l) / T) >= min_p

The end of a prefix is the largest key at or above which the tokens are enough, and among those tied there the smallest id up
to which they are. Enough is decided by sums of integers, which do not depend on the order of summation: counts for top-k,
masses in fixed point for top-p. So it does not matter where they are summed: in a few groups (`kept_set`), over whole rows
(`whole_rows`), over shards or in a kernel. Here is what all of these share.

Logits are `[vocab, rows]` here as elsewhere; the few tokens that are searched run along the last axis.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import noise, race
from pallas_kernels.logits import inverse_temperature

WHOLE, FINE = 30, 11  # bits of a mass: a row's whole mass is below 2^30, and the fine word counts 2^-11 of its unit
ROOM = 1.001  # keeps totals that are powers of two, of flat and of peaked rows, away from where rounding would choose the unit
MAX_VOCAB = 2**(31 - FINE) - 1  # fine words of more tokens could leave int32
LOWEST = -(2**31)


class Filters(NamedTuple):
    """Filters of each row, `[rows]` or None for none: top_k int32 (<= 0 off), top_p (>= 1 off), min_p (<= 0 off)."""

    top_k: Any = None
    top_p: Any = None
    min_p: Any = None


class Kept(NamedTuple):
    """The last token of a prefix: its key (see `ordered_keys`) and its id, int32 `[rows]`."""

    key: Any
    id: Any


class Mass(NamedTuple):
    """Integers that add up: `whole + fine * 2^-FINE`, int32. A count has ones and zeros."""

    whole: Any
    fine: Any


def ordered_keys(x):
    """int32 keys in the order of the float32 logits; 0.0 and -0.0 are one key, and NaN is the lowest."""
    bits = lax.bitcast_convert_type(jnp.where(x == 0.0, 0.0, x), jnp.int32)
    return jnp.where(jnp.isnan(x), jnp.int32(LOWEST), jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits))


def logits_of(keys):
    """The logits that have these keys."""
    return lax.bitcast_convert_type(jnp.where(keys < 0, keys ^ jnp.int32(0x7FFFFFFF), keys), jnp.float32)


def is_kept(keys, ids, kept: Kept):
    """Membership of tokens in the prefix that ends at `kept`, which broadcasts with them."""
    return (keys > kept.key) | ((keys == kept.key) & (ids <= kept.id))


def is_above(x, t, top, min_p):
    """Where `exp((x - top) / t) >= min_p`, `[vocab, rows]`."""
    return (min_p <= 0.0) | ((x - race.finite_or_zero(top)) * inverse_temperature(t) >= jnp.log(min_p))


def weights(x, t, top):
    """`exp((x - top) / t)`, `[vocab, rows]`."""
    return jnp.exp((x - race.finite_or_zero(top)) * inverse_temperature(t))


def fixed_point(weight, total) -> Mass:
    """Weights in [0, 1], `[rows, n]`, that add up to about `total`, float32: scaled by a power of two, so that nothing rounds
    but the last bit of the fine word, however the compiler fuses it."""
    return in_units(weight, units(total)[:, None])


def units(total):
    """How many units of a mass a weight of 1 is."""
    exponent = WHOLE - jnp.ceil(jnp.log2(ROOM * jnp.maximum(total, 1.0))).astype(jnp.int32)
    return lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)


def in_units(weight, units) -> Mass:
    """As `fixed_point`."""
    scaled = weight * units
    whole = jnp.floor(scaled)
    return Mass(whole.astype(jnp.int32), ((scaled - whole) * 2.0**FINE).astype(jnp.int32))


def carried(whole, fine) -> Mass:
    """With less than one unit in the fine word."""
    return Mass(whole + (fine >> FINE), fine & (2**FINE - 1))


def add_up(mass: Mass, chosen) -> Mass:
    """The mass of the chosen tokens along the last axis, `[rows]`."""
    return carried(*(jnp.sum(jnp.where(chosen, m, 0), axis=-1, dtype=jnp.int32) for m in mass))


def as_float(mass: Mass):
    """Rounded to float32."""
    return mass.whole.astype(jnp.float32) + mass.fine.astype(jnp.float32) * 2.0**-FINE


def share(mass: Mass, p) -> Mass:
    """`p * mass` to float32 rounding, for 0 <= p < 1; at least the smallest mass there is."""
    product = p * as_float(mass)
    whole = jnp.floor(product)
    fine = jnp.floor((product - whole) * 2.0**FINE)
    return Mass(whole.astype(jnp.int32), jnp.where((whole == 0.0) & (fine == 0.0), 1.0, fine).astype(jnp.int32))


def plus(a: Mass, b: Mass) -> Mass:
    """a + b."""
    return carried(a.whole + b.whole, a.fine + b.fine)


def minus(a: Mass, b: Mass) -> Mass:
    """a - b, for a >= b."""
    return carried(a.whole - b.whole, a.fine - b.fine)


def at_least(a: Mass, b: Mass):
    """a >= b, both carried."""
    return (a.whole > b.whole) | ((a.whole == b.whole) & (a.fine >= b.fine))


def either(condition, a, b):
    """a where the condition holds, else b; pytrees."""
    return jax.tree.map(functools.partial(jnp.where, condition), a, b)


def bisect(holds, low, high, steps):
    """Halves the gap between low, where the falling predicate `holds` is true, and high, where it is not; int32 `[rows]`."""
    def step(_, ends):
        low, high = ends
        gap = lax.bitcast_convert_type(high - low, jnp.uint32)  # may be more than an int32 holds
        middle = low + lax.bitcast_convert_type(gap >> 1, jnp.int32)
        yes = holds(middle)
        return jnp.where(yes, middle, low), jnp.where(yes, high, middle)

    return lax.fori_loop(0, steps, step, (low, high))


def num_halvings(low, high):
    """How many steps of `bisect` close every gap."""
    return 32 - jnp.min(lax.clz(high - low - 1))


def end_of_prefix(keys, ids, mass: Mass, target: Mass, vocab: int) -> Kept:
    """The end of the shortest prefix of the tokens given, `[rows, n]`, whose mass is at least `target`."""
    low, high = jnp.full_like(keys[:, 0], LOWEST), jnp.max(keys, axis=1) + 1
    return end_between(keys, ids, mass, target, low, high, Mass(*map(jnp.zeros_like, target)), vocab, 32)


def end_between(keys, ids, mass: Mass, target: Mass, low, high, above: Mass, vocab: int, steps) -> Kept:
    """As `end_of_prefix`, when the end lies at a key in [low, high), found in so many steps, and `above` is the mass from high
    on, given or not."""
    def with_those(chosen):
        return plus(above, add_up(mass, chosen & (keys < high[:, None])))

    key, _ = bisect(lambda key: at_least(with_those(keys >= key[:, None]), target), low, high, steps)
    above = with_those(keys > key[:, None])
    tied = keys == key[:, None]
    number = jnp.sum(tied, axis=1, dtype=jnp.int32)
    one = Mass(*(jnp.max(jnp.where(tied, m, 0), axis=1) for m in mass))  # equal logits have equal masses

    def too_few(n):
        return ~at_least(carried(above.whole + n * one.whole, above.fine + n * one.fine), target)

    needed = bisect(too_few, jnp.zeros_like(number), jnp.maximum(number, 1), vocab.bit_length())[1]

    def last_id():
        fewer = lambda id: jnp.sum(tied & (ids < id[:, None]), axis=1, dtype=jnp.int32) < needed  # noqa: E731
        return bisect(fewer, jnp.zeros_like(number), jnp.full_like(number, vocab), vocab.bit_length())[0]

    return Kept(key, lax.cond(jnp.any(needed < number), last_id, lambda: jnp.full_like(number, vocab)))


def search(ones, masses, everything: Any, filters: Filters, end_of, add) -> Kept:
    """The prefix that top_k, then top_p keep; `everything` is the mass of the whole row.

    `ones` and `masses(kept)` say what each token measures, masses only in the prefix `kept` (None: all tokens),
    `add(measure)` all of that, and `end_of(measure, base, target)` the end of the shortest prefix with the target, of base."""
    top_k, top_p, _ = filters
    kept: Any = None

    def end(off, measure, base, target):
        target = either(at_least(base, target), target, base)  # there may be fewer tokens, and a share is rounded
        off_ends = Kept(*(jnp.full(off.shape, i, jnp.int32) for i in (LOWEST, race.NO_ID)))
        one = Mass(*(jnp.full(off.shape, i, jnp.int32) for i in (1, 0)))  # found at once
        return either(off, off_ends, end_of(measure, base, either(off, one, target)))

    if top_k is not None:
        kept = end(top_k <= 0, ones, add(ones), Mass(top_k, jnp.zeros_like(top_k)))
    if top_p is not None:
        measure, off = masses(kept), top_p >= 1.0
        base = everything if top_k is None else either(top_k <= 0, everything, add(measure))
        of_p = end(off, measure, base, share(base, top_p))
        kept = of_p if kept is None else either(off, kept, of_p)
    return kept


def grouped(a, empty):
    """`[vocab, rows]` as `[groups, 16, rows]`, the last group filled up."""
    a = jnp.pad(a, ((0, -a.shape[0] % noise.GROUP), (0, 0)), constant_values=empty)
    return a.reshape(a.shape[0] // noise.GROUP, noise.GROUP, a.shape[1])


def orderly(x):
    """Logits for `lax.top_k`: it tells -0.0 from 0.0, and NaN has no place in an order."""
    return jnp.where(x == 0.0, 0.0, jnp.where(jnp.isnan(x), -jnp.inf, x))


def largest(a, n: int):
    """`lax.top_k`, of which a part may be used: without the barrier XLA may sort the whole axis then."""
    return lax.optimization_barrier(lax.top_k(a, n))


def members(groups, vocab: int):
    """(ids of the tokens of the groups `[rows, n]`, a function that picks them out of `[vocab, rows]`), `[rows, 16 n]`."""
    ids = noise.GROUP * groups[:, :, None] + jnp.arange(noise.GROUP, dtype=jnp.int32)
    ids = ids.reshape(groups.shape[0], noise.GROUP * groups.shape[1])

    def pick(a, empty):
        return jnp.where(ids < vocab, jnp.take_along_axis(a, jnp.minimum(ids, vocab - 1).T, axis=0).T, empty)

    return ids, pick
