"""Time per output token of `gumbeljax.decode` on one GPU, bfloat16, random weights, against the roofline and XLA's sampling.

Prompts of 128 tokens; a token takes (t(128 new) - t(8 new)) / 120 of the host's clock, so that prompts and fixed costs are out.
The same loop is timed with `gumbeljax.sample` and with what JAX users write: `jax.random.categorical`, or `lax.top_k` with a
nucleus inside. The roofline is the bytes that a step has to read (weights once, the cache at its mean length) over the best
rate at which a reduction read the head in this run. Before anything is timed, a step by the kernels of our own is
compared with the step by XLA's. A profile of one chunk says which kernels run, and whether anything is copied to the host
between the first and the last of a step's own. The GPU idles for what these kernels leave of the time per token, which is taken
without a profiler: under one XLA launches every kernel by itself, and no graph of them.
"""

import argparse
import functools
import re
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from rich import box
from rich.console import Console
from rich.table import Table

import gumbeljax
from benchmarks import bench_gpu, harness, timing
from benchmarks.shapes import QWEN3_1_7B, SMOLLM2_135M, Head
from gumbeljax.cli.bench import random_model
from gumbeljax.decode import prefill, resume
from gumbeljax.nnx import as_decode_fn

PROMPT, FEW, MANY = 128, 8, 128
OURS, XLA = "gumbeljax", "XLA idiom"
HEADS = {"qwen3-1.7b": QWEN3_1_7B, "smollm2-135m": SMOLLM2_135M, "tiny": Head("tiny", 1024, 64)}
FILTERED = "top_k=50 top_p=0.95"
SAMPLINGS: dict[str, dict[str, Any]] = {"T=1": {"temperature": 1.0}, FILTERED: {"top_k": 50, "top_p": 0.95}}
CELLS = {"qwen3-1.7b": (1, 64, 256), "smollm2-135m": (1, 64)}


def categorical(h, w, keys, *, temperature):
    """Plain sampling as one writes it in JAX; a key per row, as the loop gives them."""
    return jax.vmap(jax.random.categorical)(keys, jnp.matmul(h, w.T, preferred_element_type=jnp.float32) / temperature)


def top_k_idiom(h, w, keys, *, top_k, top_p):
    """`lax.top_k`, the nucleus among its values, and a draw from them. `lax.top_k` takes a fixed k."""
    del top_k
    logits, ids = lax.top_k(jnp.matmul(h, w.T, preferred_element_type=jnp.float32), SAMPLINGS[FILTERED]["top_k"])
    probs = jax.nn.softmax(logits, axis=-1)
    kept = jnp.cumsum(probs, axis=-1) - probs < top_p
    drawn = jax.vmap(jax.random.categorical)(keys, jnp.where(kept, logits, -jnp.inf))
    return jnp.take_along_axis(ids, drawn[:, None], axis=1)[:, 0]


SAMPLERS: dict[tuple[str, str], Callable] = {
    (OURS, "T=1"): gumbeljax.sample, (OURS, FILTERED): gumbeljax.sample,
    (XLA, "T=1"): categorical, (XLA, FILTERED): top_k_idiom,
}


class Setup(NamedTuple):
    """A model with prompts run."""

    decode_fn: Any
    params: Any
    w: jax.Array
    state: Any  # after the prompts; never donated
    key: jax.Array


def start(model, rows: int, *, page_size: int) -> Setup:
    decode_fn, params = as_decode_fn(model)
    prompts = np.random.default_rng(0).integers(0, model.config.vocab, (rows, PROMPT))
    length = PROMPT + MANY
    cache = model.init_paged_cache(rows, length, page_size=page_size)
    state = prefill(decode_fn, params, prompts, cache, max_length=length, shares_prefix=False)
    return Setup(decode_fn, params, model.head(), state, jax.random.key(1))


copied = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))


