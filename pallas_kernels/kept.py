"""The kept set: what top-k, top-p and min-p leave of a row, found without sorting the vocabulary.

Order the tokens of a row by logit, largest first, lowest id first among equals. Each filter keeps a prefix of that order, so
all of them together do:

    top_k   the first k tokens
    top_p   the shortest prefix whose mass is at least p times the mass of what top_k left (the crossing token is kept)
    min_p   the tokens with exp((l - max l) / T) >= min_p

The end of a prefix is the largest key at or above which the tokens are enough, and among those tied there the smallest id up
to which they are. Enough is decided by sums of integers, which do not depend on the order of summation: counts for top-k,
masses in fixed point for top-p. So it does not matter where they are summed, and most of a search looks at few tokens: the k
largest lie in the k groups with the largest maxima, and a few rounds of float32 sums over whole rows leave few groups open.

Logits are `[vocab, rows]` here as elsewhere; the few tokens that are searched run along the last axis.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import noise, race
from pallas_kernels.logits import inverse_temperature

LEADING, UNDECIDED = 128, 64  # groups searched instead of the whole row: those with the largest maxima; those left undecided
ROUNDS, NEAR, SLACK = 16, 1 / 32, 2e-6  # at most, over whole rows; how near they look; the relative error of their sums
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


def sums(f, *arrays):
    """Sums along axis 0 of the arrays that f, elementwise, makes of these. Sixteen pieces are added up number by number: XLA's
    CPU code takes several times as long for a sum of integers, and for each of several sums."""
    pieces, size = noise.GROUP, arrays[0].shape[0] // noise.GROUP
    if size < pieces:
        return tuple(jnp.sum(a, axis=0, dtype=a.dtype) for a in f(*arrays))
    parts = [f(*(a[i * size:(i + 1) * size] for a in arrays)) for i in range(pieces)]
    added = lax.optimization_barrier(functools.reduce(lambda a, b: tuple(map(jnp.add, a, b)), parts))
    rest = f(*(a[pieces * size:] for a in arrays))
    return tuple(a + jnp.sum(b, axis=0, dtype=b.dtype) for a, b in zip(sums(lambda *a: a, *added), rest, strict=True))


class Measure(NamedTuple):
    """What a filter adds up over whole rows. Its values, `[vocab, rows]`, rise with the logits."""

    values: Any
    value_of: Any  # that of a logit
    weigh: Any  # what a value counts, float32
    mass: Any  # the same exactly, `unit` times as much
    unit: Any


def narrowed(measure: Measure, everything, spare, low, top):
    """Logits (low, high, whether high has moved from the top) between which a prefix ends that leaves `spare` of everything,
    and no more than `UNDECIDED` tokens lie, if that can be had.

    Float32 sums of what is left decide, at three places a round: halfway, and around where it would be on a straight line.
    Where their rounding could decide, neither end moves."""
    def is_wide(state):
        number, low, _, below, most = state
        return (number < ROUNDS) & jnp.any(most - below > UNDECIDED * measure.weigh(measure.value_of(low)))

    def one_round(state):
        number, low, high, below, most = state
        line = jnp.clip((spare - below) / (most - below), 2 * NEAR, 1.0 - 2 * NEAR)
        places = [low + share * (high - low) for share in (0.5, line - NEAR, line + NEAR)]
        edges = [measure.value_of(place) for place in places]
        sums_below = sums(lambda a: tuple(jnp.where(a < edge, measure.weigh(a), 0.0) for edge in edges), measure.values)
        for place, there in zip(places, sums_below, strict=True):
            is_low, is_high = there < (1.0 - SLACK) * spare, there > (1.0 + SLACK) * spare
            low, below = either(is_low & (place > low), (place, there), (low, below))
            high, most = either(is_high & (place < high), (place, there), (high, most))
        return number + 1, low, high, below, most

    _, low, high, _, most = lax.while_loop(is_wide, one_round, (jnp.int32(0), low, top, jnp.zeros_like(spare), everything))
    return low, high, most < everything


def end_in_rows(x, measure: Measure, base: Mass, target: Mass, low, top) -> Kept:
    """`end_of_prefix` of all tokens `[vocab, rows]`, which measure `base`, when none below `low` is needed."""
    vocab, lowest, over = x.shape[0], ordered_keys(low), ordered_keys(top) + 1
    everything, spare = (as_float(m) / measure.unit for m in (base, minus(base, target)))
    low, high, is_below = narrowed(measure, everything, spare, low, top)
    low, high = ordered_keys(low), jnp.where(is_below, ordered_keys(high), over)
    above = carried(*sums(lambda x, values: tuple(jnp.where(ordered_keys(x) >= high, m, 0) for m in measure.mass(values)),
                          x, measure.values))
    groups = grouped(x, -jnp.inf)
    parts = (ordered_keys(groups[:, i]) for i in range(noise.GROUP))
    undecided = functools.reduce(jnp.logical_or, ((keys >= low) & (keys < high) for keys in parts))
    undecided = lax.optimization_barrier(undecided.astype(jnp.float32))  # made once, before it is turned
    few = min(UNDECIDED, undecided.shape[0])
    few_ids, pick = members(largest(undecided.T, few)[1], vocab)
    few_keys, few_values = ordered_keys(pick(x, -jnp.inf)), pick(measure.values, 0.0)

    def is_right(keys, mass):
        inside = add_up(mass, (keys >= low[:, None]) & (keys < high[:, None]))
        return at_least(plus(above, inside), target), ~at_least(above, target)  # of low, of high

    def mass_of(values):
        return Mass(*(m.T for m in measure.mass(values.T)))

    def in_few():
        return end_between(few_keys, few_ids, few_mass, target, low, high, above, vocab, num_halvings(low, high))

    def in_all():
        keys, mass = ordered_keys(x).T, mass_of(measure.values.T)
        low_right, high_right = is_right(keys, mass)
        start, stop = jnp.where(low_right, low, lowest), jnp.where(high_right, high, over)
        beyond = Mass(*(jnp.where(high_right, m, 0) for m in above))
        ids = lax.broadcasted_iota(jnp.int32, keys.shape, 1)
        return end_between(keys, ids, mass, target, start, stop, beyond, vocab, num_halvings(start, stop))

    few_mass = mass_of(few_values)
    low_right, high_right = is_right(few_keys, few_mass)
    is_done = low_right & high_right & (jnp.sum(undecided, axis=0) <= few) | ~jnp.isfinite(top)
    return lax.cond(jnp.all(is_done), in_few, in_all)


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


def in_rows(x, weight, t, top, total, everything: Any, filters: Filters) -> Kept:
    """The end of the prefix kept by top_k and top_p, from all of the logits `[vocab, rows]` and their weights."""
    vocab = x.shape[0]

    def counted(x):
        number = (x > -jnp.inf).astype(jnp.int32)
        return Mass(number, jnp.zeros_like(number))

    ones = Measure(x, lambda x: x, jnp.ones_like, counted, jnp.ones_like(top))

    def masses(kept):
        inside = weight
        if kept is not None:
            ids = lax.broadcasted_iota(jnp.int32, x.shape, 0)
            inside = lax.optimization_barrier(jnp.where(is_kept(ordered_keys(x), ids, kept), weight, 0.0))
        unit = units(total)
        return Measure(inside, lambda x: weights(x, t, top), lambda weight: weight, lambda weight: in_units(weight, unit), unit)

    def end_of(measure, base, target):
        if measure is ones:
            low = jnp.minimum(jnp.min(jnp.where(x > -jnp.inf, x, jnp.inf), axis=0), top)
        else:  # tokens below this have no mass, or all together less than may be left
            spare = jnp.maximum(as_float(minus(base, target)) / vocab, 2.0**-FINE)
            low = jnp.minimum(top + t * jnp.log(0.5 * spare / measure.unit), top)
        return end_in_rows(x, measure, base, target, low, top)

    return search(ones, masses, everything, filters, end_of, lambda measure: carried(*sums(measure.mass, measure.values)))


def weights(x, t, top):
    """`exp((x - top) / t)`, `[vocab, rows]`."""
    return jnp.exp((x - race.finite_or_zero(top)) * inverse_temperature(t))


def in_leading(x, weight, t, top, total, everything: Any, filters: Filters, otherwise) -> Kept:
    """The end of the prefix kept by top_k and top_p, from the groups with the largest maxima, or if those do not do from
    `otherwise()`."""
    vocab = x.shape[0]
    maxima = jnp.max(grouped(orderly(x), -jnp.inf), axis=1).T
    best, chosen = largest(maxima, min(LEADING, maxima.shape[1]))
    ids, pick = members(chosen, vocab)
    keys = ordered_keys(pick(x, -jnp.inf))
    mass: Any = None if weight is None else fixed_point(pick(weight, 0.0), total)

    def masses(kept):
        if kept is None:
            return mass
        inside = is_kept(keys, ids, Kept(kept.key[:, None], kept.id[:, None]))
        return lax.optimization_barrier(Mass(*(jnp.where(inside, m, 0) for m in mass)))

    def end_of(mass, base, target):
        return end_of_prefix(keys, ids, mass, target, vocab)

    def here():
        ones = Mass(jnp.ones_like(keys), jnp.zeros_like(keys))
        return search(ones, masses, everything, filters, end_of, lambda mass: add_up(mass, True))

    if best.shape[1] == maxima.shape[1]:
        return here()
    fit = fits(best, keys, mass, everything, top, total, t, filters) | ~jnp.isfinite(top)
    return lax.cond(jnp.all(fit), here, otherwise)


def last_kept(x, t, top, filters: Filters) -> Kept:
    """The end of the prefix kept by top_k and top_p, of processed logits `[vocab, rows]`."""
    vocab = x.shape[0]
    if filters.top_k is not None:
        filters = filters._replace(top_k=jnp.where(filters.top_k >= vocab, 0, filters.top_k))
    filters = filters._replace(min_p=None)
    weight = total = everything = None
    if filters.top_p is not None:
        weight = lax.optimization_barrier(weights(x, t, top))  # one value for every use, whatever is fused with it
        total = jnp.sum(weight, axis=0)
        everything = carried(*sums(lambda weight: in_units(weight, units(total)), weight))
    whole = functools.partial(in_rows, x, weight, t, top, total, everything, filters)
    leading = functools.partial(in_leading, x, weight, t, top, total, everything, filters, whole)
    if filters.top_k is not None or vocab <= noise.GROUP * LEADING:
        return leading()
    return lax.platform_dependent(cpu=whole, default=leading)  # for a mass alone a CPU is as fast on the whole row


def is_above(x, t, top, min_p):
    """Where `exp((x - top) / t) >= min_p`, `[vocab, rows]`."""
    return (min_p <= 0.0) | ((x - race.finite_or_zero(top)) * inverse_temperature(t) >= jnp.log(min_p))


def kept_set(x, t, filters: Filters):
    """bool `[vocab, rows]`: the tokens of the processed logits x that the filters leave; NaN logits stay, to be seen later."""
    top = jnp.max(x, axis=0)
    out = x > -jnp.inf
    if filters.min_p is not None:
        out &= is_above(x, t, top, filters.min_p)
    if filters.top_k is not None or filters.top_p is not None:
        ids = lax.broadcasted_iota(jnp.int32, x.shape, 0)
        out &= is_kept(ordered_keys(x), ids, last_kept(x, t, top, filters))
    return out | jnp.isnan(x)
