"""What happens to queries, keys and values between their projections and attention."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from gumbeljax import _compat
from gumbeljax._implementation import device_facts
from gumbeljax.kv_cache import Slots, write
from pallas_kernels import triton_rotate


class Rope(NamedTuple):
    """Cosines and sines of the rotary angles, f32 ``[batch, seq, head_dim / 2]``."""

    cos: jax.Array
    sin: jax.Array


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """``x / sqrt(mean(x^2) + eps) * scale`` in float32. XLA makes one GPU kernel of it, and two of Flax's."""
    x32 = x.astype(jnp.float32)
    scaled = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (scaled * scale.astype(jnp.float32)).astype(x.dtype)


def rotate(x: jax.Array, rope: Rope) -> jax.Array:
    """Rotary embedding of ``x [batch, seq, heads, head_dim]``: dimension ``i`` pairs with ``i + head_dim / 2``."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = rope.cos[:, :, None], rope.sin[:, :, None]
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)


def _by_xla(eps, q, k, v, rope: Rope, scales, keys, values, slots: Slots):
    if scales is not None:
        q, k = rms_norm(q, scales[0], eps), rms_norm(k, scales[1], eps)
    return rotate(q, rope), write(keys, rotate(k, rope), slots), write(values, v, slots)


def _split(qkv, keys):
    """Queries, keys and values that lie side by side."""
    num_kv_heads = keys.shape[2]
    return jnp.split(qkv, (qkv.shape[2] - 2 * num_kv_heads, qkv.shape[2] - num_kv_heads), axis=2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _by_triton(eps, qkv, rope: Rope, scales, keys, values, slots: Slots):
    _compat.quiet_triton_deprecation()
    flat = lambda x: x.reshape(-1, *x.shape[2:])  # noqa: E731
    q, keys, values = triton_rotate.rotate_and_write(
        flat(qkv), flat(rope.cos), flat(rope.sin), scales, keys, values, flat(slots.pages), flat(slots.offsets), eps=eps,
        plt=_compat.pallas_triton())  # fmt: skip
    return q.reshape(*qkv.shape[:2], *q.shape[1:]), keys, values


def _forward(eps, qkv, rope, scales, keys, values, slots):
    return _by_triton(eps, qkv, rope, scales, keys, values, slots), (qkv, rope, scales, keys, values, slots)


def _backward(eps, arguments, cotangents):
    *floats, slots = arguments

    def plain(qkv, rope, scales, keys, values):
        q, k, v = _split(qkv, keys)
        return _by_xla(eps, q, k, v, rope, scales, keys, values, slots)

    return *jax.vjp(plain, *floats)[1](cotangents), None


_by_triton.defvjp(_forward, _backward)


def can_run_kernels(implementation: str | None, *arrays: jax.Array) -> bool:
    """Whether Triton kernels of our own may run here: on an NVIDIA GPU, unless XLA was asked for or has to cut the arrays."""
    device = device_facts(arrays[0])
    return (implementation != "xla" and device.platform == "gpu" and device.compute_capability >= (8, 0)
            and _compat.pallas_triton() is not None
            and not any(jax.typeof(x).sharding.mesh.explicit_axes for x in arrays))  # fmt: skip


def rotate_and_write(
    q, k, v, rope: Rope, scales, keys, values, slots: Slots, *, eps: float, implementation: str | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Norms of q and k with the ``scales`` (None: no norms), rotary embedding, and keys and values written at ``slots``.

    ``q [batch, seq, num_heads, head_dim]``; one kernel on NVIDIA GPUs, unless ``implementation`` is "xla".

    Returns:
      (rotated q, keys, values).
    """
    if can_run_kernels(implementation, q, keys) and triton_rotate.why_not(q.shape[-1]) is None:
        # Joined: XLA merges the three projections, and this undoes its cut.
        return _by_triton(eps, jnp.concatenate([q, k, v], axis=2), rope, scales, keys, values, slots)
    return _by_xla(eps, q, k, v, rope, scales, keys, values, slots)
