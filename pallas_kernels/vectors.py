"""What kernels read of every row beside its hidden state: its temperature and the words of its key."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from pallas_kernels.logits import LOG2_E, inverse_temperature


class Vectors(NamedTuple):
    """Of some rows: `packed` alone, or the others; uint32, but for the temperatures."""

    packed: Any = None  # [2 + keys, rows and padding]: of `pack`
    temperatures: Any = None  # f32 [2, rows], or [2, 1] where there is one for all: T, and log2(e) / T
    keys: Any = None  # [rows, 2], or None where none are read, as the next
    first: Any = None  # [1]: the first id of a shard


def temperatures_of(t):
    """`[2, rows]`: what the kernels want of temperatures."""
    return jnp.stack([t, inverse_temperature(t) * LOG2_E])


def pack(t, keys=(), spare=0):
    """Temperatures, `log2(e) / T` and the words of the keys as one uint32 `[2 + keys, rows]`, with room for a tile of any size,
    and at least `spare` columns of zeros.

    Both stages ask for it, and XLA makes it once: one small kernel, where every array of its own would be one more.
    """
    packed = jnp.stack([lax.bitcast_convert_type(x, jnp.uint32) for x in (*temperatures_of(t), *keys)])
    return jnp.pad(packed, ((0, 0), (0, spare + -(t.shape[0] + spare) % 256)))


def vectors_of(t, keys, *, one_temperature: bool, rows_read: int) -> Vectors:
    """`one_temperature`: t is one number for all rows. `rows_read`: by stage 1, whose tiles may be longer than all rows.

    Of whole tiles nothing is packed: keys that came as an array, and a temperature that is a constant, then take no kernel.
    """
    if t.shape[0] != rows_read:
        return Vectors(packed=pack(t, keys))
    temperatures = temperatures_of(t)[:, :1 if one_temperature else None]
    return Vectors(None, temperatures, jnp.stack(keys[:2], axis=1) if keys else None, keys[2][:1] if len(keys) > 2 else None)


def places(vectors: Vectors, rows, num_keys: int):
    """(array or ref, index) of T, log2(e) / T and the words of the key at `rows`, an index or a slice; what is one number for
    all rows has no slice in its index."""
    if vectors.packed is not None:
        return [(vectors.packed, (jnp.int32(i), rows)) for i in range(2 + num_keys)]
    zero, one = jnp.int32(0), jnp.int32(1)  # Triton's loads take no constants of Python
    t_row = rows if vectors.temperatures.shape[1] > 1 else zero
    words = [(vectors.keys, (rows, zero)), (vectors.keys, (rows, one)), (vectors.first, (zero,))]
    return [(vectors.temperatures, (i, t_row)) for i in (zero, one)] + words[:num_keys]
