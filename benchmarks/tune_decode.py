"""Microseconds of the kernels of a decode step by their tiles, one GPU, bfloat16, the shape of Qwen3-1.7B.

Layers follow each other as in a model, each with weights or cache of its own, so that none of them is still in the GPU's cache.
"mlp" is norm, gate, down and sum; "qkv" is norm, three projections, output projection and sum; both with tiles for the first or
the second product. "attention" is attention over pages of 16. Results are compared with XLA's before anything is timed. Times
are per layer.
"""

import argparse
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import harness, timing
from gumbeljax import _compat, kv_cache
from gumbeljax.kv_cache import attention
from gumbeljax.models import projection
from gumbeljax.models.rotary import rms_norm
from pallas_kernels import triton_attention, triton_project
from pallas_kernels.triton_attention import AttentionTiles
from pallas_kernels.triton_project import ProjectTiles

D_MODEL, D_FF, HEADS, KV_HEADS, HEAD_DIM, EPS, SLOTS, PAGE = 2048, 6144, 16, 8, 128, 1e-6, 256, 16
LAYERS = 12
PROJECTIONS = [ProjectTiles(*x) for x in (
    (16, 128, 4, 4), (16, 256, 4, 4), (16, 256, 4, 6), (16, 512, 8, 4), (32, 128, 4, 4), (32, 128, 4, 6), (32, 256, 8, 4),
    (64, 64, 4, 6), (64, 128, 8, 4))]  # fmt: skip
MANY_PROJECTIONS = [ProjectTiles(*x) for x in (
    (16, 128, 4, 4), (32, 64, 4, 5), (32, 128, 4, 4), (32, 128, 8, 4), (64, 64, 4, 4), (64, 64, 8, 5), (64, 128, 8, 3))]
ATTENTIONS = [AttentionTiles(*x) for x in (
    (64, 1, 4, 3), (64, 1, 4, 1), (64, 1, 4, 5), (64, 1, 8, 5), (32, 1, 4, 5), (128, 1, 4, 1), (128, 1, 8, 1), (128, 1, 8, 4),
    (256, 1, 8, 1), (64, 2, 4, 1))]  # fmt: skip


class Part(NamedTuple):
    """A chain of layers: `run(x, layer, how)` for each of them; `how` is None for XLA."""

    x: jax.Array
    layers: list[Any]
    run: Callable
    variants: dict[str, Any]
    read_bytes: int  # of a layer


def project(tiles: ProjectTiles | None, x, weights, scale=None, residual=None, *, is_gated=False):
    if scale is not None and x.shape[0] > triton_project.MOST_NORMED_ROWS:
        x, scale = rms_norm(x, scale, EPS), None
    return triton_project.project(x, weights, scale, residual, eps=EPS, is_gated=is_gated, plt=_compat.pallas_triton(),
                                  tiles=tiles)  # fmt: skip


def by_xla(x, weights, scale=None, residual=None, *, is_gated=False):
    return projection._by_xla(EPS, is_gated, x, weights, scale, residual)


def mlp(x, layer, how):
    (gate, up), (down,), scale = layer
    gated, out = how or ("XLA", "XLA")
    run = by_xla if gated == "XLA" else functools.partial(project, gated)
    x_gated = run(x, (gate, up), scale, is_gated=True)
    return by_xla(x_gated, (down,), residual=x) if out == "XLA" else project(out, x_gated, (down,), residual=x)


def qkv(x, layer, how):
    weights, (out,), scale = layer
    first, second = how or ("XLA", "XLA")
    joined = by_xla(x, weights, scale) if first == "XLA" else project(first, x, weights, scale)
    q = joined[:, :D_MODEL] + joined[:, D_MODEL:]  # in place of attention, so that all columns are needed
    return by_xla(q, (out,), residual=x) if second == "XLA" else project(second, q, (out,), residual=x)


def attend(q, layer, how):
    keys, values, slots = layer
    if how is None:
        return attention._by_xla(q, keys, values, slots, None)
    return triton_attention.attend(q, keys, values, slots.positions, slots.block_tables, slots.lengths,
                                   plt=_compat.pallas_triton(), tiles=how[0])  # fmt: skip


def matrices(key, *shapes):
    keys = jax.random.split(key, len(shapes))
    return tuple(0.02 * jax.random.normal(k, shape, jnp.bfloat16) for k, shape in zip(keys, shapes, strict=True))


