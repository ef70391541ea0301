r"""How often drafts are accepted, exact from two laws: what to expect of a draft before it is tried.

Per position, for log-probabilities (or unnormalised logits, temperature applied) of target and draft.
"""

import jax
import jax.numpy as jnp

from gumbeljax import _checks
from gumbeljax._call import plain_broadcasting
from gumbeljax._typing import Array, ArrayLike
from pallas_kernels.noise import GROUP


def _laws(target_logits, draft_logits) -> tuple[Array, Array]:
    laws = []
    for x, name in ((target_logits, "target_logits"), (draft_logits, "draft_logits")):
        laws.append(_checks.float_array(x, name).astype(jnp.float32))
    if laws[0].ndim == 0 or laws[0].shape[-1] == 0:
        raise ValueError(f"target_logits must be [*batch, vocab] with at least one token; got shape {list(laws[0].shape)}: "
                         "put the vocabulary on the last axis.")
    if laws[0].shape != laws[1].shape:
        raise ValueError(f"draft_logits must have the shape of target_logits, {list(laws[0].shape)}; got "
                         f"{list(laws[1].shape)}: give both [*batch, vocab].")
    return jax.nn.log_softmax(laws[0]), jax.nn.log_softmax(laws[1])


@plain_broadcasting()
def acceptance(target_logits: ArrayLike, draft_logits: ArrayLike) -> Array:
    r"""Probability that `verify` accepts one token, :math:`\sum_v \min(p, q)(v) = 1 - TV(p, q)`. Exact up to rounding.

    Args:
      target_logits, draft_logits: `[*batch, vocab]`, any shift, temperature applied.

    Returns:
      float32 `[*batch]`; NaN for a row without a law.

    >>> round(float(acceptance(jnp.log(jnp.array([0.6, 0.3, 0.1])), jnp.log(jnp.array([0.2, 0.3, 0.5])))), 4)
    0.6
    """
    log_p, log_q = _laws(target_logits, draft_logits)
    return jnp.sum(jnp.exp(jnp.minimum(log_p, log_q)), axis=-1)


@plain_broadcasting()
def chains_acceptance(target_logits: ArrayLike, draft_logits: ArrayLike, num_chains: int) -> Array:
    r"""Probability that `verify_chains` accepts a first token, :math:`1 - R_N`. Exact up to rounding; `acceptance` at N = 1.

    With :math:`C_0 = 0`, :math:`C_{m+1} = C_m + R_m` and :math:`R_m = \sum_v \max(p - C_m q, 0)(v)`.

    Args:
      target_logits, draft_logits: `[*batch, vocab]`, as in `acceptance`.
      num_chains: N, a Python int.

    Returns:
      float32 `[*batch]`.

    >>> p, q = jnp.log(jnp.array([0.6, 0.3, 0.1])), jnp.log(jnp.array([0.2, 0.3, 0.5]))
    >>> [round(float(chains_acceptance(p, q, n)), 2) for n in (1, 2, 4)]
    [0.6, 0.68, 0.8]
    """
    log_p, log_q = _laws(target_logits, draft_logits)
    p, q = jnp.exp(log_p), jnp.exp(log_q)
    factor, left = jnp.zeros(p.shape[:-1], jnp.float32), jnp.ones(p.shape[:-1], jnp.float32)
    for _ in range(_checks.count(num_chains, "num_chains")):
        factor = factor + left
        left = jnp.sum(jnp.maximum(p - factor[..., None] * q, 0), axis=-1)
    return 1 - left


def _agreement(a: Array, b: Array) -> Array:
    r"""P(both argmax of `a + G` and of `b + G` are i), `[n]`, for logits a, b `[n]` and the same Gumbel noise G.

    In exponential clocks: i rings first on both at once iff :math:`E_j \ge E_i \max(a_j / a_i, b_j / b_i)` for all j, which
    has probability :math:`1 / \sum_j \max(a_j / a_i, b_j / b_i)`.
    """
    def of_one(i):
        gap = jnp.maximum(a - a[i], b - b[i])
        possible = (a[i] > -jnp.inf) & (b[i] > -jnp.inf)
        return jnp.where(possible, jnp.exp(-jax.nn.logsumexp(jnp.where(possible, gap, 0.0))), 0.0)

    return jax.lax.map(of_one, jnp.arange(a.shape[0]), batch_size=64)


@plain_broadcasting()
def coupled_acceptance(target_logits: ArrayLike, draft_logits: ArrayLike) -> Array:
    r"""Probability that `verify_coupled` accepts a token that the draft drew with the same key. Exact up to rounding.

    Both laws choose a group of 16 tokens with the same noise, then a token with the same noise. With masses A, B of the
    groups of p and q, the sum over the two levels is

    .. math:: \sum_g \frac{1}{\sum_h \max(A_h / A_g, B_h / B_g)}
              \sum_{v \in g} \frac{1}{\sum_{u \in g} \max(p_u / p_v, q_u / q_v)} .

    With one level (noise per token) the same formula is at least (1 - TV) / (1 + TV). Two levels can be above or below it:
    when p and q choose different groups, they cannot meet again. O(vocab^2 / 256 + 16 vocab) time.

    Args:
      target_logits, draft_logits: `[*batch, vocab]`, as in `acceptance`.

    Returns:
      float32 `[*batch]`; NaN for a row without a law.

    >>> p, q = jnp.log(jnp.array([0.6, 0.3, 0.1])), jnp.log(jnp.array([0.2, 0.3, 0.5]))
    >>> round(float(coupled_acceptance(p, q)), 4)
    0.5143

    Source: M. Daliri, C. Musco, A. T. Suresh, arXiv 2408.07978, for one level.
    """
    log_p, log_q = _laws(target_logits, draft_logits)
    shape, vocab = log_p.shape[:-1], log_p.shape[-1]

    def of_row(row):
        a, b = (jnp.pad(x, (0, -vocab % GROUP), constant_values=-jnp.inf).reshape(-1, GROUP) for x in row)
        groups = _agreement(jax.nn.logsumexp(a, axis=-1), jax.nn.logsumexp(b, axis=-1))
        inside = jax.vmap(_agreement)(a, b)
        has_law = ~jnp.any(jnp.isnan(row[0]) | jnp.isnan(row[1]))
        return jnp.where(has_law, jnp.sum(groups * jnp.sum(inside, axis=-1)), jnp.nan)

    return jax.lax.map(of_row, (log_p.reshape(-1, vocab), log_q.reshape(-1, vocab))).reshape(shape)
