"""The tokens of a row that top-k, top-p and min-p leave: searched in its leading groups, or where those do not do in all.

The k largest tokens lie in the k groups with the largest maxima, and so do those that hold most of a mass, as a rule.
"""

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax

from pallas_kernels import kept, noise, race
from pallas_kernels.kept import Filters, Kept, Mass
from pallas_kernels.logits import inverse_temperature
from pallas_kernels.whole_rows import in_rows, sums

LEADING = 128  # groups searched instead of the whole row: those with the largest maxima


def fits(maxima, keys, mass: Any, everything: Any, top, total, t, filters: Filters):
    """Whether the groups with these maxima, `[rows, n]`, the largest, hold the prefix that the filters keep; `[rows]`. Their
    tokens are given: the maxima, or those of them above the least maximum, which are all that there are above it, must do."""
    top_k, top_p, _ = filters
    above = keys > kept.ordered_keys(maxima[:, -1:])
    in_count = in_mass = jnp.ones_like(top, bool)
    if top_k is not None:
        in_count = top_k <= jnp.maximum(maxima.shape[1], jnp.sum(above, axis=1, dtype=jnp.int32))
    if top_p is not None:
        weight = jnp.exp((maxima - race.finite_or_zero(top)[:, None]) * inverse_temperature(t)[:, None])
        enough = lambda mass, chosen: kept.at_least(kept.add_up(mass, chosen), kept.share(everything, top_p))  # noqa: E731
        in_mass = (top_p >= 1.0) | enough(kept.fixed_point(weight, total), True) | enough(mass, above)
        in_mass = in_mass if top_k is None else (top_k > 0) | in_mass
    return in_count & in_mass


def in_leading(x, weight, t, top, total, everything: Any, filters: Filters, otherwise) -> Kept:
    """The end of the prefix kept by top_k and top_p, from the groups with the largest maxima, or if those do not do from
    `otherwise()`."""
    vocab = x.shape[0]
    maxima = jnp.max(kept.grouped(kept.orderly(x), -jnp.inf), axis=1).T
    best, chosen = kept.largest(maxima, min(LEADING, maxima.shape[1]))
    ids, pick = kept.members(chosen, vocab)
    keys = kept.ordered_keys(pick(x, -jnp.inf))
    mass: Any = None if weight is None else kept.fixed_point(pick(weight, 0.0), total)

    def masses(prefix):
        if prefix is None:
            return mass
        inside = kept.is_kept(keys, ids, Kept(prefix.key[:, None], prefix.id[:, None]))
        return lax.optimization_barrier(Mass(*(jnp.where(inside, m, 0) for m in mass)))

    def end_of(mass, base, target):
        return kept.end_of_prefix(keys, ids, mass, target, vocab)

    def here():
        ones = Mass(jnp.ones_like(keys), jnp.zeros_like(keys))
        return kept.search(ones, masses, everything, filters, end_of, lambda mass: kept.add_up(mass, True))

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
        weight = lax.optimization_barrier(kept.weights(x, t, top))  # one value for every use, whatever is fused with it
        total = jnp.sum(weight, axis=0)
        of_all = lambda: kept.carried(*sums(lambda weight: kept.in_units(weight, kept.units(total)), weight))  # noqa: E731
        if (top_k := filters.top_k) is None:
            everything = of_all()
        else:  # of a row that top_k cuts, nobody asks for more than the mass of what it leaves
            everything = lax.cond(jnp.all(top_k > 0), lambda: Mass(top_k - top_k, top_k - top_k), of_all)
    whole = functools.partial(in_rows, x, weight, t, top, total, everything, filters)
    leading = functools.partial(in_leading, x, weight, t, top, total, everything, filters, whole)
    if filters.top_k is not None or vocab <= noise.GROUP * LEADING:
        return leading()
    return lax.platform_dependent(cpu=whole, default=leading)  # for a mass alone a CPU is as fast on the whole row


def kept_set(x, t, filters: Filters):
    """bool `[vocab, rows]`: the tokens of the processed logits x that the filters leave; NaN logits stay, to be seen later."""
    top = jnp.max(x, axis=0)
    out = x > -jnp.inf
    if filters.min_p is not None:
        out &= kept.is_above(x, t, top, filters.min_p)
    if filters.top_k is not None or filters.top_p is not None:
        ids = lax.broadcasted_iota(jnp.int32, x.shape, 0)
        out &= kept.is_kept(kept.ordered_keys(x), ids, last_kept(x, t, top, filters))
    return out | jnp.isnan(x)