def check_attention(model, setup: Setup) -> float:
    """Largest difference between hidden states of one step by our kernels and by XLA, over their largest element."""
    by_xla = nnx.merge(*nnx.split(model))
    for layer in by_xla.layers:
        layer.self_attn.implementation = "xla"

    @functools.partial(jax.jit, static_argnums=0)
    def step(decode_fn, params, state):
        cache = gumbeljax.kv_cache.append(state.cache, jnp.ones_like(state.lengths))
        return decode_fn(params, state.tokens[:, :1], state.lengths[:, None], cache)[0].astype(jnp.float32)

    ours, plain = (step(decode_fn, setup.params, setup.state) for decode_fn in (setup.decode_fn, as_decode_fn(by_xla)[0]))
    difference = float(jnp.max(jnp.abs(ours - plain)) / jnp.max(jnp.abs(plain)))
    if not difference < 0.1:  # 28 layers of bfloat16 alone are off by 0.02; a wrong kernel, by 1
        raise SystemExit(f"hidden states differ by {difference:.3f} between our kernels and XLA: nothing was timed")
    return difference


def check_filters(setup: Setup, implementation: str) -> None:
    """The kernels for filters draw what XLA draws."""
    keys = jax.random.split(setup.key, setup.state.h.shape[0])
    draw = jax.jit(functools.partial(gumbeljax.sample, **SAMPLINGS[FILTERED]), static_argnames="implementation")
    ours, plain = (draw(setup.state.h, setup.w, keys, implementation=name) for name in (implementation, "xla"))
    if not np.array_equal(ours, plain):
        raise SystemExit(f"{implementation} draws {ours.tolist()} under filters, XLA {plain.tolist()}: nothing was timed")


def seconds_of(setup: Setup, new_tokens: int, sample_fn, sampling, chunk_size: int) -> float:
    """Host seconds of so many more tokens for every row."""
    state = jax.block_until_ready(copied(setup.state))
    begin = time.perf_counter()
    out = resume(setup.decode_fn, setup.params, setup.w, state, setup.key, max_new_tokens=new_tokens, chunk_size=chunk_size,
                 sample_fn=sample_fn, **sampling)
    jax.block_until_ready(out)
    return time.perf_counter() - begin


def per_token(setup: Setup, sample_fn, sampling, chunk_size: int) -> float:
    many, few = (seconds_of(setup, new, sample_fn, sampling, chunk_size) for new in (MANY, FEW))
    return (many - few) / (MANY - FEW)


def bytes_per_step(model, params, rows: int) -> int:
    """Weights but for an embedding that only looks ids up, and the cache at its mean length between the two runs."""
    config = model.config
    weights = sum(x.nbytes for x in jax.tree.leaves(params))
    if not config.is_tied:
        weights -= model.embed_tokens.embedding[...].nbytes
    slots = rows * (PROMPT + (FEW + MANY) // 2)
    return weights + 2 * config.num_layers * config.num_kv_heads * config.head_dim * jnp.dtype(model.dtype).itemsize * slots


class Event(NamedTuple):
    """What a GPU did: microseconds."""

    name: str
    start: float
    duration: float


def device_events(folder: Path) -> list[Event]:
    """Kernels and copies of a profile, from the lines of the device's streams."""
    paths = sorted(folder.rglob("*.xplane.pb"))
    planes = jax.profiler.ProfileData.from_file(str(paths[-1])).planes
    return [Event(event.name, event.start_ns / 1e3, event.duration_ns / 1e3) for plane in planes
            if plane.name.startswith("/device:GPU") for line in plane.lines if line.name.startswith("Stream")
            for event in line.events]


KINDS = {"copy to the host": r"memcpyd2h|dtoh", "other copies": r"memcpy|memset",
         "matrix products": r"gemm|nvjet|cutlass|cublas|splitk|gemv",
         "attention": r"gumbeljax_(attention|rotate)", "head and sampling": r"gumbeljax_|mosaic|top_?k|sort|threefry"}


def kind_of(name: str) -> str:
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name.lower())), "other kernels")


