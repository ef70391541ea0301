"""The kept set: what top-k, top-p and min-p leave of a row, found without sorting the vocabulary.

Order the tokens of a row by logit, largest first, lowest id first among equals. Each filter keeps a prefix of that order, so
all of them together do, and the kept set is one pair (key of the last token kept, its id):

    top_k   the first k tokens
    top_p   the shortest prefix whose mass is at least p times the mass of what top_k left (the crossing token is kept)
    min_p   the tokens with exp((l - max l) / T) >= min_p

The last token of a prefix is found bit by bit: the largest key for which the tokens at or above it are enough, then the
smallest id for which those tied at that key are. Enough is decided by sums of integers, which do not depend on the order of
summation: counts for top-k, masses in fixed point for top-p. Most of the time a few groups hold the whole prefix (the k first
tokens lie in the k groups with the largest maxima), and only these are searched.

Vocabulary runs along axis 0, rows along the last axis.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import noise, race
from pallas_kernels.logits import inverse_temperature

CANDIDATES = (64, 1024)  # groups searched first, then groups searched if those were too few, before the whole vocabulary
WHOLE, FINE = 30, 11  # bits of a mass: the row's whole mass is below 2^30, and the fine word counts 2^-11 of its unit
LOWEST = -(2**31)


class Filters(NamedTuple):
    """Filters of each row, `[rows]` or None for none: top_k int32 (<= 0 off), top_p (>= 1 off), min_p (<= 0 off)."""

    top_k: Any = None
    top_p: Any = None
    min_p: Any = None


class Kept(NamedTuple):
    """The last token of the kept prefix: its key (see `ordered_keys`) and its id, int32 `[rows]`."""

    key: Any
    id: Any


class Mass(NamedTuple):
    """A mass in fixed point, int32: `whole + fine * 2^-FINE`."""

    whole: Any
    fine: Any


def ordered_keys(x):
    """int32 keys in the order of the float32 logits; 0.0 and -0.0 are one key, and NaN is the lowest."""
    bits = lax.bitcast_convert_type(jnp.where(x == 0.0, 0.0, x), jnp.int32)
    return jnp.where(jnp.isnan(x), jnp.int32(LOWEST), jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits))


def largest(holds, like, start: int, bits: int):
    """The largest `start + c`, 0 <= c < 2^bits, at which the falling predicate `holds` is true; `start` if it never is."""
    def step(i, code):
        trial = code | (jnp.uint32(1) << (bits - 1 - i).astype(jnp.uint32))
        return jnp.where(holds(lax.bitcast_convert_type(trial, jnp.int32) + jnp.int32(start)), trial, code)

    code = lax.fori_loop(0, bits, step, jnp.zeros_like(like, jnp.uint32))
    return lax.bitcast_convert_type(code, jnp.int32) + jnp.int32(start)


def last_of_prefix(keys, ids, vocab: int, is_enough) -> Kept:
    """The last token of the shortest prefix that is enough: `is_enough(chosen)` grows with the set."""
    key = largest(lambda key: is_enough(keys >= key), keys[0], LOWEST, 32)
    above, tied = keys > key, keys == key
    return Kept(key, largest(lambda id: ~is_enough(above | (tied & (ids < id))), keys[0], 0, vocab.bit_length()))


def is_kept(keys, ids, kept: Kept):
    """Membership of tokens in the prefix that ends at `kept`."""
    return (keys > kept.key) | ((keys == kept.key) & (ids <= kept.id))


def shorter(a: Kept, b: Kept) -> Kept:
    """The shorter of two prefixes."""
    take_a = (a.key > b.key) | ((a.key == b.key) & (a.id < b.id))
    return Kept(jnp.where(take_a, a.key, b.key), jnp.where(take_a, a.id, b.id))


def fixed_point(weight, total) -> Mass:
    """`weight` as a share of about `total`, both float32 and positive: scaled by a power of two, so that nothing rounds but
    the last bit of the fine word, however the compiler fuses it."""
    exponent = WHOLE - 1 - jnp.ceil(jnp.log2(jnp.maximum(total, 1.0))).astype(jnp.int32)
    scaled = weight * lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)
    whole = jnp.floor(scaled)
    return Mass(whole.astype(jnp.int32), ((scaled - whole) * 2.0**FINE).astype(jnp.int32))


def add_up(mass: Mass, chosen=None) -> Mass:
    """The mass of the chosen tokens (all without `chosen`), carried."""
    if chosen is not None:
        mass = jax.tree.map(lambda m: jnp.where(chosen, m, 0), mass)
    whole, fine = (jnp.sum(m, axis=0, dtype=jnp.int32) for m in mass)
    return Mass(whole + (fine >> FINE), fine & (2**FINE - 1))


def share(mass: Mass, p) -> Mass:
    """`p * mass` to float32 rounding, for 0 <= p < 1; at least the smallest mass there is."""
    product = p * (mass.whole.astype(jnp.float32) + mass.fine.astype(jnp.float32) * 2.0**-FINE)
    whole = jnp.floor(product)
    fine = jnp.floor((product - whole) * 2.0**FINE)
    return Mass(whole.astype(jnp.int32), jnp.where((whole == 0.0) & (fine == 0.0), 1.0, fine).astype(jnp.int32))


def at_least(a: Mass, b: Mass):
    """a >= b, both carried."""
    return (a.whole > b.whole) | ((a.whole == b.whole) & (a.fine >= b.fine))


def search(x, ids, weight, total, everything: Mass | None, filters: Filters, vocab: int) -> Kept:
    """The prefix that top_k, then top_p keep of the tokens given; `everything` is the mass of the whole row."""
    top_k, top_p, _ = filters
    keys = ordered_keys(x)
    kept = Kept(jnp.full_like(keys[0], LOWEST), jnp.full_like(keys[0], vocab))

    def unless(off, a, b):
        return jax.tree.map(lambda a, b: jnp.where(off, a, b), a, b)

    if top_k is not None:
        is_enough = lambda chosen: jnp.sum(chosen, axis=0, dtype=jnp.int32) >= top_k  # noqa: E731
        kept = unless(top_k <= 0, kept, last_of_prefix(keys, ids, vocab, is_enough))
    if top_p is not None:
        inside = is_kept(keys, ids, kept)
        mass = jax.tree.map(lambda m: jnp.where(inside, m, 0), fixed_point(weight, total))
        mass = lax.optimization_barrier(mass)  # made once, not in every step of the search
        base = everything if top_k is None else unless(top_k <= 0, everything, add_up(mass))
        target = share(base, top_p)
        found = last_of_prefix(keys, ids, vocab, lambda chosen: at_least(add_up(mass, chosen), target))
        kept = unless(top_p >= 1.0, kept, shorter(found, kept))
    return kept


def fits(best, everything: Mass | None, top, total, t, filters: Filters):
    """Whether the groups with the largest maxima, `best [candidates, rows]`, hold the prefix that the filters keep."""
    top_k, top_p, _ = filters
    in_count = jnp.bool_(True) if top_k is None else top_k <= best.shape[0]
    if top_p is None:
        return in_count
    tops = fixed_point(jnp.exp((best - race.finite_or_zero(top)) * inverse_temperature(t)), total)
    in_mass = (top_p >= 1.0) | at_least(add_up(tops), share(everything, top_p))
    return in_mass if top_k is None else in_count & ((top_k > 0) | in_mass)


def kept_set(x, t, filters: Filters):
    """bool `[vocab, rows]`: the tokens of the processed logits x that the filters leave; NaN logits stay, to be seen later."""
    top = jnp.max(x, axis=0)
    z = (x - race.finite_or_zero(top)) * inverse_temperature(t)
    out = x > -jnp.inf
    if filters.min_p is not None:
        out &= (filters.min_p <= 0.0) | (z >= jnp.log(filters.min_p))
    if filters.top_k is not None or filters.top_p is not None:
        out &= is_kept(ordered_keys(x), lax.broadcasted_iota(jnp.int32, x.shape, 0), last_kept(x, z, t, top, filters))
    return out | jnp.isnan(x)


def last_kept(x, z, t, top, filters: Filters) -> Kept:
    """The last token of the prefix kept by top_k and top_p."""
    vocab, rows = x.shape
    num_groups = -(-vocab // noise.GROUP)
    if filters.top_k is not None:
        filters = filters._replace(top_k=jnp.where(filters.top_k >= vocab, 0, filters.top_k))
    weight = total = everything = None
    if filters.top_p is not None:
        weight = lax.optimization_barrier(jnp.exp(z))  # one value for every use, whatever is fused with it
        total = jnp.sum(weight, axis=0)
        everything = add_up(fixed_point(weight, total))

    def grouped(a, empty):
        return jnp.pad(a, ((0, -vocab % noise.GROUP), (0, 0)), constant_values=empty).reshape(num_groups, noise.GROUP, rows)

    def of_groups(chosen):
        ids = (noise.GROUP * chosen[:, None] + jnp.arange(noise.GROUP, dtype=jnp.int32)[:, None]).reshape(noise.GROUP * len(chosen), rows)
        pick = lambda a: jnp.take_along_axis(a, jnp.minimum(ids, vocab - 1), axis=0)  # noqa: E731
        picked = jnp.where(ids < vocab, pick(x), -jnp.inf)
        part = None if weight is None else jnp.where(ids < vocab, pick(weight), 0.0)
        return search(picked, ids, part, total, everything, filters, vocab)

    def first_that_fits(sizes):
        if not sizes or vocab <= 2 * noise.GROUP * sizes[0]:
            return search(x, lax.broadcasted_iota(jnp.int32, x.shape, 0), weight, total, everything, filters, vocab)
        best, chosen = (a.T for a in lax.top_k(maxima.T, sizes[0]))
        in_these = jnp.all(fits(best, everything, top, total, t, filters))
        return lax.cond(in_these, lambda: of_groups(chosen), lambda: first_that_fits(sizes[1:]))

    maxima = jnp.max(grouped(jnp.where(x == 0.0, 0.0, jnp.where(jnp.isnan(x), -jnp.inf, x)), -jnp.inf), axis=1)
    return first_that_fits(CANDIDATES)
