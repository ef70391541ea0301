"""The claim of quantised heads on a GPU: int8 and float8 tables at least 1.75 times as fast as bfloat16 at up to 32 rows.

`gumbeljax.sample` on the same heads in bfloat16, int8 and float8_e4m3fn; the hidden states are bfloat16. Before anything is
timed, the tokens of every head are compared with those of implementation="xla" on inputs whose logits are exact.
"""

import argparse
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table

import gumbeljax
from benchmarks import harness, timing
from benchmarks.shapes import GPU_HEADS, GPU_ROWS, HEADS, Head

BASE, DTYPES = "bfloat16", {"int8": jnp.int8, "float8": jnp.float8_e4m3fn}
TARGET = 1.75


@partial(jax.jit, static_argnames=("head", "dtype"))
def exact_table(key: jax.Array, head: Head, dtype) -> gumbeljax.QuantizedHead:
    """Entries in {-1, 0, 1} and powers of two as scales: with such an h, logits are exact in any order of summation."""
    entries, scales = jax.random.split(key)
    q = jax.random.randint(entries, (head.vocab, head.d_model), -1, 2, jnp.int8)
    exponent = jax.random.randint(scales, (head.vocab,), -1, 2) - round(np.log2(head.d_model**0.5 / 3))
    return gumbeljax.QuantizedHead(q.astype(dtype), jnp.exp2(exponent.astype(jnp.float32)))


def check_tokens(head: Head, rows: int, dtype, draw, plain, batches: int = 4) -> int:
    """Raises unless `draw` says what `plain`, implementation="xla", does on exact inputs; returns how many were compared."""
    h_key, w_key, key = jax.random.split(jax.random.key(0), 3)
    w = exact_table(w_key, head, dtype)
    for i in range(batches):
        h = jax.random.randint(jax.random.fold_in(h_key, i), (rows, head.d_model), -1, 2).astype(jnp.bfloat16)
        keys = jax.random.split(jax.random.fold_in(key, i), rows)
        tokens = draw(h, w, keys)
        if not (tokens >= 0).all() or not np.array_equal(tokens, plain(h, w, keys)):
            raise SystemExit(f'{head.name}, {rows} rows, {jnp.dtype(dtype).name}: tokens differ from implementation="xla": '
                             "nothing was timed")
    return batches * rows


@partial(jax.jit, static_argnames="head")
def normal_table(key: jax.Array, head: Head) -> jax.Array:
    return (jax.random.normal(key, (head.vocab, head.d_model), jnp.bfloat16) * (2 / head.d_model**0.5)).astype(jnp.bfloat16)


def inputs(head: Head, rows: int) -> tuple[jax.Array, jax.Array]:
    """(h, keys)"""
    return (jax.random.normal(jax.random.key(1), (rows, head.d_model), jnp.bfloat16),
            jax.random.split(jax.random.key(2), rows))


def step(tokens, h, w, keys, implementation):
    """One iteration of a loop: hidden states that wait for the tokens before."""
    return gumbeljax.sample(harness.depend(h, tokens), w, keys, implementation=implementation)