def breakdown(events: Iterable[Event], steps: int) -> dict[str, Any]:
    """Microseconds per step, in all and by kind and by kernel, and copies to the host, between the first kernel of the steps
    and the last: products, attention, sampling. What surrounds the chunk is left out."""
    events = sorted(events, key=lambda event: event.start)
    kernels = [event for event in events if kind_of(event.name) in ("matrix products", "attention", "head and sampling")]
    first, last = kernels[0].start, max(event.start + event.duration for event in kernels)
    inside = [event for event in events if first <= event.start < last]
    busy, end = 0.0, first
    for event in inside:
        busy += max(0.0, event.start + event.duration - max(end, event.start))
        end = max(end, event.start + event.duration)
    kinds: dict[str, float] = {}
    names: dict[str, list[float]] = {}
    for event in inside:
        kinds[kind_of(event.name)] = kinds.get(kind_of(event.name), 0.0) + event.duration / steps
        names.setdefault(re.sub(r"[_.]+\d+$", "", event.name)[:60], []).append(event.duration)
    top = sorted(names.items(), key=lambda item: -sum(item[1]))[:12]
    return {
        "us_per_step": (last - first) / steps, "busy_us_per_step": busy / steps, "kernels_per_step": len(inside) / steps,
        "copies_to_host": sum(kind_of(event.name) == "copy to the host" for event in inside), "us_by_kind": kinds,
        "kernels": [{"name": name, "us_per_step": sum(d) / steps, "per_step": len(d) / steps} for name, d in top],
    }


def profiled(setup: Setup, sample_fn, sampling, chunk_size: int) -> dict[str, Any]:
    """The breakdown of one chunk."""
    state = jax.block_until_ready(copied(setup.state))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            out = resume(setup.decode_fn, setup.params, setup.w, state, setup.key, max_new_tokens=chunk_size,
                         chunk_size=chunk_size, sample_fn=sample_fn, **sampling)
            jax.block_until_ready(out)
        return breakdown(device_events(Path(folder)), chunk_size)


def measure(shape: str, model, rows: int, samplings: list[str], contenders: list[str], *, read_rate: float, chunk_size: int,
            page_size: int, rounds: int, profiles: bool) -> list[dict[str, Any]]:
    """One row of the table for each way of sampling."""
    setup = start(model, rows, page_size=page_size)
    difference = check_attention(model, setup)
    if FILTERED in samplings and (name := getattr(SAMPLERS[OURS, FILTERED], "keywords", {}).get("implementation")):
        check_filters(setup, name)
    read = bytes_per_step(model, setup.params, rows)
    calls = {(name, sampling): functools.partial(per_token, setup, SAMPLERS[name, sampling], SAMPLINGS[sampling], chunk_size)
             for sampling in samplings for name in contenders}
    with ThreadPoolExecutor(8) as pool:  # compiles
        list(pool.map(lambda call: call(), calls.values()))
    results = []
    for sampling in samplings:
        samples = timing.take_turns({name: calls[name, sampling] for name in contenders}, rounds=rounds)
        row = {"head": HEADS[shape]._asdict(), "rows": rows, "sampling": sampling, "read_bytes": read, "chunk_size": chunk_size,
               "page_size": page_size, "roofline": read / read_rate, "attention_difference": difference,
               "seconds": {name: timing.summarize(s)._asdict() for name, s in samples.items()},
               "ratio": {name: timing.ratio(s, samples[OURS])._asdict() for name, s in samples.items()}}
        if profiles:
            row["profile"] = profiled(setup, SAMPLERS[OURS, sampling], SAMPLINGS[sampling], chunk_size)
            row["idle_share"] = 1 - row["profile"]["busy_us_per_step"] / (1e6 * row["seconds"][OURS]["median"])
        results.append(row)
    return results


