r"""Gumbel-softmax: a draw that gradients pass through, for training with discrete choices."""

import jax
import jax.numpy as jnp
import numpy as np

from gumbeljax import _checks
from gumbeljax._call import plain_broadcasting
from gumbeljax._keys import row_keys
from gumbeljax._mesh import check_rows
from gumbeljax._typing import Array, ArrayLike, Key
from pallas_kernels import noise

_FLOOR = -1000.0  # exp of it is 0 in every dtype, and it is finite: so is what multiplies its gradient
_COLDEST, _HOTTEST = 2.0**-100, 2.0**100  # beyond: one-hot and uniform to the last bit, and subnormal numbers are near


@plain_broadcasting()
def gumbel_softmax(
    logits: ArrayLike, key: Key, *, temperature: ArrayLike = 1.0, hard: bool = False, axis: int = -1
) -> Array:
    r"""A relaxed one-hot draw: softmax((logits + Gumbel noise) / temperature), differentiable in both.

    With :math:`z_v = l_v + G_v`, the soft draw is :math:`y_v = e^{z_v / \tau} / \sum_u e^{z_u / \tau}`. Its largest
    entry is the token that Gumbel-max draws, so *which* entry is largest is exact in distribution, softmax(logits), at
    every :math:`\tau`; and it is the token of `gumbeljax.reference.gumbel_max` under the same key. As a one-hot vector
    the soft draw is approximate, and so is any gradient through it: :math:`E[f(y)] \ne E[f(\text{one-hot})]`. Its bias
    falls and its variance grows as :math:`\tau \to 0`. `examples/routing.py` plots both against the exact gradient.

    `hard=True` returns the one-hot draw itself, exactly, and passes the gradient of the soft draw back
    (straight-through): the value has no bias, the gradient has another one.

    Always finite and normalised: noise and softmax are float32 (float64 for float64 logits) whatever the dtype of the
    logits, the noise cannot be infinite, and the largest entry is taken out before dividing by the temperature. A
    forbidden (-inf) entry is exactly 0 and its gradient exactly 0. Where rounding to the output's dtype makes another
    entry equal to the drawn one, the drawn one is raised by one unit in the last place, so `argmax` of the soft draw is
    the hard draw under the same key.

    Args:
      logits: any shape, any float dtype; the choices lie along `axis`.
      key: one key (typed or raw), or an array of keys of the shape of `logits` without `axis`.
      temperature: :math:`\tau > 0`, a number or a traced scalar; a traced one that is not positive and finite gives
        NaN. Taken as 2^-100 below that, as 2^100 above. Gradients in it are finite above 1e-18.
      hard: one-hot values with straight-through gradients.
      axis: where the choices are.

    Returns:
      An array of the shape and dtype of `logits` that sums to 1 along `axis`; NaN along it where there is no law
      (nothing allowed, or a NaN or +inf logit).

    Raises:
      ValueError: a temperature that is not a scalar, or known not to be positive and finite; an axis that is not there;
        keys of another shape than the rest of the logits.
      TypeError: logits that are not floats, or something that is not a key.

    >>> import jax, jax.numpy as jnp
    >>> y = gumbel_softmax(jnp.array([0.0, -jnp.inf, 1.0]), jax.random.key(0), temperature=0.5)
    >>> float(y[1]), round(float(y.sum()), 5)
    (0.0, 1.0)
    >>> gumbel_softmax(jnp.array([-jnp.inf, 1.0]), jax.random.key(0), hard=True)
    Array([0., 1.], dtype=float32)

    Sources: E. Jang, S. Gu, B. Poole, "Categorical reparameterization with Gumbel-softmax", ICLR 2017; C. J. Maddison,
    A. Mnih, Y. W. Teh, "The concrete distribution", ICLR 2017.
    """
    logits, tau = _checks.as_array(logits, "logits"), _checked_temperature(temperature)
    if not isinstance(hard, bool):
        raise TypeError(f"hard must be True or False, fixed when the call is traced; got {type(hard).__name__}: make it a "
                        "constant.")
    if not jnp.issubdtype(logits.dtype, jnp.floating):
        raise TypeError(f"logits must be floating point; got {logits.dtype}: convert them with .astype(jnp.float32).")
    if isinstance(axis, bool) or not isinstance(axis, int | np.integer) or not -logits.ndim <= axis < logits.ndim:
        raise ValueError(f"axis must name an axis of logits; got axis {axis} for shape {list(logits.shape)}: "
                         f"use one in [{-logits.ndim}, {logits.ndim}).")  # fmt: skip
    if logits.shape[axis] == 0:
        raise ValueError(f"logits must have at least one choice along axis {axis}; got shape {list(logits.shape)}: pass some.")
    x = jnp.moveaxis(logits, axis, -1)
    wide = jnp.float64 if x.dtype == jnp.float64 else jnp.float32
    check_rows(x, key, None, (), way_out="one key per row, sharded like logits")
    z = x.astype(wide) + _token_noise(key, x.shape).astype(wide)

    tau = jnp.where((tau > 0) & (tau < jnp.inf), jnp.clip(tau, _COLDEST, _HOTTEST), jnp.nan).astype(wide)
    top = jnp.max(jax.lax.stop_gradient(z), axis=-1, keepdims=True)
    # The floor keeps -inf out of the division, whose gradient in tau would be 0 * inf.
    soft = jax.nn.softmax(jnp.maximum(z - top, _FLOOR * tau) / tau, axis=-1).astype(x.dtype)

    drawn = jnp.arange(x.shape[-1]) == jnp.argmax(jax.lax.stop_gradient(z), axis=-1, keepdims=True)
    soft = soft + _lift(jax.lax.stop_gradient(soft), drawn)
    if hard:
        # In this order: the parenthesis is exactly 0 and leaves exact ones and zeros.
        soft = drawn.astype(x.dtype) + (soft - jax.lax.stop_gradient(soft))
    return jnp.moveaxis(soft, -1, axis)


