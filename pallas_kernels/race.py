"""Grouped Gumbel-max: the race that draws a token, written once for every kernel, block and shard.

For logits l and temperature T, a group g of 16 consecutive ids has

    top_g   = max l,    total_g = sum exp((l - top_g) / T),    log mass = top_g + T log total_g
    score_g = top_g + T (log total_g + G_g)                       with G_g standard Gumbel

The group with the largest score is drawn with probability proportional to its mass (max-stability of the Gumbel
distribution), and inside it the token with the largest `(l - top_g) / T + G_v`. Scores are kept as unevaluated sums
`high + low`, so that neither a low temperature nor large logits can round the noise away; comparing them is exact and
therefore independent of how the vocabulary was cut.

Vocabulary runs along axis 0, rows along the last axis. A group without mass has score and top -inf and total 0.

Source: C. J. Maddison, D. Tarlow, T. Minka, "A* sampling", NeurIPS 2014 (top-down construction of Gumbel processes).
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from pallas_kernels import noise
from pallas_kernels.logits import inverse_temperature

NO_ID = 2**31 - 1
LEAST_GAP = 107 << 2  # the exponent of 2^-20


class Race(NamedTuple):
    """What a piece of the vocabulary says to the others: its winner and its mass."""

    high: Any  # f32 score of the winning group, rounded
    low: Any  # f32 what the rounding left: score = high + low
    winner: Any  # i32 first token id of the winning group
    top: Any  # f32 largest processed logit
    total: Any  # f32 sum exp((l - top) / T)


class Mass(NamedTuple):
    """Largest logit, the lowest id that has it, and `sum exp((l - top) / T)`."""

    top: Any
    argmax: Any
    total: Any


class Scores(NamedTuple):
    """What groups scored, for whoever looks for the winner of another race with the same noise: of every tile of `width` ids
    what `told` packs, int32; or, for a search of whole tiles, the best score, `halved`. `[tiles, rows]`; tiles behind the
    vocabulary mean nothing.
    """

    told: Any
    width: int


def told(best, second, number):
    """Of a tile in 32 bits: its best score, rounded up to 20 bits; how far below the second is at least, 8 bits; and which of
    its groups is the best, 4 bits."""
    bits = lax.bitcast_convert_type(best, jnp.int32)
    up = jnp.where(bits > 0, bits + 0xFFF, bits) & ~0xFFF
    # A little less than the gap, for the difference is rounded. Its exponent, 2^-20 to 2^43, and two more bits.
    gap = (lax.bitcast_convert_type(up, jnp.float32) - second) * (1.0 - 2.0**-20)
    gap = lax.bitcast_convert_type(jnp.where(second > -jnp.inf, gap, jnp.inf), jnp.int32) >> 21
    return up | jnp.maximum(jnp.minimum(gap - LEAST_GAP, 255), 0) << 4 | number


def untold(word):
    """(bound on the best score, bound on the second, number of the best) of what `told` packed."""
    best, gap = lax.bitcast_convert_type(word & ~0xFFF, jnp.float32), (word >> 4) & 255
    gap = jnp.where(gap > 0, lax.bitcast_convert_type((gap + LEAST_GAP) << 21, jnp.float32), 0.0)
    return best, best - gap, word & 15


def halved(high):
    """Scores rounded to float16, and none below the least of its numbers, which is a bound to what is there."""
    return jnp.maximum(high, -65504.0).astype(jnp.float16)


def finite_or_zero(top):
    """`top`, or 0 where it is -inf, so that `-inf - top` is -inf and not NaN."""
    return jnp.where(top == -jnp.inf, 0.0, top)


def first_where(condition, ids):
    """Lowest id at which `condition` holds along axis 0, or NO_ID."""
    return jnp.min(jnp.where(condition, ids, jnp.int32(NO_ID)), axis=0)


def two_sum(a, b):
    """`a + b` as (rounded sum, rounding error), exactly. Source: D. E. Knuth, TAOCP vol. 2, 4.2.2."""
    high = a + b
    b_part = high - a
    return high, (a - (high - b_part)) + (b - b_part)


def group_masses(x, t):
    """(top, total) `[groups, rows]` of logits `[groups * 16, rows]`."""
    x = x.reshape(x.shape[0] // noise.GROUP, noise.GROUP, x.shape[1])
    top = jnp.max(x, axis=1)
    total = jnp.sum(jnp.exp((x - finite_or_zero(top)[:, None]) * inverse_temperature(t)), axis=1)
    return top, total


def scores(top, total, gumbel, t):
    """`top + T (log total + G)` as a pair (high, low)."""
    has_mass = total > 0.0
    spread = jnp.where(has_mass, t * (jnp.log(jnp.where(has_mass, total, 1.0)) + gumbel), 0.0)
    high, low = two_sum(finite_or_zero(top), spread)  # -inf - -inf would be a NaN, if one that nobody reads
    return jnp.where(top == -jnp.inf, -jnp.inf, high), jnp.where(top == -jnp.inf, 0.0, low)


def global_ids(keys, ids):
    """Ids in the whole vocabulary, uint32. In a shard of it, `keys` has a third entry: the id of the shard's first token."""
    ids = ids.astype(jnp.uint32)
    return ids + keys[2] if len(keys) > 2 else ids