def table(results: list[dict[str, Any]]) -> Table:
    """Milliseconds per token, over the roofline, XLA's sampling over ours, and the profile in short."""
    shown = Table(title="time per output token, ms", box=box.SIMPLE_HEAD)
    for column in ("model", "rows", "sampling", OURS, "roofline", "/ roofline", f"{XLA} /", "idle", "kernels", "to host"):
        shown.add_column(column, justify="left" if column in ("model", "sampling") else "right")
    for row in results:
        seconds, profile = row["seconds"], row.get("profile")
        xla = f"{row['ratio'][XLA]['median']:.2f}" if XLA in seconds else ""
        last = [""] * 3
        if profile:
            last = [f"{100 * row['idle_share']:.1f}%", f"{profile['kernels_per_step']:.0f}", str(profile["copies_to_host"])]
        shown.add_row(row["head"]["name"], str(row["rows"]), row["sampling"], f"{1e3 * seconds[OURS]['median']:.3f}",
                      f"{1e3 * row['roofline']:.3f}", f"{seconds[OURS]['median'] / row['roofline']:.2f}", xla,
                      *last)
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_decode", description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", choices=CELLS, default=list(CELLS))
    parser.add_argument("--rows", type=int, nargs="+", help="default: 1, 64 and, for the larger model, 256")
    parser.add_argument("--samplings", nargs="+", choices=SAMPLINGS, default=list(SAMPLINGS))
    parser.add_argument("--contenders", nargs="+", choices=(OURS, XLA), default=[OURS, XLA], help="gumbeljax always takes part")
    parser.add_argument("--filters", choices=("xla", "triton"),
                        help="gumbeljax's implementation under filters (default: its own choice)")
    parser.add_argument("--chunk-size", type=int, default=FEW,
                        help="steps between two looks of the host (default 8; any other size compiles a second loop)")
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-profile", action="store_true")
    parser.add_argument("--name", default="decode", help="results/<name>.json is written (default decode)")
    arguments = parser.parse_args()
    if jax.default_backend() != "gpu":
        parser.error("this benchmark is about GPUs, and jax sees none; gumbeljax bench times any device")
    contenders = list(dict.fromkeys([OURS, *arguments.contenders]))
    if arguments.filters:
        SAMPLERS[OURS, FILTERED] = functools.partial(gumbeljax.sample, implementation=arguments.filters)
    results: list[dict[str, Any]] = []
    with harness.alone():
        read_rate = bench_gpu.best_read_rate(bench_gpu.random_head(QWEN3_1_7B), rounds=10)
    for shape in arguments.shapes:
        model = random_model(shape, "bfloat16", 0)
        for rows in arguments.rows or CELLS[shape]:
            begin = time.perf_counter()
            with harness.alone():
                results += measure(shape, model, rows, arguments.samplings, contenders, read_rate=read_rate,
                                   chunk_size=arguments.chunk_size, page_size=arguments.page_size, rounds=arguments.rounds,
                                   profiles=not arguments.no_profile)
            print(f"{shape}, {rows} rows: {time.perf_counter() - begin:.0f} s", flush=True)
            harness.save(arguments.name, results, claim=__doc__.splitlines()[0], read_rate=read_rate)
    console = Console(width=150)
    console.print(table(results))
    for row in results:
        if profile := row.get("profile"):
            kinds = ", ".join(f"{kind} {us:.0f}" for kind, us in profile["us_by_kind"].items())
            cell = f"{row['head']['name']}, {row['rows']} rows, {row['sampling']}"
            console.print(f"{cell}: kernels run for {profile['busy_us_per_step']:.0f} us a step (which takes "
                          f"{profile['us_per_step']:.0f} us under the profiler); {kinds}")
            for kernel in profile["kernels"]:
                console.print(f"  {kernel['us_per_step']:8.1f} us {kernel['per_step']:6.1f} x  {kernel['name']}")


if __name__ == "__main__":
    main()
