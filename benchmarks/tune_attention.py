"""Microseconds of attention over pages by its tiles, one GPU, bfloat16, the shape of Qwen3-1.7B at 192 of 256 slots.

Layers follow each other as in a model, each with a cache of its own, so that none of them is still in the GPU's cache. Results
are compared with XLA's before anything is timed. Times are per layer.
"""

import argparse
import functools
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import harness, timing
from gumbeljax import _compat, kv_cache
from gumbeljax.kv_cache import attention
from pallas_kernels import triton_attention
from pallas_kernels.triton_attention import AttentionTiles

HEADS, KV_HEADS, HEAD_DIM, SLOTS, LENGTH, PAGE, LAYERS = 16, 8, 128, 256, 192, 16, 12
READ_RATE = 4.18e12  # bytes a second, the best that an H200 was seen to read
TILES = [AttentionTiles(*x) for x in (
    (64, 1, 4, 3), (64, 1, 4, 1), (64, 1, 4, 2), (64, 1, 4, 5), (64, 1, 8, 3), (64, 1, 2, 3), (32, 1, 4, 5), (32, 1, 2, 4),
    (128, 1, 4, 1), (128, 1, 4, 2), (128, 1, 8, 1), (128, 1, 8, 2), (256, 1, 8, 1), (64, 2, 4, 1))]  # fmt: skip


def chain(tiles: AttentionTiles | str | None, q, layers):
    """Layer after layer; `tiles` None: by our rule, "XLA": by XLA."""
    for keys, values, slots in layers:
        if tiles == "XLA":
            q = attention._by_xla(q, keys, values, slots, None)
        else:
            q = triton_attention.attend(q, keys, values, slots.positions, slots.block_tables, slots.lengths,
                                        plt=_compat.pallas_triton(), tiles=tiles)  # fmt: skip
    return q


def measure(rows: int, rounds: int) -> None:
    keys, bf16 = jax.random.split(jax.random.key(0), 2 * LAYERS), jnp.bfloat16
    cache = kv_cache.init_paged(1, rows, SLOTS, KV_HEADS, HEAD_DIM, bf16, page_size=PAGE)
    cache = kv_cache.append(cache, jnp.full(rows, LENGTH))
    slots = kv_cache.locate(cache, jnp.full((rows, 1), LENGTH - 1))
    random = lambda key: jax.random.normal(key, cache.keys[0].shape, bf16)  # noqa: E731
    layers = [(random(keys[i]), random(keys[LAYERS + i]), slots) for i in range(LAYERS)]
    q = jax.random.normal(jax.random.key(1), (rows, 1, HEADS, HEAD_DIM), bf16)
    variants = {"XLA": "XLA", "rule": None} | {str(tuple(t)): t for t in TILES}
    first = lambda tiles: np.asarray(jax.jit(functools.partial(chain, tiles))(q, layers[:1]), np.float32)  # noqa: E731
    want = first("XLA")

    def loop_of(tiles):
        if not (off := np.abs(first(tiles) - want).max()) < 0.03 * np.abs(want).max():
            raise SystemExit(f"{tiles} is off by {off}: nothing was timed")
        return harness.jitted_loop(functools.partial(chain, tiles), q, layers, iterations=20)

    with ThreadPoolExecutor(8) as pool:
        loops = dict(zip(variants, pool.map(loop_of, variants.values()), strict=True))
    samples = timing.take_turns(loops, rounds=rounds)
    num_bytes = 4 * rows * LENGTH * KV_HEADS * HEAD_DIM
    print(f"{rows} rows: {num_bytes / 1e6:.2f} MB a layer, {1e6 * num_bytes / READ_RATE:.1f} us at {READ_RATE / 1e12} TB/s")
    for variant, times in sorted(samples.items(), key=lambda item: np.median(item[1])):
        print(f"  {1e6 * np.median(times) / LAYERS:8.2f} us  {variant}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tune_attention", description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1])
    parser.add_argument("--rounds", type=int, default=10)
    arguments = parser.parse_args()
    if jax.default_backend() != "gpu":
        parser.error("this benchmark is about GPUs, and jax sees none")
    for rows in arguments.rows:
        with harness.alone():
            measure(rows, arguments.rounds)


if __name__ == "__main__":
    main()
