"""Merging what parts of a vocabulary say: one draw from many, across shards, hosts, models or time.

A part with logits l has the log mass `m = logsumexp(l)`. Whatever is known of it decides how parts merge:

- its race, (score, token, log mass) with `score = m + Gumbel`: `merge` keeps the larger score. Pathwise exact;
- a token drawn from it and its log mass only: `merge_log_mass` draws one of many parts, `merge_online` one of two, so that
  a stream of parts takes constant memory. Exact in distribution.

Every part must have been drawn with noise of its own: other ids with one key (`summarize` with `first_id`), or other keys.

Source: C. J. Maddison, D. Tarlow, T. Minka, "A* sampling", NeurIPS 2014 (max-stability); "FlashSampling", arXiv 2603.15854
(group-wise and online merging).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gumbeljax import _checks
from gumbeljax._call import plain_broadcasting
from gumbeljax._keys import row_keys
from gumbeljax._mesh import check_rows
from gumbeljax._typing import Array, ArrayLike, Key
from pallas_kernels import noise, race, xla


class Summary(NamedTuple):
    """The race over a part of a vocabulary. A part without mass is (-inf, -1, -inf)."""

    score: Any  # f32 [*batch], log mass + Gumbel
    token: Any  # i32 [*batch]
    log_mass: Any  # f32 [*batch]


class Candidate(NamedTuple):
    """A token drawn from a part of a vocabulary, and the part's log mass. A part without mass is (-1, -inf)."""

    token: Any  # i32 [*batch]
    log_mass: Any  # f32 [*batch]


@plain_broadcasting()
def summarize(logits: ArrayLike, key: Key, *, first_id: ArrayLike = 0) -> Summary:
    """The race over logits `[*batch, n]` whose first token is `first_id`.

    Pathwise exact: parts that start at multiples of 16 merge to the token of
    `gumbeljax.sample_logits(all logits, key)`. Other cuts are exact in distribution.

    Args:
      logits: bfloat16, float16 or float32.
      key: one key or an array of keys of the batch's shape, the same for all parts.
      first_id: one integer, may be traced.

    Returns:
      `Summary`, leaves `[*batch]`; a NaN or +inf logit gives token -1 and a NaN mass.

    >>> import jax, jax.numpy as jnp
    >>> logits, key = jnp.arange(48.0), jax.random.key(0)
    >>> parts = [summarize(logits[i:i + 16], key, first_id=i) for i in (0, 16, 32)]
    >>> whole = merge(parts[0], merge(parts[1], parts[2]))
    >>> int(whole.token), f"{whole.log_mass:.4f}"
    (47, '47.4587')
    """
    logits = _checks.float_array(logits, "logits")
    if logits.ndim == 0 or logits.shape[-1] == 0:
        raise ValueError(f"logits must be [*batch, n] with at least one token; got shape {list(logits.shape)}: pass a part.")
    batch_shape, n = logits.shape[:-1], logits.shape[-1]
    first = _checks.as_array(first_id, "first_id")
    if first.shape != () or not jnp.issubdtype(first.dtype, jnp.integer):
        raise TypeError(f"first_id must be one integer; got {first.dtype}{list(first.shape)}: pass the id of the first logit.")
    # Shards of the vocabulary share a key: they are those over which first_id varies.
    of_shard = first_id if _checks.is_traced(first_id) else None
    check_rows(logits, key, of_shard, (), way_out="one key per row, sharded like logits")
    words = row_keys(key, batch_shape)
    if logits.size == 0:  # no rows
        nothing = jnp.zeros(batch_shape, jnp.float32)
        return Summary(nothing, nothing.astype(jnp.int32), nothing)
    t = jnp.ones_like(words[0], jnp.float32)
    keys = (*words, jnp.full_like(words[0], first.astype(jnp.uint32)))
    out = _summary(logits.reshape(-1, n), keys, t, first.astype(jnp.int32))
    return Summary(*(x.reshape(batch_shape) for x in out))


@jax.jit  # its NaN is for rows without a law: on the way to others `jax_debug_nans` is to see none
def _summary(logits, keys, t, first) -> Summary:
    draw, won = xla.piece(logits, None, keys, t, vocab=logits.shape[1])[:2]
    is_none = draw.token < 0
    marker = jnp.where(won.top == -jnp.inf, -jnp.inf, jnp.nan)
    return Summary(jnp.where(is_none, marker, won.high + won.low), jnp.where(is_none, -1, draw.token + first),
                   jnp.where(is_none, marker, draw.log_normalizer))


