"""Which code runs: one place decides, and says so."""

import functools
import warnings
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from gumbeljax import _checks, _compat
from pallas_kernels import xla
from pallas_kernels.tiles import XlaTiles

NAMES = ("xla", "triton")


def platform_of(x) -> str:
    """Where the call will run: the device of a concrete array, else the default device."""
    if isinstance(x, jax.Array) and _checks.is_concrete(x):
        return next(iter(x.devices())).platform
    device = jax.config.jax_default_device
    return getattr(device, "platform", device) if device is not None else jax.default_backend()


def choose_implementation(h, w, implementation: str | None = None) -> str:
    """The implementation that `sample(h, w, key, implementation=implementation)` runs: "xla" or "triton".

    None chooses: "triton" on an NVIDIA GPU, "xla" everywhere else. A named one is returned if it can run here.

    Raises:
      ValueError: the name is unknown.
      NotImplementedError: the named implementation cannot run here.

    >>> import jax.numpy as jnp, gumbeljax
    >>> gumbeljax.choose_implementation(jnp.ones(16), jnp.ones((32, 16)), "xla")
    'xla'
    """
    del w  # part of the signature because a measured table may look at its shape
    _checks.choice(implementation, "implementation", (None, *NAMES))
    platform = platform_of(h)
    on_gpu = platform in ("gpu", "cuda")
    if implementation == "triton" and not on_gpu:
        raise NotImplementedError(f"implementation='triton' needs an NVIDIA GPU; this call runs on {platform}: "
                                  "leave implementation out, or install jax[cuda13].")
    if implementation == "xla" or not on_gpu:
        return "xla"
    if _compat.pallas_triton() is None:
        sentence = f"jax {jax.__version__} has no Pallas Triton backend"
        if implementation == "triton":
            raise NotImplementedError(f"implementation='triton' cannot run; {sentence}: leave implementation out.")
        warnings.warn(f"{sentence}; gumbeljax runs implementation='xla' instead.", stacklevel=2)
        return "xla"
    return "triton"


class Stages(NamedTuple):
    """Stage 1 of an implementation: what the vocabulary says as a race, as a mass, or group by group."""

    race: Callable
    mass: Callable
    groups: Callable


def stages(implementation: str, platform: str) -> Stages:
    """The functions of an implementation; those of all implementations take the same arguments."""
    if implementation == "triton":
        from pallas_kernels import triton  # imports the backend's package: only where it is used

        _compat.quiet_triton_deprecation()
        plt = _compat.pallas_triton()
        return Stages(*(functools.partial(f, plt=plt) for f in (triton.stage1, triton.stage1_mass, triton.stage1_groups)))
    # Long vocabulary blocks keep a GPU busy; short ones stay in a CPU's cache.
    tiles = XlaTiles(block=4096 if platform == "cpu" else 32768)
    return Stages(*(functools.partial(f, tiles=tiles) for f in (xla.stage1, xla.stage1_mass, xla.stage1_groups)))


def precision_of(precision, dtype) -> jax.lax.Precision | None:
    """The precision of the products. float32 operands: "highest" unless another is asked for, so that a GPU does not
    round them to TF32. bfloat16 and float16 products are exact in float32 already: None."""
    if isinstance(precision, str):
        _checks.choice(precision, "precision", ("default", "high", "highest"))
        precision = jax.lax.Precision(precision)
    if precision is not None and not isinstance(precision, jax.lax.Precision):
        raise TypeError(f"precision must be None, 'default', 'high', 'highest' or a jax.lax.Precision; got {precision!r}.")
    if jnp.dtype(dtype) != jnp.float32:
        return None
    return jax.lax.Precision.HIGHEST if precision is None else precision
