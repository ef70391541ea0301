"""Attention over a cache: what each query sees, and which code computes it."""

import functools

import jax
import jax.numpy as jnp

from gumbeljax import _checks, _compat, _implementation
from gumbeljax._call import plain_broadcasting
from gumbeljax.kv_cache.slots import Slots
from pallas_kernels import triton_attention


def visible(slots: Slots, at: jax.Array, window: int | None = None) -> jax.Array:
    """Which of the slots ``at [num_slots]`` or ``[batch, 1, num_slots]`` each query sees: those up to its position, or the last
    ``window``; ``bool[batch, seq, num_slots]``."""
    positions = slots.positions[..., None]
    mask = at <= positions
    if slots.lengths is not None:
        mask &= at < slots.lengths[:, None, None]
    return mask if window is None else mask & (at > positions - window)


def _gathered(keys: jax.Array, values: jax.Array, slots: Slots, window: int | None):
    """Keys and values of the rows side by side, ``[batch, num_slots, ...]``, and which of them each query sees."""
    if slots.block_tables is None:
        return keys, values, visible(slots, jnp.arange(keys.shape[1]), window)
    tables, page_size = slots.block_tables, keys.shape[1]
    (batch, max_blocks), blocks = tables.shape, jnp.arange(tables.shape[1])[None]
    if window is not None and slots.positions.shape[1] == 1 and (num_blocks := -(-(window - 1) // page_size) + 1) < max_blocks:
        # One query per row: only the pages that hold its window.
        first = jnp.clip((slots.positions - (window - 1)) // page_size, 0, max_blocks - num_blocks)
        blocks = first + jnp.arange(num_blocks)
        tables = jnp.take_along_axis(tables, blocks, axis=1)
    # Gathered, not indexed in place: XLA has no paged product. -1 reads some page that the mask hides.
    tables = jnp.maximum(tables, 0)
    keys, values = (x[tables].reshape(batch, -1, *x.shape[2:]) for x in (keys, values))
    at = (blocks[..., None] * page_size + jnp.arange(page_size)).reshape(blocks.shape[0], 1, -1)
    mask = visible(slots, at, window)
    # Another row may have left NaN there, and 0 * NaN is NaN. (Masked keys are harmless: their logits are replaced.)
    return keys, jnp.where(jnp.any(mask, axis=1)[..., None, None], values, 0), mask


def _by_xla(q, keys, values, slots: Slots, window: int | None) -> jax.Array:
    keys, values, mask = _gathered(keys, values, slots, window)
    return jax.nn.dot_product_attention(q, keys.astype(q.dtype), values.astype(q.dtype), mask=mask[:, None])


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _by_triton(q, keys, values, slots: Slots, window: int | None) -> jax.Array:
    _compat.quiet_triton_deprecation()
    tables, lengths = slots.block_tables, slots.lengths
    if tables is None or lengths is None:
        batch, max_length = keys.shape[:2]
        tables, lengths = jnp.arange(batch, dtype=jnp.int32)[:, None], jnp.full(batch, max_length, jnp.int32)
    plt = _compat.pallas_triton()
    return triton_attention.attend(q, keys, values, slots.positions, tables, lengths, plt=plt, window=window)


def _forward(q, keys, values, slots, window):
    return _by_triton(q, keys, values, slots, window), (q, keys, values, slots)


def _backward(window, saved, cotangent):
    q, keys, values, slots = saved
    _, pullback = jax.vjp(lambda q, keys, values: _by_xla(q, keys, values, slots, window), q, keys, values)
    return *pullback(cotangent), None


_by_triton.defvjp(_forward, _backward)


def why_not(q: jax.Array, keys: jax.Array) -> str | None:
    """Why the Triton kernel cannot run a call, or None if it can."""
    device = _implementation.device_facts(q)
    if device.platform != "gpu" or device.compute_capability < (8, 0) or _compat.pallas_triton() is None:
        return f"it needs an NVIDIA GPU of compute capability 8.0 and Pallas Triton; this call runs on {device.platform}"
    if any(jax.typeof(x).sharding.mesh.explicit_axes for x in (q, keys)):
        return "a sharded cache is read by XLA"
    return triton_attention.why_not(q, keys)


@plain_broadcasting()
def attend(
    q: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    slots: Slots,
    *,
    window: int | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Causal attention of ``q [batch, seq, num_heads, head_dim]`` over the cache.

    Args:
      q: queries; ``num_heads`` is a multiple of ``num_kv_heads``.
      keys, values: one layer's, ``[num_pages, page_size, num_kv_heads, head_dim]``, the pass's own already written.
      slots: from ``locate``.
      window: see only the last ``window`` positions, the query's own included; None: all.
      implementation: "triton": a kernel for NVIDIA GPUs that reads pages in place, for up to 64 queries per row and
        key-value head (a decode step, a verification); "xla": gathers the pages, runs everywhere; None: the kernel where it
        can run. Under auto axes of a mesh, where XLA cannot cut a kernel, say "xla".

    Returns:
      ``[batch, seq, num_heads, head_dim]``; 0 for a query that sees nothing in a paged cache. A slot that no query of the row
      sees has no influence, whatever it holds (NaN too, in a paged cache). The two implementations differ in the last bits.

    Raises:
      NotImplementedError: a named implementation that cannot run the call.
    """
    _checks.choice(implementation, "implementation", (None, "xla", "triton"))
    reason = why_not(q, keys) if implementation != "xla" else None
    if implementation == "triton" and reason:
        raise NotImplementedError(f"implementation='triton' cannot run this call: {reason}; leave implementation out.")
    run = _by_xla if implementation == "xla" or reason else _by_triton
    return run(q, keys, values, slots, window)