def of_head(head: Head, all_rows: list[int], names: list[str], implementation: str | None, *,
            rounds: int) -> Iterator[dict[str, Any]]:
    """Rows of the table, one for each number of rows: all loops are compiled first, in threads."""
    with harness.alone():
        whole = normal_table(jax.random.key(3), head)
        tables = {BASE: whole, **{name: gumbeljax.quantize_head(whole, DTYPES[name]) for name in names}}
        cells = jax.block_until_ready({rows: inputs(head, rows) for rows in all_rows})
    iterations = {rows: timing.calls_per_loop(whole.nbytes, 2 * rows * whole.size) for rows in all_rows}
    with ThreadPoolExecutor(8) as pool:
        steps = {name: partial(step, implementation=implementation if name in names else None) for name in tables}
        jobs = {(rows, name): pool.submit(harness.compiled_loop, steps[name], jnp.zeros(rows, jnp.int32), h, w, keys,
                                          iterations=iterations[rows])
                for rows, (h, keys) in cells.items() for name, w in tables.items()}
        drawers = {(rows, name, route): pool.submit(
            jax.jit(partial(gumbeljax.sample, implementation=route)).lower(h, tables[name], keys).compile)
            for rows, (h, keys) in cells.items() for name in names for route in (implementation, "xla")}
        loops, drawers = ({cell: job.result() for cell, job in made.items()} for made in (jobs, drawers))
    for rows, (h, keys) in cells.items():
        with harness.alone():
            compared = {name: check_tokens(head, rows, DTYPES[name], *(drawers[rows, name, route]
                                                                       for route in (implementation, "xla"))) for name in names}
            timed = {name: harness.timed(loops[rows, name], jnp.zeros(rows, jnp.int32), h, w, keys, iterations=iterations[rows])
                     for name, w in tables.items()}
            samples = timing.take_turns(timed, rounds=rounds)
        yield {
            "head": head._asdict(), "rows": rows, "tokens_compared": compared, "iterations": iterations[rows],
            "implementation": {name: gumbeljax.choose_implementation(h, w, implementation if name in names else None)
                               for name, w in tables.items()},
            "bytes_of_w": {name: sum(x.nbytes for x in jax.tree.leaves(w)) for name, w in tables.items()},
            "seconds": {name: timing.summarize(s)._asdict() for name, s in samples.items()},
            "speedup": {name: timing.ratio(samples[BASE], samples[name])._asdict() for name in names},
        }


def table(results: list[dict[str, Any]]) -> Table:
    """Microseconds, and how many times as fast as bfloat16 each head is; below the claim's bar in red."""
    names = list(results[0]["speedup"])
    shown = Table(title="LM head + sampling: median us per call", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("head", "rows", BASE, *names, *(f"{BASE} / {name}" for name in names), "TB/s " + names[0]):
        shown.add_column(column, justify="left" if column == "head" else "right", no_wrap=True)
    for row in results:
        seconds = {name: t["median"] for name, t in row["seconds"].items()}
        bar = TARGET if row["rows"] <= 32 else 1.0
        speedups = [row["speedup"][name]["median"] for name in names]
        shown.add_row(row["head"]["name"], str(row["rows"]), *(f"{1e6 * t:.1f}" for t in seconds.values()),
                      *(f"{x:.2f}" if x >= bar else f"[red]{x:.2f}[/red]" for x in speedups),
                      f"{row['bytes_of_w'][names[0]] / seconds[names[0]] / 1e12:.2f}")
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_quantized", description=__doc__.splitlines()[0])
    parser.add_argument("--heads", nargs="+", choices=[head.name for head in HEADS], default=[head.name for head in GPU_HEADS])
    parser.add_argument("--rows", type=int, nargs="+", default=list(GPU_ROWS))
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--implementation", choices=("triton", "mosaic"), help="of the 8-bit heads (default: as chosen)")
    parser.add_argument("--rounds", type=int, default=30, help="loops timed for each median (default 30)")
    parser.add_argument("--name", default="quantized", help="results/<name>.json is written (default quantized)")
    arguments = parser.parse_args()
    if jax.default_backend() != "gpu":
        parser.error("this benchmark is about GPUs, and jax sees none")
    results = []
    for head in (head for head in HEADS if head.name in arguments.heads):
        cells = of_head(head, arguments.rows, arguments.dtypes, arguments.implementation, rounds=arguments.rounds)
        for row in track(cells, total=len(arguments.rows), description=head.name):
            results.append(row)
            harness.save(arguments.name, results, claim=__doc__.splitlines()[0], base=BASE)  # a long run may be cut short
    Console(width=120).print(table(results))


if __name__ == "__main__":
    main()
