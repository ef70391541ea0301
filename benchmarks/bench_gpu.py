"""LM head + sampling on one GPU, bfloat16: `gumbeljax.sample(h, w, key)` against XLA's matmul and categorical.

Device time per call inside one jitted loop. The floor of a cell is the larger of reading `w` (by an XLA sum, in the same
run) and the matrix product alone. Before a cell is timed, the tokens of `sample` and of implementation="xla" are compared
on a head whose logits are exact: all must be equal.
"""

import argparse
from collections.abc import Callable
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
from benchmarks.shapes import HEADS, LLAMA3_70B, QWEN3_1_7B, QWEN3_8B, Head

SAMPLE, WITH_LOG_PROBS, LOW, HIGH, MATMUL, READ = (
    "sample", "with log probs", "categorical", "categorical high", "matmul", "read w")
GPU_HEADS = (QWEN3_1_7B, QWEN3_8B, LLAMA3_70B)
GPU_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def logits_of(h, w):
    return jnp.matmul(h, w.T, preferred_element_type=jnp.float32)


CONTENDERS: dict[str, Callable] = {
    SAMPLE: lambda h, w, keys: gumbeljax.sample(h, w, keys),
    WITH_LOG_PROBS: lambda h, w, keys: sum(gumbeljax.sample_with_log_probs(h, w, keys, temperature=0.7)[:3]),
    LOW: lambda h, w, keys: jax.random.categorical(keys[0], logits_of(h, w)),
    HIGH: lambda h, w, keys: jax.random.categorical(keys[0], logits_of(h, w), mode="high"),
    # A slice of the product is enough for XLA to have to write all of it, and costs nothing to read.
    MATMUL: lambda h, w, keys: logits_of(h, w)[:, 0],
    READ: lambda h, w, keys: jnp.sum(w + h[0, 0] * 0, dtype=jnp.float32)[None],
}


def check_tokens(head: Head, rows: int) -> int:
    """Raises unless `sample` draws the tokens of implementation="xla" on exact inputs; returns how many were compared."""
    h_key, w_key, key = jax.random.split(jax.random.key(0), 3)
    scale = 2.0 ** -np.round(np.log2(head.d_model**0.5 / 3))
    h = jax.random.randint(h_key, (rows, head.d_model), -1, 2).astype(jnp.bfloat16)
    w = (jax.random.randint(w_key, (head.vocab, head.d_model), -1, 2) * scale).astype(jnp.bfloat16)
    keys = jax.random.split(key, rows)
    if not np.array_equal(gumbeljax.sample(h, w, keys), gumbeljax.sample(h, w, keys, implementation="xla")):
        raise SystemExit(f'{head.name}, {rows} rows: tokens differ from implementation="xla": nothing was timed')
    return rows


def measure(head: Head, rows: int, names: list[str], *, iterations: int, rounds: int) -> dict[str, Any]:
    """One row of the table."""
    compared = check_tokens(head, rows)
    h_key, w_key = jax.random.split(jax.random.key(1))
    h = jax.random.normal(h_key, (rows, head.d_model), jnp.bfloat16)
    w = (jax.random.normal(w_key, (head.vocab, head.d_model)) * 2 / head.d_model**0.5).astype(jnp.bfloat16)
    keys = jax.random.split(jax.random.key(2), rows)

    def step(carry, f):
        h, w, keys = carry
        return harness.depend(h, f(h, w, keys)), w, keys

    samples = {name: harness.time_inside_jit(partial(step, f=CONTENDERS[name]), (h, w, keys), iterations=iterations,
                                             rounds=rounds) for name in names}
    floor = max(np.median(samples[MATMUL]), np.median(samples[READ]))
    return {
        "head": head._asdict(), "rows": rows, "tokens_compared": compared,
        "implementation": gumbeljax.choose_implementation(h, w), "floor": floor, "bytes_of_w": w.nbytes,
        "seconds": {name: harness.summarize(s)._asdict() for name, s in samples.items()},
        "ratio": {name: harness.ratio(s, samples[LOW])._asdict() for name, s in samples.items()},
    }


def table(results: list[dict[str, Any]]) -> Table:
    """Microseconds, sample over the floor, and categorical over sample."""
    shown = Table(title="LM head + sampling, bfloat16: median us per call", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("head", "rows", *results[0]["seconds"], "runs", "sample / floor", "categorical / sample"):
        shown.add_column(column, justify="left" if column == "head" else "right", no_wrap=True)
    for row in results:
        seconds = {name: t["median"] for name, t in row["seconds"].items()}
        shown.add_row(row["head"]["name"], str(row["rows"]), *(f"{1e6 * t:.1f}" for t in seconds.values()),
                      row["implementation"], f"{seconds[SAMPLE] / row['floor']:.3f}", f"{seconds[LOW] / seconds[SAMPLE]:.2f}")
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_gpu", description=__doc__.splitlines()[0])
    heads = [head.name for head in HEADS]
    parser.add_argument("--heads", nargs="+", choices=heads, default=[head.name for head in GPU_HEADS])
    parser.add_argument("--rows", type=int, nargs="+", default=list(GPU_ROWS))
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS),
                        help="sample, categorical, matmul and read w always take part")
    parser.add_argument("--iterations", type=int, default=50, help="calls inside one jitted loop (default 50)")
    parser.add_argument("--rounds", type=int, default=30, help="loops timed for each median (default 30)")
    parser.add_argument("--name", default="gpu", help="results/<name>.json is written (default gpu)")
    arguments = parser.parse_args()
    if jax.default_backend() != "gpu":
        parser.error("this benchmark is about GPUs, and jax sees none")
    names = [name for name in CONTENDERS if name in {*arguments.contenders, SAMPLE, LOW, MATMUL, READ}]
    cells = [(head, rows) for head in HEADS if head.name in arguments.heads for rows in arguments.rows]
    results = []
    for head, rows in track(cells, description="timing"):
        results.append(measure(head, rows, names, iterations=arguments.iterations, rounds=arguments.rounds))
        harness.save(arguments.name, results, claim=__doc__.splitlines()[0], base=LOW)  # a long run may be cut short
    Console(width=150).print(table(results))


if __name__ == "__main__":
    main()
