"""The simple cache: one contiguous block of slots per row.

It needs no length: a query at position ``p`` sees the slots ``0..p`` and nothing else. What a padded prompt left in later
slots is overwritten when the real token of that position arrives, before any query may look at it.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from gumbeljax import _checks


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
    sizes = dict(num_layers=num_layers, batch=batch, max_length=max_length, num_kv_heads=num_kv_heads, head_dim=head_dim)
    for name, size in sizes.items():
        _checks.count(size, name, "raise it")
    return ContiguousCache(*zeros((batch, max_length, num_kv_heads, head_dim), num_layers, dtype))


def zeros(shape: tuple[int, ...], num_layers: int, dtype) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """Keys and values of every layer, in separate buffers, not one shared zero: a step donates them all."""
    keys, values = (tuple(jnp.zeros(shape, dtype) for _ in range(num_layers)) for _ in range(2))
    return keys, values