@plain_broadcasting()
def merge(a: Summary, b: Summary) -> Summary:
    """The race over two parts together: the larger score wins, masses add (`logaddexp`).

    Pathwise exact: associative and commutative, tokens and scores bit for bit, masses to rounding. Equal scores go to the
    lower token. A NaN on either side is a NaN, with token -1. Leaves broadcast.

    >>> import jax.numpy as jnp
    >>> empty = Summary(-jnp.inf, -1, -jnp.inf)
    >>> part = Summary(jnp.float32(1.5), jnp.int32(7), jnp.float32(0.5))
    >>> [x.item() for x in merge(empty, part)]
    [1.5, 7, 0.5]
    """
    a_wins = (a.score > b.score) | ((a.score == b.score) & (a.token < b.token))
    is_nan = jnp.isnan(a.log_mass) | jnp.isnan(b.log_mass)
    return Summary(jnp.where(is_nan, jnp.nan, jnp.where(a_wins, a.score, b.score)),
                   jnp.where(is_nan, -1, jnp.where(a_wins, a.token, b.token)),
                   jnp.logaddexp(a.log_mass, b.log_mass))


def _noise(key: Key, log_mass: Array, level: int) -> Array:
    """Gumbel noise of merging log masses, `[n, *batch]`."""
    check_rows(log_mass, key, None, (), way_out="one key per row, sharded like the candidates")
    batch_shape, indices = log_mass.shape[1:], jnp.arange(log_mass.shape[0])
    words = row_keys(key, batch_shape)
    stream = noise.stream(noise.MERGE, 0, level)
    return noise.gumbel(*words, stream, indices[:, None].astype(jnp.uint32)).reshape(-1, *batch_shape)


@plain_broadcasting()
def merge_log_mass(candidates: Candidate, key: Key) -> Candidate:
    """One of n candidates, stacked along axis 0, with probability proportional to the exponential of its log mass.

    Exact in distribution: associative and commutative in law only, since the noise belongs to the merge. `key`: one key or
    an array of keys of the batch's shape, used for nothing else but draws.

    Returns:
      `Candidate` with leaves `[*batch]`: the chosen token and the log mass of all parts. Parts without mass are never chosen,
      unless all are, which gives (-1, -inf); a NaN mass gives (-1, NaN).

    >>> import jax, jax.numpy as jnp
    >>> parts = Candidate(jnp.array([3, 20, 35]), jnp.array([-jnp.inf, 0.0, -jnp.inf]))
    >>> [x.item() for x in merge_log_mass(parts, jax.random.key(0))]
    [20, 0.0]
    """
    token, log_mass = jnp.asarray(candidates.token), jnp.asarray(candidates.log_mass, jnp.float32)
    if token.shape != log_mass.shape or token.ndim == 0 or token.shape[0] == 0:
        raise ValueError(f"candidates must have token and log_mass of one shape [n, *batch]; got {list(token.shape)} and "
                         f"{list(log_mass.shape)}: stack them along axis 0.")
    index = jnp.arange(token.shape[0])
    scores = log_mass + _noise(key, log_mass, noise.GROUP_LEVEL)
    column = index.reshape(-1, *(1,) * (token.ndim - 1))
    chosen = race.first_where(scores == jnp.max(scores, axis=0), column)
    total = jnp.max(log_mass, axis=0)
    total = total + jnp.log(jnp.sum(jnp.exp(log_mass - race.finite_or_zero(total)), axis=0))
    picked = jnp.sum(jnp.where(column == chosen, token, 0), axis=0, dtype=token.dtype)
    return Candidate(jnp.where(total > -jnp.inf, picked, -1), total)


@plain_broadcasting()
def merge_online(old: Candidate, new: Candidate, key: Key) -> Candidate:
    """What is held after one more part: `new` with probability `exp(m_new) / (exp(m_new) + exp(m_old))`.

    Exact in distribution. The coin is the race `m_new + G1 > m_old + G2`: as a probability it would be NaN for two parts
    without mass, and zero for a part below 2^-24 of the other. Give every step a key of its own, such as
    `fold_in(key, step)`.

    >>> import jax, jax.numpy as jnp
    >>> held = Candidate(jnp.int32(-1), -jnp.inf)  # nothing yet
    >>> for step, log_mass in enumerate([-1.0, 2.0, 60.0]):
    ...     held = merge_online(held, Candidate(jnp.int32(step), log_mass), jax.random.key(step))
    >>> [x.item() for x in held]
    [2, 60.0]
    """
    m_old, m_new = jnp.asarray(old.log_mass, jnp.float32), jnp.asarray(new.log_mass, jnp.float32)
    coins = _noise(key, jnp.stack(jnp.broadcast_arrays(m_old, m_new)), noise.TOKEN_LEVEL)
    total = jnp.logaddexp(m_old, m_new)
    token = jnp.where(m_new + coins[0] > m_old + coins[1], new.token, old.token)
    return Candidate(jnp.where(jnp.isnan(total), -1, token), total)
