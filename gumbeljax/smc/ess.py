r"""What log-weights say about a set of particles: effective sample size, normalised weights, mean weight."""

import jax
import jax.numpy as jnp

from gumbeljax import _checks
from gumbeljax._call import plain_broadcasting
from gumbeljax._typing import Array, ArrayLike


def log_weights_and_mask(log_weights: ArrayLike, mask: ArrayLike | None) -> Array:
    """Checked log-weights `[..., n]`, float32 (float64 stays), -inf where the mask says that no particle lives."""
    x = _checks.as_array(log_weights, "log_weights")
    x = x if x.dtype == jnp.float64 else _checks.float_array(x, "log_weights").astype(jnp.float32)
    if x.ndim == 0 or x.shape[-1] == 0:
        raise ValueError(f"log_weights must be [..., n] with at least one particle; got shape {list(x.shape)}: "
                         "put the particles on the last axis.")
    if mask is None:
        return x
    mask = _checks.as_array(mask, "mask")
    if mask.dtype != jnp.bool_:
        raise TypeError(f"mask must be boolean, True for live particles; got dtype {mask.dtype}: write mask != 0.")
    if mask.shape not in (x.shape, x.shape[-1:]):
        raise ValueError(f"mask must have the shape of log_weights {list(x.shape)}, or {list(x.shape[-1:])}; got "
                         f"{list(mask.shape)}: give every particle one entry.")
    return jnp.where(mask, x, -jnp.inf)


def scaled_weights(log_weights: Array) -> tuple[Array, Array, Array]:
    """Weights `exp(l - max l)`, float32, their log scale `max l`, and whether there is a law: `[..., n]`, `[..., 1]` twice.

    Where there is none (all -inf, or any NaN or +inf) the weights are 0 and the scale is 0.
    """
    top = jax.lax.stop_gradient(jnp.max(log_weights, axis=-1, keepdims=True))  # NaN if any entry is
    has_law = jnp.isfinite(top)
    top = jnp.where(has_law, top, 0)
    gap = jnp.where(has_law, log_weights - top, -jnp.inf)
    return jnp.exp(gap.astype(jnp.float32)), top, has_law


def _total(x: Array) -> Array:
    """Sum over the last axis in blocks of about sqrt(n): the rounding of a plain float32 sum grows with n."""
    n = x.shape[-1]
    if n <= 256:
        return jnp.sum(x, axis=-1)
    block = 1 << (n.bit_length() // 2)
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -n % block)])
    return jnp.sum(jnp.sum(x.reshape(*x.shape[:-1], -1, block), axis=-1), axis=-1)


@plain_broadcasting()
def log_ess(log_weights: ArrayLike, *, mask: ArrayLike | None = None) -> Array:
    r"""Logarithm of the effective sample size, `2 logsumexp(l) - logsumexp(2 l)`.

    Unlike the ESS it is safe to multiply by a temperature and to differentiate when one particle has all the weight.
    Arguments, result and errors as in `ess`.

    >>> import jax.numpy as jnp
    >>> round(float(log_ess(jnp.array([-1000.0, -1001.0]))), 4)
    0.4996
    """
    weights, _, has_law = scaled_weights(log_weights_and_mask(log_weights, mask))
    weights = jnp.where(has_law, weights, jnp.nan)
    return 2 * jnp.log(_total(weights)) - jnp.log(_total(weights * weights))


@plain_broadcasting()
def ess(log_weights: ArrayLike, *, mask: ArrayLike | None = None) -> Array:
    r"""Effective sample size of a weighted set of particles, :math:`(\sum_i w_i)^2 / \sum_i w_i^2`.

    With :math:`w_i = e^{l_i}`: 1 when one particle has all the weight, n when all n weigh the same. Equal log-weights
    give n exactly (up to 2^24), so that a threshold at n does not flicker. A common shift of the log-weights changes
    nothing, however large; a particle at -inf drops out.

    Args:
      log_weights: `[..., n]`, unnormalised; bfloat16, float16, float32 or float64.
      mask: boolean, `[n]` or `[..., n]`, True for particles that live; the others count as -inf, whatever they hold.

    Returns:
      float32 `[...]`, between 1 and n; NaN where there is no law (all -inf or dead, or a NaN or +inf).

    Raises:
      TypeError: log-weights that are not floats; a mask that is not boolean.
      ValueError: no particles; a mask of another shape.

    >>> import jax.numpy as jnp
    >>> round(float(ess(jnp.array([-1000.0, -1001.0, -jnp.inf]))), 3)
    1.648
    >>> ess(jnp.zeros((2, 8)), mask=jnp.arange(8) < 5)
    Array([5., 5.], dtype=float32)

    Source: A. Kong, J. S. Liu, W. H. Wong, "Sequential imputations and Bayesian missing data problems", JASA 1994.
    """
    weights, _, has_law = scaled_weights(log_weights_and_mask(log_weights, mask))
    total, squares = _total(weights), _total(weights * weights)
    return jnp.where(has_law[..., 0], total * (total / jnp.where(squares > 0, squares, 1)), jnp.nan)


@plain_broadcasting()
def normalize(log_weights: ArrayLike, *, mask: ArrayLike | None = None) -> Array:
    r"""Normalised weights, :math:`w_i = e^{l_i} / \sum_j e^{l_j}`: float32 `[..., n]` that sum to 1.

    NaN where there is no law; arguments and errors as in `ess`.

    >>> import jax.numpy as jnp
    >>> [round(float(w), 4) for w in normalize(jnp.array([-1000.0, -1001.0, -jnp.inf]))]
    [0.7311, 0.2689, 0.0]
    """
    weights, _, has_law = scaled_weights(log_weights_and_mask(log_weights, mask))
    total = _total(weights)[..., None]
    return jnp.where(has_law, weights / jnp.where(has_law, total, 1), jnp.nan)


@plain_broadcasting()
def log_mean_weight(log_weights: ArrayLike, *, mask: ArrayLike | None = None) -> Array:
    r"""Log of the mean weight, :math:`\log \frac1n \sum_i e^{l_i}`: what a resampling step adds to log Z.

    The mean is over live particles: dead ones (`mask` False) are not counted, particles at -inf are, with weight 0. So
    all -inf gives -inf. NaN where a weight is NaN or +inf, or where no particle lives. float32 `[...]`; a common shift
    adds through. Arguments and errors as in `ess`.

    >>> import jax.numpy as jnp
    >>> round(float(log_mean_weight(jnp.array([-1000.0, -1001.0]))), 4)
    -1000.3799
    """
    x = log_weights_and_mask(log_weights, mask)
    live = jnp.int32(x.shape[-1]) if mask is None else jnp.broadcast_to(jnp.asarray(mask), x.shape).sum(-1)
    return _log_mean(x, live)


@jax.jit  # its NaN is for groups without a law: on the way to others `jax_debug_nans` is to see none
def _log_mean(x: Array, live: Array) -> Array:
    weights, top, has_law = scaled_weights(x)
    mean = _total(weights) / jnp.maximum(live, 1).astype(jnp.float32)
    safe = jnp.where(has_law[..., 0], mean, 1)
    empty = jnp.where(jnp.all(x == -jnp.inf, axis=-1) & (live > 0), -jnp.inf, jnp.nan)
    return jnp.where(has_law[..., 0], top[..., 0] + jnp.log(safe), empty).astype(jnp.float32)
