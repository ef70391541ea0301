"""Key-value cache of the decode loop: one contiguous block of slots per row.

Slot ``p`` of a row holds the key and the value of the token at absolute position ``p``, so a cache needs no length:
a query at position ``p`` sees the slots ``0..p`` and nothing else. What a padded prompt left in later slots is
overwritten when the real token of that position arrives, before any query may look at it.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class ContiguousCache(NamedTuple):
    """Keys and values of every layer; one array per layer, so that a step updates each in place."""

    keys: tuple[jax.Array, ...]  # num_layers x [batch, max_length, num_kv_heads, head_dim]
    values: tuple[jax.Array, ...]  # num_layers x [batch, max_length, num_kv_heads, head_dim]


def init_contiguous(
    num_layers: int, batch: int, max_length: int, num_kv_heads: int, head_dim: int, dtype=jnp.float32
) -> ContiguousCache:
    """An empty cache of ``max_length`` slots per row.

    Args:
      num_layers: layers of the model.
      batch: rows.
      max_length: slots per row: prompt plus new tokens.
      num_kv_heads: key-value heads per layer.
      head_dim: size of one head.
      dtype: dtype of keys and values.

    Returns:
      A ``ContiguousCache`` of zeros.

    >>> cache = init_contiguous(2, 3, 16, 1, 4)
    >>> len(cache.keys), cache.keys[0].shape
    (2, (3, 16, 1, 4))
    """
    shape = (batch, max_length, num_kv_heads, head_dim)
    # Separate buffers, not one shared zero: a step donates them all.
    return ContiguousCache(
        tuple(jnp.zeros(shape, dtype) for _ in range(num_layers)),
        tuple(jnp.zeros(shape, dtype) for _ in range(num_layers)),
    )


def write(slots: jax.Array, new: jax.Array, positions: jax.Array) -> jax.Array:
    """Store ``new [batch, seq, ...]`` at the slots ``positions [batch, seq]`` of ``slots [batch, max_length, ...]``.

    A position outside the cache writes nothing. A negative one would mean "from the end" to JAX, hence the redirect.
    """
    rows = jnp.arange(slots.shape[0])[:, None]
    positions = jnp.where(positions < 0, slots.shape[1], positions)
    return slots.at[rows, positions].set(new.astype(slots.dtype), mode="drop")


def causal_mask(positions: jax.Array, max_length: int) -> jax.Array:
    """Which slots each query may see: ``bool[batch, seq, max_length]``, slot <= position of the query."""
    return jnp.arange(max_length) <= positions[..., None]
