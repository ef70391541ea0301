"""The end of a kept prefix, searched over whole rows: a few rounds of float32 sums, then the integers of few groups.

The sums only say where the end may lie: where their rounding could decide they exclude nothing, and where more is left than
the few groups that are looked at, the integers of all tokens are added up. So the end is the one that `kept` defines.
"""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from pallas_kernels import kept, noise
from pallas_kernels.kept import Filters, Kept, Mass

UNDECIDED = 64  # groups searched instead of the whole row: those left undecided
ROUNDS, NEAR, SLACK = 16, 1 / 32, 2e-6  # rounds at most; how near they look; the relative error of their sums


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
            low, below = kept.either(is_low & (place > low), (place, there), (low, below))
            high, most = kept.either(is_high & (place < high), (place, there), (high, most))
        return number + 1, low, high, below, most

    _, low, high, _, most = lax.while_loop(is_wide, one_round, (jnp.int32(0), low, top, jnp.zeros_like(spare), everything))
    return low, high, most < everything


def end_in_rows(x, measure: Measure, base: Mass, target: Mass, low, top) -> Kept:
    """`end_of_prefix` of all tokens `[vocab, rows]`, which measure `base`, when none below `low` is needed."""
    vocab, lowest, over = x.shape[0], kept.ordered_keys(low), kept.ordered_keys(top) + 1
    everything, spare = (kept.as_float(m) / measure.unit for m in (base, kept.minus(base, target)))
    from_logit, to_logit, is_below = narrowed(measure, everything, spare, low, top)
    to_logit = jnp.where(is_below, to_logit, jnp.inf)
    low, high = kept.ordered_keys(from_logit), jnp.where(is_below, kept.ordered_keys(to_logit), over)
    beyond_high = lambda x, values: tuple(jnp.where(x >= to_logit, m, 0) for m in measure.mass(values))  # noqa: E731
    above = kept.carried(*sums(beyond_high, x, measure.values))
    groups = kept.grouped(x, -jnp.inf)
    parts = (groups[:, i] for i in range(noise.GROUP))
    undecided = functools.reduce(jnp.logical_or, ((part >= from_logit) & (part < to_logit) for part in parts))
    undecided = lax.optimization_barrier(undecided.astype(jnp.float32))  # made once, before it is turned
    few = min(UNDECIDED, undecided.shape[0])
    few_ids, pick = kept.members(kept.largest(undecided.T, few)[1], vocab)
    few_keys, few_values = kept.ordered_keys(pick(x, -jnp.inf)), pick(measure.values, 0.0)

    def is_right(keys, mass):
        inside = kept.add_up(mass, (keys >= low[:, None]) & (keys < high[:, None]))
        return kept.at_least(kept.plus(above, inside), target), ~kept.at_least(above, target)  # of low, of high

    def mass_of(values):
        return Mass(*(m.T for m in measure.mass(values.T)))

    def in_few():
        return kept.end_between(few_keys, few_ids, few_mass, target, low, high, above, vocab, kept.num_halvings(low, high))

    def in_all():
        keys, mass = kept.ordered_keys(x).T, mass_of(measure.values.T)
        low_right, high_right = is_right(keys, mass)
        start, stop = jnp.where(low_right, low, lowest), jnp.where(high_right, high, over)
        beyond = Mass(*(jnp.where(high_right, m, 0) for m in above))
        ids = lax.broadcasted_iota(jnp.int32, keys.shape, 1)
        return kept.end_between(keys, ids, mass, target, start, stop, beyond, vocab, kept.num_halvings(start, stop))

    few_mass = mass_of(few_values)
    low_right, high_right = is_right(few_keys, few_mass)
    is_done = low_right & high_right & (jnp.sum(undecided, axis=0) <= few) | ~jnp.isfinite(top)
    return lax.cond(jnp.all(is_done), in_few, in_all)


def in_rows(x, weight, t, top, total, everything: Any, filters: Filters) -> Kept:
    """The end of the prefix kept by top_k and top_p, from all of the logits `[vocab, rows]` and their weights."""
    vocab = x.shape[0]

    def counted(x):
        number = (x > -jnp.inf).astype(jnp.int32)
        return Mass(number, jnp.zeros_like(number))

    ones = Measure(x, lambda x: x, jnp.ones_like, counted, jnp.ones_like(top))

    def masses(prefix):
        inside = weight
        if prefix is not None:
            ids = lax.broadcasted_iota(jnp.int32, x.shape, 0)
            inside = lax.optimization_barrier(jnp.where(kept.is_kept(kept.ordered_keys(x), ids, prefix), weight, 0.0))
        unit = kept.units(total)
        return Measure(inside, lambda x: kept.weights(x, t, top), lambda weight: weight,
                       lambda weight: kept.in_units(weight, unit), unit)

    def end_of(measure, base, target):
        if measure is ones:
            low = jnp.minimum(jnp.min(jnp.where(x > -jnp.inf, x, jnp.inf), axis=0), top)
        else:  # tokens below this have no mass, or all together less than may be left
            spare = jnp.maximum(kept.as_float(kept.minus(base, target)) / vocab, 2.0**-kept.FINE)
            low = jnp.minimum(top + t * jnp.log(0.5 * spare / measure.unit), top)
        return end_in_rows(x, measure, base, target, low, top)

    def add(measure):
        return kept.carried(*sums(measure.mass, measure.values))

    return kept.search(ones, masses, everything, filters, end_of, add)
