"""The kept set: what top-k, top-p and min-p leave of a row, found without sorting the vocabulary.

Order the tokens of a row by logit, largest first, lowest id first among equals. Each filter keeps a prefix of that order, so
all of them together do:

    top_k   the first k tokens
    top_p   the shortest prefix whose mass is at least p times the mass of what top_k left (the crossing token is kept)
    min_p   the tokens with exp((l - max l) / T) >= min_p

The end of a prefix is the largest key at or above which the tokens are enough, and among those tied there the smallest id up
to which they are. Enough is decided by sums of integers, which do not depend on the order of summation: counts for top-k,
masses in fixed point for top-p. So it does not matter where they are summed, and most of a search looks at few tokens: the k
largest lie in the k groups with the largest maxima, and a few halvings of the whole row leave few groups undecided.

Logits are `[vocab, rows]` here as elsewhere; what is searched runs along the last axis, where XLA's CPU code sums fastest.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import noise, race
from pallas_kernels.logits import inverse_temperature

LEADING, UNDECIDED = 128, 256  # groups searched instead of the whole row: those with the largest maxima; those left undecided
HALVINGS = 8  # of the whole row, before the undecided groups are gathered
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


def at_least(a: Mass, b: Mass):
    """a >= b, both carried."""
    return (a.whole > b.whole) | ((a.whole == b.whole) & (a.fine >= b.fine))


def bisect(holds, low, high, steps: int):
    """Halves the gap between low, where the falling predicate `holds` is true, and high, where it is not; int32 `[rows]`."""
    def step(_, ends):
        low, high = ends
        gap = lax.bitcast_convert_type(high - low, jnp.uint32)  # may be more than an int32 holds
        middle = low + lax.bitcast_convert_type(gap >> 1, jnp.int32)
        yes = holds(middle)
        return jnp.where(yes, middle, low), jnp.where(yes, high, middle)

    return lax.fori_loop(0, steps, step, (low, high))


def end_of_prefix(keys, ids, mass: Mass, target: Mass, vocab: int) -> Kept:
    """The end of the shortest prefix of the tokens given, `[rows, n]`, whose mass is at least `target`."""
    low, high = jnp.full_like(keys[:, 0], LOWEST), jnp.max(keys, axis=1) + 1
    return end_between(keys, ids, mass, target, low, high, Mass(*map(jnp.zeros_like, target)), vocab)


def end_between(keys, ids, mass: Mass, target: Mass, low, high, above: Mass, vocab: int) -> Kept:
    """As `end_of_prefix`, when the end lies at a key in [low, high) and `above` is the mass from `high` on, given or not."""
    def plus(chosen):
        more = add_up(mass, chosen & (keys < high[:, None]))
        return carried(above.whole + more.whole, above.fine + more.fine)

    key, _ = bisect(lambda key: at_least(plus(keys >= key[:, None]), target), low, high, 32)
    above = plus(keys > key[:, None])
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


def grouped(a, empty):
    """`[vocab, rows]` as `[groups, 16, rows]`, the last group filled up."""
    a = jnp.pad(a, ((0, -a.shape[0] % noise.GROUP), (0, 0)), constant_values=empty)
    return a.reshape(a.shape[0] // noise.GROUP, noise.GROUP, a.shape[1])


def orderly(x):
    """Logits for `lax.top_k`: it tells -0.0 from 0.0, and NaN has no place in an order."""
    return jnp.where(x == 0.0, 0.0, jnp.where(jnp.isnan(x), -jnp.inf, x))


def members(groups, vocab: int):
    """(ids of the tokens of the groups `[rows, n]`, a function that picks them out of `[vocab, rows]`), `[rows, 16 n]`."""
    ids = noise.GROUP * groups[:, :, None] + jnp.arange(noise.GROUP, dtype=jnp.int32)
    ids = ids.reshape(groups.shape[0], noise.GROUP * groups.shape[1])

    def pick(a, empty):
        return jnp.where(ids < vocab, jnp.take_along_axis(a, jnp.minimum(ids, vocab - 1).T, axis=0).T, empty)

    return ids, pick


def end_in_row(x, keys, ids, mass: Mass, target: Mass, low_value) -> Kept:
    """`end_of_prefix` of a whole row `[rows, vocab]`, of which no token below `low_value` is needed."""
    vocab = x.shape[1]
    top, lowest = jnp.max(x, axis=1), ordered_keys(low_value)
    there_is = add_up(mass, keys >= lowest[:, None])  # a count may ask for more tokens than have a mass
    target = jax.tree.map(lambda a, b: jnp.where(at_least(there_is, target), a, b), target, there_is)

    def enough(key):
        return at_least(add_up(mass, keys >= key[:, None]), target)

    def halve(_, ends):
        low, high, low_key, high_key = ends
        middle = low + 0.5 * (high - low)
        key = jnp.clip(ordered_keys(middle), low_key, high_key)
        yes = enough(key)
        return (jnp.where(yes, middle, low), jnp.where(yes, high, middle),
                jnp.where(yes, key, low_key), jnp.where(yes, high_key, key))

    start = low_value, top, lowest, ordered_keys(top) + 1
    _, _, low, high = lax.fori_loop(0, HALVINGS, halve, start)
    above = add_up(mass, keys >= high[:, None])
    undecided = grouped(((keys >= low[:, None]) & (keys < high[:, None])).T, False).any(axis=1).T
    few = min(UNDECIDED, undecided.shape[1])

    def in_few():
        part_ids, pick = members(lax.top_k(undecided.astype(jnp.float32), few)[1], vocab)
        part = Mass(*(pick(m.T, 0) for m in mass))
        return end_between(pick(keys.T, LOWEST), part_ids, part, target, low, high, above, vocab)

    def in_all():
        return end_between(keys, ids, mass, target, low, high, above, vocab)

    return lax.cond(jnp.all(jnp.sum(undecided, axis=1, dtype=jnp.int32) <= few), in_few, in_all)


def search(keys, ids, mass: Any, everything: Any, filters: Filters, vocab: int, find) -> Kept:
    """The prefix that top_k, then top_p keep of the tokens given; `everything` is the mass of the whole row, and
    `find(keys, ids, mass, target, p)` the end of a prefix (p: what top_p asks for, None for a count)."""
    top_k, top_p, _ = filters
    kept = Kept(jnp.full_like(keys[:, 0], LOWEST), jnp.full_like(keys[:, 0], vocab))

    def unless(off, a, b):
        return jax.tree.map(lambda a, b: jnp.where(off, a, b), a, b)

    if top_k is not None:
        ones = Mass(jnp.ones_like(keys), jnp.zeros_like(keys))
        kept = unless(top_k <= 0, kept, find(keys, ids, ones, Mass(top_k, jnp.zeros_like(top_k)), None))
    if top_p is not None:
        base = everything
        if top_k is not None:
            inside = is_kept(keys, ids, Kept(kept.key[:, None], kept.id[:, None]))
            mass = Mass(*(jnp.where(inside, m, 0) for m in mass))
            base = unless(top_k <= 0, everything, add_up(mass, True))
        kept = unless(top_p >= 1.0, kept, find(keys, ids, lax.optimization_barrier(mass), share(base, top_p), top_p))
    return kept


def fits(maxima, keys, mass: Any, everything: Any, top, total, t, filters: Filters):
    """Whether the groups with these maxima, `[rows, n]`, the largest, hold the prefix that the filters keep; `[rows]`. Their
    tokens are given: the maxima, or those of them above the least maximum, which are all that there are above it, must do."""
    top_k, top_p, _ = filters
    above = keys > ordered_keys(maxima[:, -1:])
    in_count = in_mass = jnp.ones_like(top, bool)
    if top_k is not None:
        in_count = top_k <= jnp.maximum(maxima.shape[1], jnp.sum(above, axis=1, dtype=jnp.int32))
    if top_p is not None:
        weight = jnp.exp((maxima - race.finite_or_zero(top)[:, None]) * inverse_temperature(t)[:, None])
        enough = lambda mass, chosen: at_least(add_up(mass, chosen), share(everything, top_p))  # noqa: E731
        in_mass = (top_p >= 1.0) | enough(fixed_point(weight, total), True) | enough(mass, above)
        in_mass = in_mass if top_k is None else (top_k > 0) | in_mass
    return in_count & in_mass


def in_row(x, t, top, total, everything: Any, filters: Filters) -> Kept:
    """The end of the prefix kept by top_k and top_p, from all of the logits `[rows, vocab]`."""
    vocab = x.shape[1]
    smallest = jnp.min(jnp.where(x > -jnp.inf, x, jnp.inf), axis=1)

    def find(keys, ids, mass, target, p):
        low = jnp.minimum(smallest, top)
        if p is not None:  # tokens below this could not add up to 1 - p, all together
            base = total * as_float(target) / (jnp.maximum(p, 1e-6) * as_float(everything))
            low = jnp.where(1.0 - p > 1e-6, jnp.minimum(top + t * jnp.log(0.5 * (1.0 - p) * base / vocab), top), low)
        return end_in_row(x, keys, ids, mass, target, low)

    mass = None
    if filters.top_p is not None:
        mass = fixed_point(weights(x.T, t, top).T, total)
    return search(ordered_keys(x), lax.broadcasted_iota(jnp.int32, x.shape, 1), mass, everything, filters, vocab, find)


def weights(x, t, top):
    """`exp((x - top) / t)`, `[vocab, rows]`."""
    return jnp.exp((x - race.finite_or_zero(top)) * inverse_temperature(t))


def last_kept(x, t, top, filters: Filters, by_row: bool) -> Kept:
    """The end of the prefix kept by top_k and top_p, of processed logits `[vocab, rows]`."""
    vocab, rows = x.shape
    if filters.top_k is not None:
        filters = filters._replace(top_k=jnp.where(filters.top_k >= vocab, 0, filters.top_k))
    filters = filters._replace(min_p=None)
    weight = total = everything = None
    if filters.top_p is not None:
        weight = lax.optimization_barrier(weights(x, t, top))  # one value for every use, whatever is fused with it
        total = jnp.sum(weight, axis=0)
        all_of = in_units(weight, units(total))  # summed where it lies: to turn it takes longer than to read it
        everything = carried(*(jnp.sum(m, axis=0, dtype=jnp.int32) for m in all_of))

    # The groups with the largest maxima first.
    maxima = jnp.max(grouped(orderly(x), -jnp.inf), axis=1).T
    best, chosen = lax.optimization_barrier(lax.top_k(maxima, min(LEADING, maxima.shape[1])))
    ids, pick = members(chosen, vocab)
    mass = None if weight is None else fixed_point(pick(weight, 0.0), total)
    find = lambda keys, ids, mass, target, p: end_of_prefix(keys, ids, mass, target, vocab)  # noqa: E731
    keys = ordered_keys(pick(x, -jnp.inf))
    leading = search(keys, ids, mass, everything, filters, vocab, find)
    if best.shape[1] == maxima.shape[1]:
        return leading
    fit = fits(best, keys, mass, everything, top, total, t, filters)

    def one_row(row):
        fit, leading, *of_row = jax.tree.map(lambda a: a[None], row)
        r, rest = of_row[0][0], of_row[1:]
        wide = lambda: in_row(lax.dynamic_slice_in_dim(x, r, 1, axis=1).T, *rest)  # noqa: E731
        return jax.tree.map(lambda a: a[0], lax.cond(fit[0], lambda: leading, wide))

    operands = t, top, total, everything, filters
    if by_row:  # only the rows that need it are searched again
        every_row = lambda: lax.map(one_row, (fit, leading, jnp.arange(rows), *operands))  # noqa: E731
    else:
        every_row = lambda: jax.tree.map(lambda a, b: jnp.where(fit, a, b), leading, in_row(x.T, *operands))  # noqa: E731
    return lax.cond(jnp.all(fit), lambda: leading, every_row)


def is_above(x, t, top, min_p):
    """Where `exp((x - top) / t) >= min_p`, `[vocab, rows]`."""
    return (min_p <= 0.0) | ((x - race.finite_or_zero(top)) * inverse_temperature(t) >= jnp.log(min_p))


def kept_set(x, t, filters: Filters, *, by_row: bool = False):
    """bool `[vocab, rows]`: the tokens of the processed logits x that the filters leave; NaN logits stay, to be seen later.

    `by_row`: search row by row where the leading groups do not do, which is better for a CPU.
    """
    top = jnp.max(x, axis=0)
    out = x > -jnp.inf
    if filters.min_p is not None:
        out &= is_above(x, t, top, filters.min_p)
    if filters.top_k is not None or filters.top_p is not None:
        ids = lax.broadcasted_iota(jnp.int32, x.shape, 0)
        out &= is_kept(ordered_keys(x), ids, last_kept(x, t, top, filters, by_row))
    return out | jnp.isnan(x)
