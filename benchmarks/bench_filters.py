"""`sample` with top_k, top_p or min_p beside `sample` without.

On a CPU, the head of SmolLM2-135M with the hidden states of a real text, and random ones of that size whose logits spread with
a standard deviation of 2, in float32: the claim is at most 1.5 times the time.
Before anything is timed the kept set and the tokens are compared with a sort in float64. On a GPU, see
`benchmarks.gpu_filters`.
"""

import argparse
import functools

import jax
import jax.numpy as jnp
import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

import gumbeljax
from benchmarks import gpu_filters, harness, timing
from benchmarks.bench_gpu import random_head
from benchmarks.shapes import HEADS, QWEN3_1_7B, QWEN3_8B

TEXT = "The ship left the harbour at dawn, and nobody on the quay could say when, or whether, it would come back."
CASES = {
    "none": {}, "top_k=50": {"top_k": 50}, "top_p=0.9": {"top_p": 0.9}, "top_k=50, top_p=0.9": {"top_k": 50, "top_p": 0.9},
    "min_p=0.05": {"min_p": 0.05},
}
TARGET = 1.5


def hidden_states() -> tuple[jax.Array, jax.Array]:
    """(h [tokens, d_model], w) of the text."""
    from gumbeljax import models  # needs flax, which a machine that times GPUs may not have

    model, tokenizer = models.load(models.find_smollm2())
    decode_fn, params = models.as_decode_fn(model)
    tokens = jnp.asarray([tokenizer.encode(TEXT)])
    positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    h, _ = decode_fn(params, tokens, positions, model.init_cache(1, tokens.shape[1]))
    return h[0], model.head()