def to_global(ids, first):
    """Ids of a shard as ids of the whole vocabulary, int32; markers stay."""
    return jnp.where((ids < 0) | (ids == NO_ID), ids, ids + first)


def group_noise(keys, sample, first_ids, kind=noise.gumbel):
    """Noise of groups: keys = (word 0, word 1[, first id of the shard]), uint32 `[rows]`; first_ids int32
    `[groups, 1]` or `[groups, rows]`."""
    stream = noise.stream(noise.DRAW, sample, noise.GROUP_LEVEL)
    return kind(keys[0], keys[1], stream, global_ids(keys, first_ids))


def mass_of(top, total, t):
    """Merge masses along axis 0: the larger top, totals rescaled to it."""
    best = jnp.max(top, axis=0)
    return best, jnp.sum(total * jnp.exp((top - finite_or_zero(best)) * inverse_temperature(t)), axis=0)


def best_score(high, low, ids):
    """(high, low, id) of the largest score along axis 0; equal scores go to the lowest id."""
    best_high = jnp.max(high, axis=0)
    tied = high == best_high
    best_low = jnp.max(jnp.where(tied, low, -jnp.inf), axis=0)
    return best_high, best_low, first_where(tied & (low == best_low), ids)


def second_best(groups: Race, winner):
    """The second best score of the groups of a tile, `[rows]`."""
    return jnp.max(jnp.where(groups.winner == winner, -jnp.inf, groups.high), axis=0)


def merge(race: Race, t) -> Race:
    """Merge pieces of the vocabulary stacked along axis 0. Associative and commutative, winners bit for bit."""
    return Race(*best_score(race.high, race.low, race.winner), *mass_of(race.top, race.total, t))


def groups_at(first_ids, top, total, keys, sample, t) -> Race:
    """The race of every group alone, `[groups, rows]`, from its mass and its first id."""
    high, low = scores(top, total, group_noise(keys, sample, first_ids), t)
    return Race(high, low, first_ids, top, total)


def groups_of(top, total, keys, sample, t, start) -> Race:
    """`groups_at` of consecutive groups, of which the first begins at the id `start`."""
    return groups_at(start + noise.GROUP * lax.broadcasted_iota(jnp.int32, top.shape, 0), top, total, keys, sample, t)


def race_of(x, keys, sample, t, start) -> Race:
    """The race over logits `[groups * 16, rows]` whose first id is `start`."""
    return merge(groups_of(*group_masses(x, t), keys, sample, t, start), t)


def mass_over(x, t, start) -> Mass:
    """The mass of logits `[n, rows]` whose first id is `start`."""
    top = jnp.max(x, axis=0)
    ids = start + lax.broadcasted_iota(jnp.int32, x.shape, 0)
    total = jnp.sum(jnp.exp((x - finite_or_zero(top)) * inverse_temperature(t)), axis=0)
    return Mass(top, first_where(x == top, ids), total)


def merge_masses(mass: Mass, t) -> Mass:
    """Merge masses stacked along axis 0."""
    top, total = mass_of(mass.top, mass.total, t)
    return Mass(top, first_where(mass.top == top, mass.argmax), total)


def token_noise(keys, sample, ids):
    """Gumbel noise of tokens: ids int32 `[16, rows]`."""
    return noise.gumbel(keys[0], keys[1], noise.stream(noise.DRAW, sample, noise.TOKEN_LEVEL), global_ids(keys, ids))


def token_scores(x, keys, sample, t, ids):
    """`(l - top) / T + G_v` inside groups: x and ids `[16, rows]`; at T = 0 no noise."""
    top = jnp.max(x, axis=0)
    return (x - finite_or_zero(top)) * inverse_temperature(t) + jnp.where(t == 0.0, 0.0, token_noise(keys, sample, ids))


def choose(scored, ids):
    """The id with the largest score along axis 0, the lowest of equals; ids count up by one. Where a score is NaN, any id.

    One reduction: XLA may compute `scored` twice, with and without fused multiply-adds, and then none equals the maximum.
    """
    return jnp.min(ids, axis=0) + lax.argmax(scored, 0, jnp.int32)
