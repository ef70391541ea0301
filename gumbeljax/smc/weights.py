r"""The weights of speculative decoding by particles, as functions of log-probabilities.

A draft q at its temperature extends every particle by K tokens, the target scores them and adds one token of its own. The
law aimed at is :math:`\prod_t p_T(x_t \mid x_{<t})^\alpha / Z`, with p at temperature T; alpha = 1 is the target itself,
larger ones are sharper *as sequences*, which no temperature is. A drafted token owes

.. math:: \alpha \log p_T(x) - \log q(x) ,

and the bonus, drawn from :math:`r = \mathrm{softmax}(\alpha l / T)`, the same with r for q, whatever token it is:

.. math:: \alpha \log p_T(b) - \log r(b) = \mathrm{LSE}(\alpha l / T) - \alpha\, \mathrm{LSE}(l / T) .

Everything is elementwise over any leading axes: particles, groups, with an alpha or temperature of their own.

Source: "Sequential Monte Carlo speculative decoding", arXiv 2604.15672.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gumbeljax import _checks
from gumbeljax._call import plain_broadcasting
from gumbeljax._keys import as_threefry, typed_key
from gumbeljax._typing import Array, ArrayLike, Key
from gumbeljax.smc.core import gather


class Cut(NamedTuple):
    """Which of a cycle's tokens a sequence keeps: `kept` bool `[*batch, k]`, and whether it is over, `is_done [*batch]`."""

    kept: Array
    is_done: Array


@plain_broadcasting()
def cut_tokens(tokens: ArrayLike, is_done: ArrayLike, remaining: ArrayLike, *, eos: ArrayLike | None = None) -> Cut:
    """The tokens of a cycle that count: up to the first end of sequence, itself included, and up to the length cap.

    A sequence that was done before keeps nothing, so it stays as it is and weighs what it weighed. Weigh exactly the kept
    tokens, and return no others.

    Args:
      tokens: integers `[*batch, k]`.
      is_done: bool `[*batch]`.
      remaining: integers `[*batch]` or one: how many tokens the cap leaves.
      eos: the token that ends a sequence, or several `[n]`, or None.

    >>> cut = cut_tokens(jnp.array([[5, 2, 7], [5, 6, 7], [5, 6, 7]]), jnp.array([False, False, True]), 2, eos=2)
    >>> cut.kept.tolist(), cut.is_done.tolist()
    ([[True, True, False], [True, True, False], [False, False, False]], [True, True, True])
    """
    tokens, is_done = _checks.as_array(tokens, "tokens"), _checks.as_array(is_done, "is_done")
    if is_done.dtype != jnp.bool_:
        raise TypeError(f"is_done must be boolean, True for sequences that are over; got {is_done.dtype}: write is_done != 0.")
    if tokens.ndim == 0 or tokens.shape[:-1] != is_done.shape:
        raise ValueError(f"tokens must be [*batch, k] for is_done [*batch]; got {list(tokens.shape)} and "
                         f"{list(is_done.shape)}: give every sequence its tokens.")
    remaining = _checks.listed(remaining, "remaining")
    if not _checks.is_integral(remaining) or remaining.shape not in ((), is_done.shape):
        raise ValueError(f"remaining must be integers, one or {list(is_done.shape)}; got {remaining.dtype}"
                         f"{list(remaining.shape)}: give every sequence its cap.")
    remaining = jnp.broadcast_to(_checks.as_ids(remaining), is_done.shape)
    is_end = jnp.zeros(tokens.shape, bool)
    if eos is not None:
        ends = _checks.listed(eos, "eos")
        if not _checks.is_integral(ends):
            raise TypeError(f"eos must be integers; got {ends.dtype}: pass token ids.")
        is_end = jnp.isin(tokens, _checks.as_ids(ends))
    ended_before = jnp.cumsum(is_end, axis=-1) - is_end > 0
    in_time = jnp.arange(tokens.shape[-1]) < remaining[..., None]
    kept = ~is_done[..., None] & ~ended_before & in_time
    over = is_done | jnp.any(kept & is_end, axis=-1) | (remaining <= tokens.shape[-1])
    return Cut(kept, over)


def _alpha(alpha: ArrayLike, shape: tuple[int, ...]) -> Array:
    """Checked float32 alpha of that shape, or one: known ones are positive and finite, others make a NaN."""
    out = _checks.as_array(alpha, "alpha").astype(jnp.float32)
    if out.shape not in ((), shape):
        raise ValueError(f"alpha must be one number or {list(shape)}, one for each sequence; got {list(out.shape)}: repeat it "
                         "for its particles.")
    if not any(map(_checks.is_traced, jax.tree.leaves(alpha))):
        given = np.asarray(alpha, np.float32).reshape(-1)
        if np.any(bad := ~((given > 0) & (given < np.inf))):
            raise ValueError(f"alpha must be positive and finite; got {given[bad][0]:g}: pass 1 for the target itself.")
        return out
    return jnp.where((out > 0) & (out < jnp.inf), out, jnp.nan)


