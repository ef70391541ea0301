"""Which code runs: one place decides, and says so."""

import functools
import warnings
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import export

from gumbeljax import _checks, _compat, _tuning
from gumbeljax._tuning import Tiles, Tuning
from pallas_kernels import dual, mosaic, mosaic_kernel, mosaic_tiles, search, xla
from pallas_kernels.logits import Elementwise
from pallas_kernels.tiles import XlaTiles

NAMES = ("xla", "triton", "mosaic")


class DeviceFacts(NamedTuple):
    """What the choice looks at: "cpu", "gpu" or another platform; (major, minor) of an NVIDIA GPU; its multiprocessors; its
    name, as the tables of measured choices have it."""

    platform: str
    compute_capability: tuple[int, int]
    cores: int
    kind: str = ""


HOPPER = ("H20", "H100", "H200", "H800", "GH200")  # in the name of a device that can only be named


def device_facts(x) -> DeviceFacts:
    """Of where the call will run: the device of a concrete array, else the mesh's (which may be an abstract one, to lower
    for a machine that is not there), else the default device."""
    if isinstance(x, jax.Array) and _checks.is_concrete(x):
        return _facts(next(iter(x.devices())))
    if (abstract := jax.sharding.get_abstract_mesh().abstract_device) is not None:
        nvidia = abstract.platform == "gpu" and "NVIDIA" in abstract.device_kind
        hopper = any(name in abstract.device_kind.replace("-", " ").split() for name in HOPPER)
        return DeviceFacts(abstract.platform, ((9, 0) if hopper else (8, 0)) if nvidia else (0, 0), abstract.num_cores or 0,
                           abstract.device_kind)
    device = jax.config.jax_default_device
    return _facts(jax.local_devices(backend=device)[0] if device is None or isinstance(device, str) else device)


def _facts(device) -> DeviceFacts:
    platform = "gpu" if device.platform in ("gpu", "cuda") else device.platform
    major, _, minor = str(getattr(device, "compute_capability", "") if platform == "gpu" else "").partition(".")
    capability = (int(major), int(minor)) if major.isdigit() and minor.isdigit() else (0, 0)
    return DeviceFacts(platform, capability, int(getattr(device, "core_count", 0) or 0), device.device_kind)


def _unavailable(name: str, device: DeviceFacts) -> str | None:
    """Why a named kernel backend is not to be had on this machine, or None."""
    if name == "xla":
        return None
    if device.platform != "gpu" or device.compute_capability == (0, 0):
        return f"it needs an NVIDIA GPU, and this call runs on {device.platform}"
    if name == "mosaic" and device.compute_capability[0] != 9:
        return f"it needs a Hopper GPU, and this one has compute capability {'.'.join(map(str, device.compute_capability))}"
    if (_compat.pallas_triton if name == "triton" else _compat.pallas_mosaic)() is None:
        return f"jax {jax.__version__} has no Pallas {name.capitalize()} backend"
    return None


def why_not(name: str, h, w, device: DeviceFacts, *, vocab_axis=0, options=Elementwise(), groups=False, filters=False,
            one_draw=False) -> str | None:
    """Why an implementation cannot run a checked call, or None if it can; arguments as in `choose`."""
    if reason := _unavailable(name, device):
        return reason
    if name != "xla" and export.is_symbolic_dim(h.shape[0]):
        return "its programs are for one number of rows, and that of an exported call may be any"
    if filters and name == "mosaic":
        return "it has no top_k, top_p and min_p"
    if filters and name == "triton" and not one_draw:
        return "under top_k, top_p and min_p it only draws one token per row of a whole vocabulary"
    if filters and name == "triton" and h.shape[0] * w.shape[vocab_axis] >= 2**31:
        return "it finds no logits from number 2^31 on"
    if name == "triton" and w.dtype == jnp.float8_e4m3fn and device.compute_capability < (8, 9):
        return f"it reads {w.dtype} from compute capability 8.9 on"
    if name == "mosaic" and groups:
        return "it draws one token per row"
    return mosaic_kernel.why_not(h, w, options, vocab_axis) if name == "mosaic" else None


def choose(h, w, implementation: str | None, device: DeviceFacts, **call) -> str:
    """The implementation of a checked call, by rule. `call`: its `vocab_axis` and `options`; `groups`: it needs the masses of
    all groups; `filters`: it keeps a part of them; `one_draw`: it draws one token per row, of a vocabulary that is not cut."""
    cannot = functools.partial(why_not, h=h, w=w, device=device, **call)
    if implementation is not None:
        if reason := cannot(implementation):
            raise NotImplementedError(f"implementation={implementation!r} cannot run this call: {reason}; "
                                      "leave implementation out, or name another.")
        return implementation
    if device.platform != "gpu" or device.compute_capability == (0, 0):
        return "xla"
    if call.get("filters"):
        return "triton" if cannot("triton") is None else "xla"
    # Tables of 8 bits: a tile of Triton's kernel has 16 rows, and up to there it is faster.
    if cannot("mosaic") is None and (w.dtype.itemsize > 1 or h.shape[0] > 16):
        return "mosaic"
    if reason := cannot("triton"):
        warnings.warn(f"{reason}; gumbeljax runs implementation='xla' instead.", stacklevel=2)
        return "xla"
    return "triton"


