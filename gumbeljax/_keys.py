"""From the key a user has to one row key per row."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from gumbeljax._checks import is_traced
from gumbeljax._typing import Array, Key
from pallas_kernels import noise


def typed_key(key: Key, name: str = "key") -> Array:
    """A typed key array of any shape; raw uint32 key data is wrapped with the default implementation."""
    if isinstance(key, (int, float)) or not hasattr(key, "dtype"):
        raise TypeError(f"{name} must be a JAX random key; got {type(key).__name__}: pass jax.random.key(seed).")
    if jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        return key
    if key.dtype != jnp.uint32 or key.ndim == 0:
        raise TypeError(f"{name} must be a typed key or raw uint32 key data; got {key.dtype}{list(key.shape)}: "
                        "pass jax.random.key(seed).")
    words = jax.eval_shape(lambda: jax.random.PRNGKey(0)).shape[-1]  # a new function: the default may have changed
    if key.shape[-1] != words:
        raise TypeError(f"{name} must have {words} words of raw key data on its last axis; got shape {list(key.shape)}: "
                        "pass jax.random.key(seed).")
    return jax.random.wrap_key_data(jnp.asarray(key))


def as_threefry(key: Array) -> Array:
    """The key itself if it is a threefry key; else a threefry key hashed from its words.

    Not drawn with `jax.random.bits`: under `vmap` the other generators give numbers that depend on the whole batch.
    """
    if str(jax.random.key_impl(key)) == "threefry2x32":
        return key
    words = jax.random.key_data(key)
    words = jnp.pad(words, [(0, 0)] * (words.ndim - 1) + [(0, words.shape[-1] % 2)])
    hashed = jnp.zeros_like(words[..., 0]), jnp.zeros_like(words[..., 0])
    for i in range(0, words.shape[-1], 2):
        hashed = noise.threefry2x32(*hashed, words[..., i], words[..., i + 1])
    return jax.random.wrap_key_data(jnp.stack(hashed, axis=-1), impl="threefry2x32")


def wrong_shape(key: Array, batch_shape: tuple[int, ...]) -> ValueError:
    """The error for keys that fit neither the batch nor a single draw."""
    fix = f"use jax.random.split(key, {batch_shape})" if batch_shape else "pass a scalar key for an h of rank 1"
    return ValueError(f"key must be one key or an array of keys of the batch's shape {list(batch_shape)}; "
                      f"got shape {list(key.shape)}: {fix}.")


def first_row(row_offset) -> Array:
    """The checked index of the first row, uint32."""
    if not hasattr(row_offset, "dtype"):
        row_offset = np.asarray(row_offset)
    if row_offset.shape != () or not jnp.issubdtype(row_offset.dtype, jnp.integer):
        raise TypeError(f"row_offset must be one integer, the index of the first row in the whole batch; got "
                        f"{row_offset.dtype}{list(row_offset.shape)}: pass one number.")
    if not is_traced(row_offset) and not 0 <= int(row_offset) < 2**32:  # jax would wrap it around
        raise ValueError(f"row_offset must be from 0 to 2^32 - 1; got {int(row_offset)}: pass the number of rows before the "
                         "first.")
    return jnp.asarray(row_offset).astype(jnp.uint32)


def row_keys(key: Key, batch_shape: tuple[int, ...], row_offset=None) -> tuple[Array, Array]:
    """The two key words of every row, uint32 `[rows]` each.

    An array of keys with the shape of the batch is used as it is. One key for a batch gives row i (row-major) the key
    `jax.random.fold_in(key, row_offset + i)`, so a row's key does not depend on the size of the batch.
    """
    key = as_threefry(typed_key(key))
    num_rows = math.prod(batch_shape)
    if key.shape == batch_shape:
        if row_offset is not None:
            raise ValueError(f"row_offset must be None when key has the batch's shape {list(batch_shape)}; got both: leave it "
                             "out, since every row has a key of its own.")
        key = key.reshape(num_rows)
    elif key.shape == ():
        index = jnp.arange(num_rows, dtype=jnp.uint32)
        if row_offset is not None:
            index += first_row(row_offset)
        key = jax.vmap(jax.random.fold_in, (None, 0))(key, index)
    else:
        raise wrong_shape(key, batch_shape)
    data = jax.random.key_data(key)
    return data[:, 0], data[:, 1]