def random_states(rows: int, like: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(h [rows, d_model], w) of a head like that one."""
    w = jax.random.normal(jax.random.key(1), like.shape) * (2 / like.shape[1] ** 0.5)
    return jax.random.normal(jax.random.key(2), (rows, like.shape[1])), w


def expected_kept(logits: np.ndarray, top_k=None, top_p=None, min_p=None) -> np.ndarray:
    """The kept set of each row, by a sort in float64."""
    order = np.argsort(-logits, axis=1, kind="stable")
    mass = np.exp(logits - logits.max(1, keepdims=True))
    ranked = np.take_along_axis(mass, order, axis=1)
    keep = np.ones_like(ranked, bool)
    if top_k is not None:
        keep[:, top_k:] = False
    if top_p is not None:
        before = np.cumsum(ranked * keep, axis=1) - ranked * keep
        keep &= before < top_p * (ranked * keep).sum(1, keepdims=True)
    if min_p is not None:
        keep &= ranked >= min_p
    out = np.zeros_like(keep)
    np.put_along_axis(out, order, keep, axis=1)
    return out


def check(h: jax.Array, w: jax.Array, keys: jax.Array, options: dict) -> int:
    """Raises unless the kept sets are those of a sort and every token lies in its set; the size of the largest set."""
    kept = np.asarray(gumbeljax.kept_tokens(h, w, **options))
    expected = expected_kept(np.asarray(h, np.float64) @ np.asarray(w, np.float64).T, **options)
    tokens = np.asarray(gumbeljax.sample(h, w, keys, **options))
    if (kept != expected).sum() > 1 or not kept[np.arange(len(tokens)), tokens].all():  # one: a mass within rounding of p
        raise SystemExit(f"the kept set under {options} is not that of a sort: nothing was timed")
    return int(kept.sum(1).max())


def parse() -> argparse.Namespace:
    on_gpu = jax.default_backend() == "gpu"
    rows, name = ([1, 16, 64, 128, 256], "filters-gpu") if on_gpu else ([1, 16], "filters-cpu")
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_filters", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20, help="turns that each contender takes (default 20)")
    parser.add_argument("--rows", type=int, nargs="+", default=rows, help="batch sizes")
    parser.add_argument("--name", default=name, help=f"results/<name>.json is written (default {name})")
    gpu = parser.add_argument_group("on a GPU")
    heads = [QWEN3_1_7B.name, QWEN3_8B.name]
    gpu.add_argument("--heads", nargs="+", choices=[head.name for head in HEADS], default=heads)
    gpu.add_argument("--filters", nargs="+", choices=gpu_filters.FILTERS, default=list(gpu_filters.FILTERS))
    kinds = [*gpu_filters.NUCLEI, *gpu_filters.WORST]
    gpu.add_argument("--logits", nargs="+", choices=kinds, default=kinds)
    gpu.add_argument("--processors", action="store_true", help="with a mask for each row and a bias")
    gpu.add_argument("--no-idioms", action="store_true", help="without lax.top_k, sort and mask idioms, which take long")
    return parser.parse_args()


def on_gpu(arguments: argparse.Namespace) -> None:
    results = []
    for head in (head for head in HEADS if head.name in arguments.heads):
        with harness.alone():
            w = jax.block_until_ready(random_head(head))
        for rows in arguments.rows:
            for names in arguments.filters:
                results += gpu_filters.measure(head, rows, w, names, arguments.logits, with_processors=arguments.processors,
                                               idioms=not arguments.no_idioms, rounds=arguments.rounds)
                # After every cell: a long run may be cut short.
                harness.save(arguments.name, results, claim=gpu_filters.__doc__.splitlines()[0], base=gpu_filters.SAMPLE)
    Console(width=150).print(gpu_filters.table(results))


def main() -> None:
    arguments = parse()
    if jax.default_backend() == "gpu":
        on_gpu(arguments)
    else:
        on_cpu(arguments)


def on_cpu(arguments: argparse.Namespace) -> None:
    console = Console(width=100)
    with console.status("the model, the text"):
        all_h, w = hidden_states()
    if max(arguments.rows) > len(all_h):
        raise SystemExit(f"--rows must be at most {len(all_h)}, the tokens of the text")
    heads = {"text": (all_h, w), "random": random_states(len(all_h), w)}
    functions = {
        name: jax.jit(lambda h, w, keys, options=options: gumbeljax.sample(h, w, keys, **options))
        for name, options in CASES.items()
    }
    results = []
    for logits, (all_h, w) in heads.items():
        for rows in arguments.rows:
            h, keys = all_h[-rows:], jax.random.split(jax.random.key(0), rows)
            with console.status(f"{logits}, {rows} rows: kept sets"):
                largest = {name: check(h, w, keys, options) for name, options in CASES.items()}
            calls = {name: functools.partial(function, h, w, keys) for name, function in functions.items()}
            with console.status(f"{logits}, {rows} rows: times"):
                samples = harness.interleave(calls, rounds=arguments.rounds)
            results.append({
                "logits": logits, "rows": rows, "largest_kept_set": largest, "target": TARGET,
                "seconds": {name: timing.summarize(s)._asdict() for name, s in samples.items()},
                "ratio": {name: timing.ratio(s, samples["none"])._asdict() for name, s in samples.items()},
            })
    shown = Table(title="sample on SmolLM2's head, CPU, float32: ms per call, and ratio to no filter (quartiles)",
                  box=box.SIMPLE_HEAD)
    for column in ("logits", "rows", "filters", "largest kept set", "ms", "ratio"):
        shown.add_column(column, justify="left" if column in ("logits", "filters") else "right")
    for row in results:
        for name, ratio in row["ratio"].items():
            colour = "green" if ratio["median"] <= TARGET else "red"
            milliseconds = f"{1e3 * row['seconds'][name]['median']:.2f}"
            shown.add_row(row["logits"], str(row["rows"]), name, str(row["largest_kept_set"][name]), milliseconds,
                          f"[{colour}]{ratio['median']:.2f} ({ratio['q25']:.2f}-{ratio['q75']:.2f})[/]")
    console.print(shown)
    console.print(f"wrote {harness.save(arguments.name, results, claim=__doc__.splitlines()[0])}")


if __name__ == "__main__":
    main()
