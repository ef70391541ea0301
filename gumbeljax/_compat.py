"""Everything that depends on the version of JAX. The only file that may."""

import importlib
import warnings

import jax

MINIMUM_JAX = (0, 11, 2)


def check_jax_version(version: str = jax.__version__) -> None:
    """Raises ImportError when the installed JAX is older than the declared minimum."""
    numbers = tuple(int(part) for part in version.split(".")[:3] if part.isdigit())
    if numbers < MINIMUM_JAX:
        needed = ".".join(map(str, MINIMUM_JAX))
        raise ImportError(f"gumbeljax needs jax >= {needed}; got {version}: upgrade it with pip install -U jax.")


def pallas_triton():
    """The Pallas Triton backend, or None where this JAX has none. Imported on first use: it is slow, and may go away."""
    try:
        return importlib.import_module("jax.experimental.pallas.triton")
    except ImportError:
        return None


def pallas_mosaic():
    """The Pallas Mosaic GPU backend, or None where this JAX has none."""
    try:
        return importlib.import_module("jax.experimental.pallas.mosaic_gpu")
    except ImportError:
        return None


def varying(x) -> frozenset[str]:
    """The mesh axes over which the type of x says that it varies, inside `shard_map` with its check on."""
    return jax.typeof(x).manual_axis_type.varying if hasattr(x, "dtype") else frozenset()


def quiet_triton_deprecation() -> None:
    """JAX warns at every lowering for Triton since 0.11. The plan for it is in docs/design.md; users need not read it
    at each call. Called whenever a kernel is traced, since `warnings.catch_warnings` blocks forget filters."""
    warnings.filterwarnings("ignore", message="The Pallas Triton backend is deprecated", category=DeprecationWarning)