def _token_noise(key, shape):
    """Noise of `gumbeljax.reference.gumbel_max`: row keys, token-level stream, index = place along the last axis."""
    k0, k1 = row_keys(key, shape[:-1])
    ids = jnp.arange(shape[-1], dtype=jnp.uint32)
    stream = noise.stream(noise.DRAW, 0, noise.TOKEN_LEVEL)
    return noise.gumbel(k0[:, None], k1[:, None], stream, ids).reshape(shape)


def _lift(soft, drawn):
    """One unit in the last place at the drawn entry of a row where another entry rounds to the same value, else 0."""
    top = jnp.max(soft, axis=-1, keepdims=True)
    tied = jnp.sum(soft == top, axis=-1, keepdims=True) > 1
    return jnp.where(drawn & tied, jnp.nextafter(soft, jnp.ones_like(soft)) - soft, jnp.zeros_like(soft))


def _checked_temperature(temperature):
    t = _checks.as_array(temperature, "temperature")
    if t.shape:
        raise ValueError(f"temperature must be a scalar; got shape {list(t.shape)}: map over it with jax.vmap.")
    if not (jnp.issubdtype(t.dtype, jnp.floating) or jnp.issubdtype(t.dtype, jnp.integer)):
        raise TypeError(f"temperature must be a real number; got dtype {t.dtype}: cast it to float32.")
    if _checks.is_traced(t):
        return t.astype(jnp.float32)
    given = float(temperature)
    if not 0 < given < float("inf"):
        raise ValueError(f"temperature must be positive and finite; got {given}: "
                         "use gumbeljax.sample_logits for greedy choices.")  # fmt: skip
    return jnp.float32(min(max(given, _COLDEST), _HOTTEST))  # before float32 makes it 0 or infinite