def parts(rows: int) -> dict[str, Part]:
    keys, bf16, few = jax.random.split(jax.random.key(0), LAYERS), jnp.bfloat16, rows <= 4
    x, ones = jax.random.normal(keys[0], (rows, D_MODEL), bf16), jnp.ones(D_MODEL, bf16)
    rest = None if few else "XLA"  # the other product: by our rule, or by XLA where that is the rule
    tiles = PROJECTIONS if few else MANY_PROJECTIONS
    two = {"rule": (None, None)} | {f"first {tuple(t)}": (t, rest) for t in tiles}
    two |= {f"second {tuple(t)}": (rest, t) for t in tiles}
    up, down, square, narrow = (D_MODEL, D_FF), (D_FF, D_MODEL), (D_MODEL, D_MODEL), (D_MODEL, KV_HEADS * HEAD_DIM)
    mlps = [(m[:2], m[2:], ones) for m in (matrices(key, up, up, down) for key in keys)]
    qkvs = [(m[:3], m[3:], ones) for m in (matrices(key, square, narrow, narrow, square) for key in keys)]
    length = 192
    cache = kv_cache.init_paged(1, rows, SLOTS, KV_HEADS, HEAD_DIM, bf16, page_size=PAGE)
    cache = kv_cache.append(cache, jnp.full(rows, length))
    slots = kv_cache.locate(cache, jnp.full((rows, 1), length - 1))
    caches = [(*matrices(key, *[cache.keys[0].shape] * 2), slots) for key in keys]
    q = jax.random.normal(keys[1], (rows, 1, HEADS, HEAD_DIM), bf16)
    one = {"rule": (None,)} | {str(tuple(t)): (t,) for t in ATTENTIONS}
    return {
        "mlp": Part(x, mlps, mlp, two, 6 * D_MODEL * D_FF),
        "qkv": Part(x, qkvs, qkv, two, 4 * D_MODEL * (D_MODEL + KV_HEADS * HEAD_DIM)),
        "attention": Part(q, caches, attend, one, 4 * rows * length * KV_HEADS * HEAD_DIM),
    }


def chain(part: Part, how, x, layers):
    """A single row runs through XLA's products as two, as in a model."""
    rows, pads = x.shape[0], how is None and x.ndim == 2 and x.shape[0] == 1
    x = jnp.pad(x, ((0, 1), (0, 0))) if pads else x
    for layer in layers:
        x = part.run(x, layer, how)
    return x[:rows]


def measure(name: str, part: Part, rounds: int) -> None:
    variants = {"XLA": None} | part.variants
    first = lambda how: np.asarray(jax.jit(functools.partial(chain, part, how))(part.x, part.layers[:1]), np.float32)  # noqa: E731
    want = first(None)

    def loop_of(how):
        if not (off := np.abs(first(how) - want).max()) < 0.03 * np.abs(want).max():
            raise SystemExit(f"{name} with {how} is off by {off}: nothing was timed")
        return harness.jitted_loop(functools.partial(chain, part, how), part.x, part.layers, iterations=20)

    with ThreadPoolExecutor(8) as pool:
        loops = dict(zip(variants, pool.map(loop_of, variants.values()), strict=True))
    samples = timing.take_turns(loops, rounds=rounds)
    megabytes = part.read_bytes / 1e6
    print(f"{name}, {part.x.shape[0]} rows: {megabytes:.2f} MB a layer, {megabytes / 4.18:.1f} us at 4.18 TB/s")
    for variant, times in sorted(samples.items(), key=lambda item: np.median(item[1])):
        print(f"  {1e6 * np.median(times) / LAYERS:8.2f} us  {variant}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tune_decode", description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1])
    parser.add_argument("--parts", nargs="+", choices=("mlp", "qkv", "attention"), default=["mlp", "qkv", "attention"])
    parser.add_argument("--rounds", type=int, default=10)
    arguments = parser.parse_args()
    if jax.default_backend() != "gpu":
        parser.error("this benchmark is about GPUs, and jax sees none")
    for rows in arguments.rows:
        for name, part in parts(rows).items():
            if name in arguments.parts:
                with harness.alone():
                    measure(name, part, arguments.rounds)


if __name__ == "__main__":
    main()