class Plan(NamedTuple):
    """What runs; tiles None: those of the implementation's own rule."""

    implementation: str
    tiles: Tiles | None = None


def plan(h, w, implementation: str | Tuning | None, device: DeviceFacts, *, vocab_axis=0, **call) -> Plan:
    """The measured choice for a checked call, from the user's table or ours, else the rules; `call` as in `choose`."""
    tables = (_tuning.built_in(),)
    if isinstance(implementation, Tuning):
        tables, implementation = (implementation, *tables), None
    _checks.choice(implementation, "implementation", (None, *NAMES))
    is_measured = not call.get("filters") and not export.is_symbolic_dim(h.shape[0])  # they are of some rows, without filters
    for table in tables if is_measured else ():
        found = table.find(_tuning.place_of(device.kind, h, w, vocab_axis))
        if (found is not None and implementation in (None, found.implementation)
                and why_not(found.implementation, h, w, device, vocab_axis=vocab_axis, **call) is None):
            return Plan(found.implementation, found.tiles)
    return Plan(choose(h, w, implementation, device, vocab_axis=vocab_axis, **call))


class Stages(NamedTuple):
    """What an implementation offers: a draw, the draw of a shard, the mass of the vocabulary, the masses of its groups, the
    draw of a shard with scores of its groups, the passes over two tables and the search that mostly does without them; each
    None, or the draw under filters and the verification of a chain, with the two passes that it begins with."""

    draw: Callable
    piece: Callable
    mass: Callable
    groups: Callable
    scored_piece: Callable
    residual_draw: Callable
    residual_mass: Callable
    residual_search: Callable
    filtered_draw: Callable | None = None
    verify_chain: Callable | None = None
    race_pieces: Callable | None = None
    mass_pieces: Callable | None = None


def stages(implementation: str, device: DeviceFacts, tiles: Tiles | None = None, *, one_temperature: bool = False) -> Stages:
    """The functions of an implementation; those of all implementations take the same arguments. `one_temperature`: that of all
    rows is the same number."""
    if implementation == "xla":
        if tiles is None and device.platform != "cpu":
            tiles = XlaTiles(32768)  # long blocks keep an accelerator busy
        one = (functools.partial(f, tiles=tiles)
               for f in (xla.draw, xla.piece, xla.stage1_mass, xla.stage1_groups, xla.scored_piece))
        block = None if device.platform == "cpu" else 16384
        both = (functools.partial(f, block=block) for f in (dual.residual_draw, dual.residual_mass))
        return Stages(*(*one, *both, search.search))
    from pallas_kernels import triton, triton_dual, triton_filtered, triton_search, triton_walk

    _compat.quiet_triton_deprecation()
    plt = _compat.pallas_triton()
    one = (functools.partial(f, plt=plt, tiles=tiles if implementation == "triton" else None, one_temperature=one_temperature)
           for f in (triton.draw, triton.piece, triton.stage1_mass, triton.stage1_groups, triton.scored_piece))
    rest = triton_dual.residual_draw, triton_dual.residual_mass, triton_search.search_rows
    machine = {"mgpu": None if _unavailable("mosaic", device) else _compat.pallas_mosaic(),
               "num_sms": device.cores or mosaic_tiles.NUM_SMS}
    filtered = functools.partial(triton_filtered.draw, plt=plt, **machine)
    chain = functools.partial(triton_walk.verify_chain, plt=plt)
    pieces = (functools.partial(f, plt=plt, tiles=tiles if implementation == "triton" else None)
              for f in (triton.race_pieces, triton.mass_pieces))
    by_triton = Stages(*(*one, *(functools.partial(f, plt=plt) for f in rest), filtered, chain, *pieces))
    if implementation == "triton":
        return by_triton
    machine["tiles"] = tiles
    both_stages = {**machine, "plt": plt, "one_temperature": one_temperature}
    return by_triton._replace(
        draw=functools.partial(mosaic.draw, **both_stages), piece=functools.partial(mosaic.piece, **both_stages),
        scored_piece=functools.partial(mosaic.scored_piece, **both_stages),
        mass=functools.partial(mosaic.stage1_mass, **both_stages),
        race_pieces=functools.partial(mosaic.race_pieces, **machine),
        mass_pieces=functools.partial(mosaic.mass_pieces, **machine))


def precision_of(precision, dtype) -> jax.lax.Precision | None:
    """The precision of the products. float32 operands: "highest" unless another is asked for, so that a GPU does not
    round them to TF32. bfloat16 and float16 products are exact in float32 already: None."""
    if isinstance(precision, str):
        _checks.choice(precision, "precision", ("default", "high", "highest"))
        precision = jax.lax.Precision(precision)
    if precision is not None and not isinstance(precision, jax.lax.Precision):
        raise TypeError(f"precision must be None, 'default', 'high', 'highest' or a jax.lax.Precision; got {precision!r}: "
                        "pass one of these.")
    if jnp.dtype(dtype) != jnp.float32:
        return None
    return jax.lax.Precision.HIGHEST if precision is None else precision
