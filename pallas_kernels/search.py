"""The winner of the race over `max(p - c q, 0)` without a pass over two tables: an A* search along the scores under p.

The residual r is nowhere above p. So with the noise G of the race over p, a group's score under r, `log r_g + G_g`, is at most
its score under p, `log p_g + G_g`, which the pass that drew from p has kept. Groups are looked at in the order of that bound,
and where the best score under r is not below the bound of all the others, it is the winner of the race over all of r.

A search that looks at a limited number of groups may end without an answer: then `dual.residual_draw` with the same noise finds
the token that a longer search would have found (near-ties aside). One without a limit costs little on average: at a position
where r has mass R a drafted token is rejected with probability R, and then about 1 / R groups are looked at.

Source: C. J. Maddison, D. Tarlow, T. Minka, "A* sampling", NeurIPS 2014.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from pallas_kernels import dual, noise, race
from pallas_kernels.finish import ids_of
from pallas_kernels.logits import inverse_temperature

IDS = 1024  # looked at for a row
NEGLIGIBLE = 2.0**-20  # a residual mass below it is rounding: p and q are equal
NATS = 1e-4  # by how much rounding of noise and sums may lift a score above its bound,
RELATIVE = {"float32": 2.0**-18, "float16": 2.0**-10}  # and that of logits and of what is kept, as a part of the score


class Asked(NamedTuple):
    """Searches, `[searches]` each: max(p - factor * q, 0) of two rows. What one with factor 0 says means nothing."""

    target_row: Any
    draft_row: Any
    factor: Any


class Found(NamedTuple):
    """What a search says, `[searches]`: the best score under r and its token, and log p of that; r's mass in the groups that
    were looked at; and a bound on the scores of all others, or None where every search went on to its end: until its winner was
    found in groups whose mass is not negligible, or all groups were looked at."""

    high: Any
    low: Any
    token: Any
    log_p: Any
    mass: Any
    bound: Any

    def is_winner(self):
        """Whether nothing can have a better score than what was found."""
        return (self.high > -jnp.inf) & (True if self.bound is None else self.high + self.low >= self.bound)

    def is_whole(self):
        """Whether looking at all groups would say no more."""
        return jnp.full(self.mass.shape, True) if self.bound is None else self.is_winner() & (self.mass > NEGLIGIBLE)


def bounds(high, t, normalizer: dual.Normalizer):
    """Scores under p in nats, `log p_g + G_g`, lifted by what rounding can do."""
    relative, high = RELATIVE[high.dtype.name], high.astype(jnp.float32)
    lifted = (high + relative * jnp.abs(high) - normalizer.top) * inverse_temperature(t) - normalizer.log_total() + NATS
    return jnp.where(high == -jnp.inf, -jnp.inf, lifted)


def score_groups(r, log_p, keys, first, *, sample) -> Found:
    """What groups say one by one, `[...]`: log r and log p `[16, ...]`, first ids `[...]`. Runs inside kernels too."""
    one = jnp.float32(1.0)
    top = jnp.max(r, axis=0)
    total = jnp.sum(jnp.exp(r - race.finite_or_zero(top)), axis=0)
    high, low = race.scores(top, total, race.group_noise(keys, sample, first), one)
    ids = first + lax.broadcasted_iota(jnp.int32, r.shape, 0)
    token = race.choose(race.token_scores(r, keys, sample, one, ids), ids)
    log_p = jnp.sum(jnp.where(ids == token, log_p, 0.0), axis=0)
    return Found(high, low, token, log_p, total * jnp.exp(top), None)


def better_of(a: Found, b: Found) -> Found:
    """What two searches of one residual say together; equal scores go to the lowest token."""
    is_lower = (a.low < b.low) | ((a.low == b.low) & (a.token > b.token))
    takes_b = (a.high < b.high) | ((a.high == b.high) & is_lower)
    high, low, token, log_p = (jnp.where(takes_b, y, x) for x, y in zip(a[:4], b[:4], strict=True))
    bound = None if a.bound is None else jnp.maximum(a.bound, b.bound)
    return Found(high, low, token, log_p, a.mass + b.mass, bound)


def best_of(found: Found) -> Found:
    """The best of what was found along axis 0. One reduction of all, which XLA makes one kernel."""
    least = jnp.float32(-jnp.inf)
    nothing = Found(least, least, jnp.int32(race.NO_ID), least, jnp.float32(0.0), None if found.bound is None else least)
    return lax.reduce(found, nothing, better_of, (0,))


def search(scores: race.Scores, target: dual.Side, draft: dual.Side, keys, asked: Asked, *, sample, vocab, is_shard=False,
           num_ids=None) -> Found:
    """Looks at all groups of the tiles, `num_ids` ids in all, whose best group scored best. Scores and keys (as in
    `dual.residual_draw`) have the rows of the target. `is_shard`: of one shard of several; here it changes nothing."""
    del is_shard
    target, draft = dual.at_rows(target, asked.target_row), dual.at_rows(draft, asked.draft_row)
    keys = tuple(x[asked.target_row] for x in keys)
    tiles = -(-vocab // scores.width)
    of_tiles = scores.told if jnp.issubdtype(scores.told.dtype, jnp.floating) else race.untold(scores.told)[0]
    num = min(max(1, (IDS if num_ids is None else num_ids) // scores.width), tiles)
    best, tile = lax.top_k(of_tiles[:tiles, asked.target_row].T, min(num + 1, tiles))
    bound = jnp.full_like(target.t, -jnp.inf)
    if num < tiles:
        bound = bounds(best[:, num], target.t, target.normalizer)
    starts = scores.width * jnp.where(asked.factor > 0.0, tile[:, :num].T, 0)
    first = starts[:, None] + jnp.arange(0, scores.width, noise.GROUP, dtype=jnp.int32)[:, None]
    first = first.reshape(-1, asked.factor.shape[0])
    ids = ids_of(first)
    log_p = dual.log_law_of(target, ids, vocab)
    r = dual.log_residual(log_p, dual.log_law_of(draft, ids, vocab), asked.factor)
    in_groups = lambda x: x.reshape(-1, noise.GROUP, x.shape[1]).swapaxes(0, 1)  # noqa: E731
    found = score_groups(in_groups(r), in_groups(log_p), keys, first, sample=sample)
    return best_of(found._replace(bound=jnp.broadcast_to(bound, first.shape)))
