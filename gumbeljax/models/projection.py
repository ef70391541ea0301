"""Products of a decode step, with the norms, gates and sums around them."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from gumbeljax import _compat
from gumbeljax.models.rotary import can_run_kernels, rms_norm
from pallas_kernels import triton_project

MOST_ROWS = 0  # more tokens are left to XLA: all, until the kernel, which takes four, has been timed on a GPU


def _by_xla(eps: float, is_gated: bool, x, weights, scale, residual) -> jax.Array:
    x = x if scale is None else rms_norm(x, scale, eps)
    products = [x @ w for w in weights]
    out = jax.nn.silu(products[0]) * products[1] if is_gated else jnp.concatenate(products, axis=-1)
    return out if residual is None else residual + out


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _by_triton(eps: float, is_gated: bool, x, weights, scale, residual) -> jax.Array:
    _compat.quiet_triton_deprecation()
    flat = lambda x: x.reshape(-1, x.shape[-1])  # noqa: E731
    out = triton_project.project(
        flat(x), weights, scale, None if residual is None else flat(residual), eps=eps, is_gated=is_gated,
        plt=_compat.pallas_triton())  # fmt: skip
    return out.reshape(*x.shape[:-1], -1)


def _forward(eps, is_gated, x, weights, scale, residual):
    return _by_triton(eps, is_gated, x, weights, scale, residual), (x, weights, scale, residual)


def _backward(eps, is_gated, arguments, cotangent):
    return jax.vjp(functools.partial(_by_xla, eps, is_gated), *arguments)[1](cotangent)


_by_triton.defvjp(_forward, _backward)


def is_fused(x: jax.Array, linears: Sequence[nnx.Module], implementation: str | None) -> bool:
    """Whether `project` can run these layers for the tokens of `x [batch, seq, d_model]`: few rows on an NVIDIA GPU."""
    weights = [linear.kernel[...] for linear in linears if type(linear) is nnx.Linear and linear.bias is None]
    if len(weights) < len(linears):
        return False
    rows = jax.ShapeDtypeStruct((x.shape[0] * x.shape[1], weights[0].shape[0]), x.dtype)
    is_few = rows.shape[0] <= MOST_ROWS and triton_project.why_not(rows, weights, has_norm=True) is None
    return is_few and can_run_kernels(implementation, x, *weights)


def project(x, linears: Sequence[nnx.Linear], *, norm: Any = None, residual=None, is_gated: bool = False) -> jax.Array:
    """The layers' outputs for ``x [batch, seq, d_in]`` side by side, from one kernel, where `is_fused`.

    Args:
      linears: layers without bias.
      norm: an RMSNorm that x passes first.
      residual: added to the result.
      is_gated: silu of the first layer's output times the second's.
    """
    scale, eps = (None, 0.0) if norm is None else (norm.scale[...], norm.eps)
    return _by_triton(eps, is_gated, x, tuple(linear.kernel[...] for linear in linears), scale, residual)