@plain_broadcasting()
def log_weight(target_log_probs: ArrayLike, proposal_log_probs: ArrayLike, *, alpha: ArrayLike = 1.0,
               kept: ArrayLike | None = None) -> Array:
    r"""Log-weight of a cycle, :math:`\sum_t \alpha \log p_T(x_t) - \log q(x_t)` over the tokens kept.

    Exact up to rounding, and exactly 0 at alpha = 1 where both laws give the same log-probabilities. For the bonus pass its
    log-probability under `softmax(alpha l / T)`, which is what `sample_with_log_probs` returns for a draw at
    `bonus_temperature`, as that of the proposal.

    Args:
      target_log_probs: f32 `[*batch, k]`, of the tokens under the target at its temperature.
      proposal_log_probs: f32 `[*batch, k]`, under the law that each token was drawn from.
      alpha: number or `[*batch]`, positive; a traced one that is not gives NaN.
      kept: bool `[*batch, k]`, of `cut_tokens`, or `[k]`, those of all; what is not kept is not read.

    Returns:
      f32 `[*batch]`; -inf when the target forbids a kept token.

    >>> p, q = jnp.log(jnp.array([0.5, 0.2])), jnp.log(jnp.array([0.25, 0.1]))
    >>> log_weight(p, q).round(4), log_weight(p, q, kept=jnp.array([True, False])).round(4), log_weight(p, p)
    (Array(1.3863, dtype=float32), Array(0.6931, dtype=float32), Array(0., dtype=float32))
    """
    p, q = _checks.as_array(target_log_probs, "target_log_probs"), _checks.as_array(proposal_log_probs, "proposal_log_probs")
    if p.shape != q.shape or p.ndim == 0:
        raise ValueError(f"proposal_log_probs must have the shape of target_log_probs {list(p.shape)}, [*batch, k]; got "
                         f"{list(q.shape)}: score the same tokens under both.")
    alpha = _alpha(alpha, p.shape[:-1])[..., None]
    each = jnp.where(p == -jnp.inf, -jnp.inf, alpha * p.astype(jnp.float32) - q.astype(jnp.float32))
    if kept is not None:
        kept = _checks.as_array(kept, "kept")
        if kept.dtype != jnp.bool_ or kept.shape not in (p.shape, p.shape[-1:]):
            raise ValueError(f"kept must be boolean {list(p.shape)}, as target_log_probs, or {list(p.shape[-1:])}; got "
                             f"{kept.dtype}{list(kept.shape)}: pass Cut.kept of cut_tokens.")
        each = jnp.where(kept, each, 0.0)
    return jnp.sum(each, axis=-1)


def bonus_temperature(temperature: ArrayLike, alpha: ArrayLike = 1.0) -> Array:
    """The temperature at which `gumbeljax.sample` draws from `softmax(alpha l / T)`: T / alpha, float32.

    >>> float(bonus_temperature(1.0, 2.0))
    0.5
    """
    return jnp.asarray(temperature, jnp.float32) / jnp.asarray(alpha, jnp.float32)


@plain_broadcasting()
def first_token_keys(key: Key, num_particles: int, *, alpha: ArrayLike = 1.0) -> Array:
    """Keys of the first token of every particle: one for all where alpha is 1, else one for each.

    At alpha = 1 the first token may be shared: it is a token of the target. For any other alpha the law of the first token
    depends on all that follows, and only particles that differ in it can be weighed into place: with a shared one its
    error does not vanish as particles are added.

    Args:
      key: request keys `[*groups]`.
      num_particles: n, a Python int.
      alpha: number or `[*groups]`.

    Returns:
      typed keys `[*groups, n]`.

    >>> keys = first_token_keys(jax.random.split(jax.random.key(0), 2), 3, alpha=jnp.array([1.0, 2.0]))
    >>> (keys == keys[:, :1]).all(axis=1).tolist()
    [True, False]
    """
    key, num_particles = as_threefry(typed_key(key)), _checks.count(num_particles, "num_particles")
    own = jax.vmap(lambda k: jax.vmap(lambda i: jax.random.fold_in(k, i))(jnp.arange(num_particles)))(key.reshape(-1))
    own = own.reshape(*key.shape, num_particles)
    shared = jnp.broadcast_to(_alpha(alpha, key.shape) == 1, key.shape)
    return gather(own, jnp.where(shared[..., None], 0, jnp.arange(num_particles)))
