"""The claim of quantised heads on a GPU: int8 and float8 tables at least 1.75 times as fast as bfloat16 at up to 32 rows.

`gumbeljax.sample` on the same heads in bfloat16, int8 and float8_e4m3fn; the hidden states are bfloat16. Before anything is
timed, the tokens of every head are compared with those of implementation="xla" on inputs whose logits are exact.
"""

import argparse
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
from benchmarks import harness
from benchmarks.bench_gpu import GPU_HEADS, GPU_ROWS
from benchmarks.shapes import HEADS, Head

BASE, DTYPES = "bfloat16", {"int8": jnp.int8, "float8": jnp.float8_e4m3fn}
TARGET = 1.75


@partial(jax.jit, static_argnames=("head", "dtype"))
def exact_table(key: jax.Array, head: Head, dtype) -> gumbeljax.QuantizedHead:
    """Entries in {-1, 0, 1} and powers of two as scales: with such an h, logits are exact in any order of summation."""
    entries, scales = jax.random.split(key)
    q = jax.random.randint(entries, (head.vocab, head.d_model), -1, 2, jnp.int8)
    exponent = jax.random.randint(scales, (head.vocab,), -1, 2) - round(np.log2(head.d_model**0.5 / 3))
    return gumbeljax.QuantizedHead(q.astype(dtype), jnp.exp2(exponent.astype(jnp.float32)))


def check_tokens(head: Head, rows: int, dtype, batches: int = 4) -> int:
    """Raises unless `sample` draws the tokens of implementation="xla" on exact inputs; returns how many were compared."""
    h_key, w_key, key = jax.random.split(jax.random.key(0), 3)
    w = exact_table(w_key, head, dtype)
    for i in range(batches):
        h = jax.random.randint(jax.random.fold_in(h_key, i), (rows, head.d_model), -1, 2).astype(jnp.bfloat16)
        keys = jax.random.split(jax.random.fold_in(key, i), rows)
        tokens = gumbeljax.sample(h, w, keys)
        if not (tokens >= 0).all() or not np.array_equal(tokens, gumbeljax.sample(h, w, keys, implementation="xla")):
            raise SystemExit(f'{head.name}, {rows} rows, {jnp.dtype(dtype).name}: tokens differ from implementation="xla": '
                             "nothing was timed")
    return batches * rows


@partial(jax.jit, static_argnames="head")
def normal_table(key: jax.Array, head: Head) -> jax.Array:
    return (jax.random.normal(key, (head.vocab, head.d_model), jnp.bfloat16) * (2 / head.d_model**0.5)).astype(jnp.bfloat16)


def measure(head: Head, rows: int, names: list[str], *, iterations: int, rounds: int) -> dict[str, Any]:
    """One row of the table."""
    compared = {name: check_tokens(head, rows, DTYPES[name]) for name in names}
    h = jax.random.normal(jax.random.key(1), (rows, head.d_model), jnp.bfloat16)
    keys = jax.random.split(jax.random.key(2), rows)
    whole = normal_table(jax.random.key(3), head)
    tables = {BASE: whole, **{name: gumbeljax.quantize_head(whole, DTYPES[name]) for name in names}}

    def step(carry):
        h, w, keys = carry
        return harness.depend(h, gumbeljax.sample(h, w, keys)), w, keys

    samples = {name: harness.time_inside_jit(step, (h, w, keys), iterations=iterations, rounds=rounds)
               for name, w in tables.items()}
    return {
        "head": head._asdict(), "rows": rows, "tokens_compared": compared,
        "implementation": {name: gumbeljax.choose_implementation(h, w) for name, w in tables.items()},
        "bytes_of_w": {name: sum(x.nbytes for x in jax.tree.leaves(w)) for name, w in tables.items()},
        "seconds": {name: harness.summarize(s)._asdict() for name, s in samples.items()},
        "speedup": {name: harness.ratio(samples[BASE], samples[name])._asdict() for name in names},
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
    parser.add_argument("--iterations", type=int, default=50, help="calls inside one jitted loop (default 50)")
    parser.add_argument("--rounds", type=int, default=30, help="loops timed for each median (default 30)")
    parser.add_argument("--name", default="quantized", help="results/<name>.json is written (default quantized)")
    arguments = parser.parse_args()
    if jax.default_backend() != "gpu":
        parser.error("this benchmark is about GPUs, and jax sees none")
    cells = [(head, rows) for head in HEADS if head.name in arguments.heads for rows in arguments.rows]
    results = []
    for head, rows in track(cells, description="timing"):
        results.append(measure(head, rows, arguments.dtypes, iterations=arguments.iterations, rounds=arguments.rounds))
        harness.save(arguments.name, results, claim=__doc__.splitlines()[0], base=BASE)  # a long run may be cut short
    Console(width=120).print(table(results))


if __name__ == "__main__":
    main()
