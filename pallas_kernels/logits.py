"""The elementwise half of logit processing: what happens to one logit before the race. Runs inside kernels.

Order: `weight_scale -> scale -> soft_cap -> [model law] -> bias -> factor, offset (penalties) -> mask -> temperature`.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

TINY = 2.0**-100  # a temperature below it is greedy: (l - top) / T would leave the range of float32


DENSE = ("bias", "factor", "offset", "mask", "weight_scale")


class Elementwise(NamedTuple):
    """Options of the elementwise part. The `DENSE` ones are `[vocab]`, `[rows, vocab]` or None: float32, `mask` bool.

    `factor` is 1, or the repetition penalty of a token seen before; `offset` is what presence and frequency take away.
    `valid` is None or, in a shard of a padded vocabulary, how many of its ids exist (int32, may be traced). `weight_scale` is
    None or the scales of a quantised table, f32 `[vocab]`.
    """

    scale: float | None = None
    soft_cap: float | None = None
    bias: Any = None
    mask: Any = None
    factor: Any = None
    offset: Any = None
    valid: Any = None
    weight_scale: Any = None

    def dense(self) -> dict:
        """The options over the vocabulary that are there, by name."""
        return {name: x for name in DENSE if (x := getattr(self, name)) is not None}


def of_model(options: Elementwise) -> Elementwise:
    """The options that make the model's own law."""
    return options._replace(bias=None, mask=None, factor=None, offset=None)


def existing(ids, options: Elementwise):
    """Which ids are not padding, or None when all are real."""
    return None if options.valid is None else ids < options.valid


def model_logits(x, scale, soft_cap, weight_scale=None):
    """`soft_cap * tanh(scale * weight_scale * x / soft_cap)`: the model's own logits, float32. `weight_scale` broadcasts."""
    if weight_scale is not None:
        x = x * weight_scale
    if scale is not None:
        x = x * jnp.float32(scale)
    if soft_cap is not None:
        x = jnp.float32(soft_cap) * jnp.tanh(x * jnp.float32(1.0 / soft_cap))
    return x


def made_once(x):
    """A product that XLA is not to make again where it is used. What it fuses it makes twice: rounded, and with what is taken
    from it as a fused multiply-add. The largest logit would then miss the top of its row by a last bit, which T divides."""
    return lax.optimization_barrier(x)


def made_logits(x, scale, soft_cap, weight_scale=None):
    """`model_logits` in XLA code: one value for every use."""
    out = model_logits(x, scale, soft_cap, weight_scale)
    return x if out is x else made_once(out)


def processed_logits(x, options: Elementwise, allowed=None):
    """Model logits with the dense options, which have the shape of x here; `-inf` where `mask` or `allowed` is false. A
    masked logit is not read: its NaN is gone. A repeated token's logit is divided if positive, else multiplied."""
    if options.bias is not None:
        x = x + options.bias
    if options.factor is not None:
        x = jnp.where(x > 0.0, x / options.factor, x * options.factor)
    if options.offset is not None:
        x = x - options.offset
    for keep in (options.mask, allowed):
        if keep is not None:
            x = jnp.where(keep, x, -jnp.inf)
    return x


LOG2_E = 1.4426950408889634


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


def rows_of(options: Elementwise, ids) -> Elementwise:
    """The dense options at token ids `[n, rows]`."""
    pick = lambda x: x[ids] if x.ndim == 1 else jnp.take_along_axis(x, ids.T, axis=1).T  # noqa: E731
    return options._replace(**{name: pick(x) for name, x in options.dense().items()})


def block_of(options: Elementwise, start, size) -> Elementwise:
    """The dense options of `[start, start + size)`, vocabulary first: `[size, 1]` or `[size, rows]`."""
    def cut(x):
        x = lax.dynamic_slice_in_dim(x, start, size, axis=-1)
        return x[:, None] if x.ndim == 1 else x.T

    return options._replace(**{name: cut(x) for name, x in options.dense().items()})
