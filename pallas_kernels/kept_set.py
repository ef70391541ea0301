"""The tokens of a row that top-k, top-p and min-p leave: searched in its leading groups, or where those do not do in all.

The k largest tokens lie in the k groups with the largest maxima, and so do those that hold most of a mass, as a rule.
"""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from pallas_kernels import kept, noise, race
from pallas_kernels.kept import Filters, Kept, Mass
from pallas_kernels.logits import inverse_temperature
from pallas_kernels.whole_rows import in_rows, sums

LEADING = 128  # groups searched instead of the whole row: those with the largest maxima


class Leading(NamedTuple):
    """The groups of each row with the largest maxima, largest first, `[rows, n]`."""

    maxima: Any
    groups: Any


def leading_groups(x) -> Leading:
    """Those of logits `[vocab, rows]`. Groups with a NaN lead, so that nobody overlooks it: a maximum may."""
    seen = jnp.where(jnp.isnan(x), jnp.inf, jnp.where(x == 0.0, 0.0, x))  # `lax.top_k` tells -0.0 from 0.0
    maxima = jnp.max(kept.grouped(seen, -jnp.inf), axis=1).T
    return Leading(*kept.largest(maxima, min(LEADING, maxima.shape[1])))


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


def in_leading(leading: Leading, x, weight, t, top, total, everything: Any, filters: Filters, otherwise) -> Kept:
    """The end of the prefix kept by top_k and top_p, from the leading groups, or if those do not do from `otherwise()`."""
    vocab, (best, chosen) = x.shape[0], leading
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

    if noise.GROUP * best.shape[1] >= vocab:
        return here()
    fit = fits(best, keys, mass, everything, top, total, t, filters) | ~jnp.isfinite(top)
    return lax.cond(jnp.all(fit), here, otherwise)


def last_kept(x, t, top, filters: Filters) -> tuple[Kept, Leading | None]:
    """The end of the prefix kept by top_k and top_p, of processed logits `[vocab, rows]`; and the leading groups, if they were
    looked at and are not all."""
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
    row = x, weight, t, top, total, everything, filters
    whole = functools.partial(in_rows, *row)
    if filters.top_k is not None or vocab <= noise.GROUP * LEADING:
        leading = leading_groups(x)
        return in_leading(leading, *row, whole), leading if vocab > noise.GROUP * LEADING else None
    # For a mass alone a CPU is as fast on the whole row.
    return lax.platform_dependent(cpu=whole, default=lambda: in_leading(leading_groups(x), *row, whole)), None


class Prefix(NamedTuple):
    """What the filters leave of each row: how to tell its tokens. Leaves `[rows]`, but for `leading`."""

    t: Any
    top: Any
    end: Any  # a Kept, or None without top_k and top_p
    min_p: Any
    leading: Any  # None, or the groups that hold all of it where its end lies above the least of their maxima

    def has(self, x, ids):
        """Which of the processed logits x, of the tokens `ids`, are in it; NaN ones are, to be seen later."""
        out = x > -jnp.inf
        if self.min_p is not None:
            out &= kept.is_above(x, self.t, self.top, self.min_p)
        if self.end is not None:
            out &= kept.is_kept(kept.ordered_keys(x), ids, self.end)
        return out | jnp.isnan(x)

    def is_in_leading(self):
        """Whether the leading groups hold all of it: none beyond them has its last token's logit."""
        return self.end.key > kept.ordered_keys(self.leading.maxima[:, -1])


def prefix_of(x, t, filters: Filters) -> Prefix:
    """That of processed logits `[vocab, rows]`."""
    top, end, leading = jnp.max(x, axis=0), None, None
    if filters.top_k is not None or filters.top_p is not None:
        end, leading = last_kept(x, t, top, filters)
    return Prefix(t, top, end, filters.min_p, leading)


def kept_set(x, t, filters: Filters):
    """bool `[vocab, rows]`: the tokens of the processed logits x that the filters leave; NaN logits stay, to be seen later."""
    return prefix_of(x, t, filters).has(x, lax.broadcasted_iota(jnp.int32, x.shape, 0))
