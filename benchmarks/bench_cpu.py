"""The CPU claim: `gumbeljax.sample(h, w, key)` against `jax.random.categorical(key, h @ w.T)`, both jitted, in float32.

The time of `sample` is at most that of categorical in its default mode at 1 row, at most 0.8 of it at 8 and 64 rows.
Before anything is timed the laws are compared: `method="categorical"` token for token, the grouped law by a chi-square.
"""

import argparse
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

import gumbeljax
from benchmarks import harness, timing
from benchmarks.shapes import CPU_HEADS, CPU_ROWS, Head

SAMPLE = "sample"
LOW = "categorical"
HIGH = "categorical high"  # its mode="high": noise as exact as ours
MATMUL = "matmul"
TARGETS = {1: 1.0, 8: 0.8, 64: 0.8}  # rows: the largest allowed ratio of SAMPLE to LOW


def make_inputs(head: Head, rows: int, *, logit_std: float = 3.0, seed: int = 0) -> tuple[jax.Array, jax.Array]:
    """h [rows, d_model] and w [vocab, d_model], f32, whose logits spread about as a language model's do."""
    h_key, w_key = jax.random.split(jax.random.key(seed))
    h = jax.random.normal(h_key, (rows, head.d_model), jnp.float32)
    w = jax.random.normal(w_key, (head.vocab, head.d_model), jnp.float32)
    return h, w * (logit_std / head.d_model**0.5)


def contenders(h: jax.Array, w: jax.Array, key: jax.Array) -> dict[str, Callable[[], Any]]:
    """What takes turns; h, w and the key are arguments of the compiled functions, never constants."""
    functions = {
        SAMPLE: lambda h, w, key: gumbeljax.sample(h, w, key),
        LOW: lambda h, w, key: jax.random.categorical(key, h @ w.T),
        HIGH: lambda h, w, key: jax.random.categorical(key, h @ w.T, mode="high"),
        MATMUL: lambda h, w, key: h @ w.T,
    }
    return {name: functools.partial(jax.jit(function), h, w, key) for name, function in functions.items()}


def check_same_tokens(h: jax.Array, w: jax.Array, sample: Callable = gumbeljax.sample, *, num_keys: int = 4) -> int:
    """Raises unless `method="categorical"` gives categorical's tokens in both modes; returns how many were compared."""
    for mode in ("low", "high"):
        ours = jax.jit(lambda h, w, key, mode=mode: sample(h, w, key, method="categorical", mode=mode))
        theirs = jax.jit(lambda h, w, key, mode=mode: jax.random.categorical(key, h @ w.T, mode=mode))
        for key in jax.random.split(jax.random.key(1), num_keys):
            if not np.array_equal(ours(h, w, key), theirs(h, w, key)):
                raise SystemExit(f'method="categorical" differs from categorical(mode="{mode}"): nothing was timed')
    return 2 * num_keys * h.shape[0]


def check_law(
    head: Head, sample: Callable = gumbeljax.sample, *, num_draws: int = 16_384, rows: int = 256, num_bins: int = 32
) -> float:
    """p-value of a chi-square of `sample` against float64 softmax over bins of about equal mass; raises under 1e-4."""
    h, w = make_inputs(head, 1, seed=2)
    logits = np.asarray(w, np.float64) @ np.asarray(h[0], np.float64)
    order = np.argsort(logits)
    mass = np.exp(logits[order] - logits.max())
    mass /= mass.sum()
    bins = np.minimum((np.cumsum(mass) * num_bins).astype(int), num_bins - 1)
    bin_of = np.empty(head.vocab, int)
    bin_of[order] = bins
    draw = jax.jit(lambda h, w, keys: sample(h, w, keys))
    keys = jax.random.split(jax.random.key(3), (num_draws // rows, rows))
    tokens = np.concatenate([draw(jnp.repeat(h, rows, 0), w, k) for k in keys])
    expected = np.bincount(bins, mass, num_bins) * len(tokens)
    counts = np.bincount(bin_of[tokens], minlength=num_bins)
    used = expected > 0
    statistic = float(((counts[used] - expected[used]) ** 2 / expected[used]).sum())
    p = float(jax.scipy.special.gammaincc((used.sum() - 1) / 2, statistic / 2))
    if not p > 1e-4:
        raise SystemExit(f"the grouped law of gumbeljax.sample fails a chi-square (p = {p:.1e}): nothing was timed")
    return p


def measure(head: Head, rows: int, *, rounds: int) -> dict[str, Any]:
    """One row of the table."""
    h, w = make_inputs(head, rows)
    compared = check_same_tokens(h, w)
    samples = harness.interleave(contenders(h, w, jax.random.key(0)), rounds=rounds)
    return {
        "head": head._asdict(),
        "rows": rows,
        "tokens_compared": compared,
        "seconds": {name: timing.summarize(s)._asdict() for name, s in samples.items()},
        "ratio": {name: timing.ratio(s, samples[LOW])._asdict() for name, s in samples.items()},
        "target": TARGETS.get(rows),
    }


def table(results: list[dict[str, Any]]) -> Table:
    """Milliseconds, and the ratio to categorical in its default mode."""
    title = "LM head + sampling on a CPU, float32: median ms per call; ratio = sample / categorical (quartiles)"
    shown = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("head", "rows", *results[0]["seconds"], "ratio", "at most"):
        shown.add_column(column, justify="left" if column == "head" else "right", no_wrap=True)
    for row in results:
        head, ours, target = row["head"], row["ratio"][SAMPLE], row["target"]
        colour = "white" if target is None else "green" if ours["median"] <= target else "red"
        shown.add_row(
            head["name"],
            str(row["rows"]),
            *(f"{1e3 * t['median']:.1f}" for t in row["seconds"].values()),
            f"[{colour}]{ours['median']:.2f} ({ours['q25']:.2f}-{ours['q75']:.2f})[/]",
            "" if target is None else f"{target:.1f}",
        )
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_cpu", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20, help="turns that each contender takes (default 20)")
    parser.add_argument("--rows", type=int, nargs="+", default=list(CPU_ROWS), help="batch sizes (default 1 8 64)")
    names = [head.name for head in CPU_HEADS]
    parser.add_argument("--heads", nargs="+", choices=names, default=names, help="default: both")
    parser.add_argument("--name", default="cpu", help="results/<name>.json is written (default cpu)")
    arguments = parser.parse_args()
    if jax.default_backend() != "cpu":
        parser.error("this claim is about CPUs: run it with JAX_PLATFORMS=cpu")

    console = Console()
    if not console.is_terminal:
        console = Console(width=100)
    results, laws = [], {}
    for head in (head for head in CPU_HEADS if head.name in arguments.heads):
        with console.status(f"{head.name}: law"):
            laws[head.name] = check_law(head)
        for rows in arguments.rows:
            with console.status(f"{head.name}: {rows} rows"):
                results.append(measure(head, rows, rounds=arguments.rounds))
    console.print(table(results))
    compared = sum(row["tokens_compared"] for row in results)
    console.print(f'method="categorical" gave the tokens of jax.random.categorical: {compared} of {compared}')
    console.print("law of sample, chi-square:", ", ".join(f"p = {p:.2g} ({name})" for name, p in laws.items()))
    console.print(f"wrote {harness.save(arguments.name, results, claim=__doc__.splitlines()[0], base=LOW, law_p=laws)}")


if __name__ == "__main__":
    main()
