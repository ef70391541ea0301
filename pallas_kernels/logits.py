"""The elementwise half of logit processing: what happens to one logit before the race. Runs inside kernels.

Order: `scale -> soft_cap -> [model law] -> bias -> mask -> temperature`.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

TINY = 2.0**-100  # a temperature below it is greedy: (l - top) / T would leave the range of float32


class Elementwise(NamedTuple):
    """Options of the elementwise part. `bias` (float32) and `mask` (bool) are `[vocab]`, `[rows, vocab]` or None."""

    scale: float | None = None
    soft_cap: float | None = None
    bias: Any = None
    mask: Any = None


def model_logits(x, scale, soft_cap):
    """`soft_cap * tanh(scale * x / soft_cap)`: the model's own logits, float32."""
    if scale is not None:
        x = x * jnp.float32(scale)
    if soft_cap is not None:
        x = jnp.float32(soft_cap) * jnp.tanh(x * jnp.float32(1.0 / soft_cap))
    return x


def processed_logits(x, bias, mask, allowed=None):
    """Model logits plus bias, `-inf` where `mask` or `allowed` is false. A masked logit is not read: its NaN is gone."""
    if bias is not None:
        x = x + bias
    for keep in (mask, allowed):
        if keep is not None:
            x = jnp.where(keep, x, -jnp.inf)
    return x


def inverse_temperature(t):
    """`1 / t`, finite and positive for every valid t: 2^100 at 0, where differences of logits only need their order."""
    inverse = jnp.where(t == 0.0, jnp.float32(1.0 / TINY), 1.0 / jnp.where(t == 0.0, 1.0, t))
    return jnp.where(inverse < TINY, TINY, inverse)


def canonical_temperature(t):
    """Float32 temperature: exactly 0 below 2^-100, at most 2^100, NaN (no law) if negative, infinite or NaN."""
    t = jnp.asarray(t, jnp.float32)
    t = jnp.where((t > 1.0 / TINY) & (t < jnp.inf), 1.0 / TINY, t)  # uniform from there on; T * noise must stay finite
    t = jnp.where((t >= 0.0) & (t < TINY), 0.0, t)
    return jnp.where((t >= 0.0) & (t < jnp.inf), t, jnp.nan)


def rows_of(x, ids):
    """Options at token ids `[n, rows]`: x is `[vocab]` or `[rows, vocab]`; None stays None."""
    if x is None:
        return None
    return x[ids] if x.ndim == 1 else jnp.take_along_axis(x, ids.T, axis=1).T


def block_of(x, start, size):
    """Options of `[start, start + size)`, vocabulary first: `[size, 1]` or `[size, rows]`; None stays None."""
    if x is None:
        return None
    x = lax.dynamic_slice_in_dim(x, start, size, axis=-1)
    return x[:, None] if x.ndim == 1 else x.T
