"""Output tables of 8 bits with a scale for each token: half the bytes of bfloat16, which are the time of a draw."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from gumbeljax import _checks
from gumbeljax._typing import ArrayLike

LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}
SMALLEST_ROW = 2.0**-100  # below it: a row of zeros, whose scale would not be a normal float32


class QuantizedHead(NamedTuple):
    """A table `w[v, d] = scale[v] * qvalue[v, d]`, taken in place of `w` by every function that has one, with `vocab_axis=0`.

    The law is exactly that of this table. For logits `l[v] = scale[v] * sum_d h[d] qvalue[v, d]` the products are exact (every
    int8 and float8_e4m3fn is a bfloat16 and a float16), the sum is float32 and takes the scale last. A pytree; nothing is
    differentiated with respect to it. Any object with the fields `qvalue` and `scale`, such as qwix's `QArray`, is taken too.

    Fields:
      qvalue: int8 or float8_e4m3fn `[vocab, d_model]`.
      scale: float `[vocab]` or `[vocab, 1]`, used as float32.
    """

    qvalue: ArrayLike
    scale: ArrayLike


@functools.partial(jax.jit, static_argnames="dtype")
def _quantized(w, *, dtype: str) -> QuantizedHead:
    w = w.astype(jnp.float32)
    largest = jnp.max(jnp.abs(w), axis=1)
    scale = jnp.where(largest < SMALLEST_ROW, 1.0, largest / LARGEST[dtype])
    scale = jnp.where(jnp.all(jnp.isfinite(w), axis=1), scale, jnp.nan)  # XLA's maximum may pass over a NaN
    q = jnp.clip(w / scale[:, None], -LARGEST[dtype], LARGEST[dtype])  # a float8 out of range would be NaN
    return QuantizedHead((jnp.round(q) if dtype == "int8" else q).astype(dtype), scale)


def quantize_head(w: ArrayLike, dtype=jnp.int8) -> QuantizedHead:
    """`w` in 8 bits, each row scaled so that its largest entry becomes 127 (int8) or 448 (float8_e4m3fn).

    Approximate: the new table is another model, whose law is then drawn from exactly. Rounding is to nearest, ties to even. A
    row of zeros (entries below 2^-100 count as such) has scale 1; one with a NaN or an infinity has scale NaN.

    Args:
      w: output table `[vocab, d_model]`; bfloat16, float16 or float32.
      dtype: int8 or float8_e4m3fn.

    Raises:
      ValueError, TypeError: an argument breaks its rule, or a concrete w is not finite.

    >>> import jax.numpy as jnp, gumbeljax
    >>> head = gumbeljax.quantize_head(jnp.array([[1.0, -0.5], [0.0, 254.0]]))
    >>> head.qvalue.tolist(), (127 * head.scale).tolist()
    ([[127, -64], [0, 127]], [1.0, 254.0])
    >>> int(gumbeljax.greedy(jnp.ones(2), head))
    1
    """
    w = _checks.float_array(w, "w")
    try:
        name = jnp.dtype(dtype).name
    except TypeError:
        name = repr(dtype)
    if name not in LARGEST:
        raise TypeError(f"dtype must be int8 or float8_e4m3fn; got {name}: pass jnp.int8 or jnp.float8_e4m3fn.")
    if w.ndim != 2 or 0 in w.shape:
        raise ValueError(f"w must be [vocab, d_model] with at least one token and one coordinate; got shape {list(w.shape)}: "
                         "pass the output table.")
    if _checks.is_concrete(w) and not jnp.isfinite(w).all():
        raise ValueError("w must be finite; got a NaN or an infinity: look for the row with jnp.isfinite(w).all(1).")
    return _quantized(w, dtype=name)
