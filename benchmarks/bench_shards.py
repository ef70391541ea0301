"""The work of one shard of a cut head, on one GPU: what `gumbeljax.sample` does on each of n devices, but for the collective.

The shard draws from its V / n rows of `w` and merges n copies of what it says, where it would hear of n devices. Device time
per call inside one jitted loop; the loops of a cell take turns. The floor of a cell is the larger of the matrix product with
the shard alone, measured in the cell, and the bytes of the shard over the best rate at which a reduction read the head in this
run. The bar is 1.08 of the floor and 6 us. Before a cell is timed, its tokens are compared with implementation="xla" on a head
whose logits are exact: all must be equal.
"""

import argparse
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from rich import box
from rich.console import Console
from rich.table import Table

import gumbeljax
from benchmarks import harness, timing
from benchmarks.bench_gpu import MATMUL, best_read_rate, exact_head, exact_states, inputs, logits_of, random_head
from benchmarks.bench_sharded import SAMPLE, Inputs, Program, no_tokens, step
from benchmarks.shapes import HEADS, QWEN3_8B, Head
from gumbeljax import _call, _keys, _shards
from pallas_kernels.finish import said

SHARD = "shard"
SHARE, SLACK = 1.08, 6e-6  # of the bar


def work(x: Inputs, shards: int):
    """Tokens by the functions that `gumbeljax.sample` runs inside `shard_map`, on the first of `shards` shards."""
    operands, config, batch_shape = _call.prepare(x.h, x.w)
    words = _keys.row_keys(x.keys, batch_shape)
    piece = _shards.local_piece(operands, (*words, jnp.zeros_like(words[0])), config, None, False)
    numbers = said(piece, jnp.int32(0), False)
    words = lax.optimization_barrier(_shards.words_of(piece, numbers))  # to be gathered; the merge reads it `shards` times
    return _shards.merge_draws(*_shards.unpack(jnp.stack([words] * shards), numbers), t=operands.t).token


def contenders(shards: int) -> dict[str, Any]:
    """Functions of `Inputs`: the shard, the plain call with as many rows of w, and its product."""
    return {SHARD: partial(work, shards=shards), SAMPLE: lambda x: gumbeljax.sample(x.h, x.w, x.keys),
            MATMUL: lambda x: logits_of(x.h, x.w)[:, 0]}


def first_of(name: str, x: Inputs):
    """What a loop begins with: the product alone yields numbers, not tokens."""
    return jnp.zeros(x.h.shape[0]) if name == MATMUL else no_tokens(x)


def compile_loop(name: str, f, x: Inputs, iterations: int | None) -> Program:
    iterations = iterations or timing.calls_per_loop(x.w.nbytes, 2 * x.h.shape[0] * x.w.size, seconds=0.03)
    return Program(harness.compiled_loop(partial(step, f=f), first_of(name, x), x, iterations=iterations), iterations, [])


def check(program: Program, exact: Inputs, where: str) -> None:
    """Raises unless the shard draws the tokens of the plain implementation."""
    tokens = np.asarray(program.loop(no_tokens(exact), exact))
    if not np.array_equal(tokens, gumbeljax.sample(exact.h, exact.w, exact.keys, implementation="xla")):
        raise SystemExit(f'{where}: tokens differ from implementation="xla": nothing was timed')


def measure(head: Head, shards: int, programs: dict[str, Program], x: Inputs, read_rate: float, *,
            rounds: int) -> dict[str, Any]:
    """One row of the table."""
    loops = {name: harness.timed(p.loop, first_of(name, x), x, iterations=p.iterations) for name, p in programs.items()}
    samples = timing.take_turns(loops, rounds=rounds)
    seconds = {name: timing.summarize(s)._asdict() for name, s in samples.items()}
    floor = max(x.w.nbytes / read_rate, seconds[MATMUL]["median"])
    return {"head": head._asdict(), "rows": x.h.shape[0], "shards": shards, "tokens_compared": x.h.shape[0],
            "implementation": gumbeljax.choose_implementation(x.h, x.w), "bytes_of_w": x.w.nbytes,
            "iterations": programs[SHARD].iterations, "read_rate": read_rate, "floor": floor,
            "bar": SHARE * floor + SLACK, "seconds": seconds}


def of_head(head: Head, rows: list[int], sizes: list[int], *, rounds: int, iterations: int | None = None):
    """Rows of the table, one for each number of shards and of rows: all programs are compiled first, in threads."""
    with harness.alone():
        w, exact_w = random_head(head), exact_head(head)
        read_rate = best_read_rate(w, rounds=rounds)
        cells = {}
        for n in sizes:
            first, exact_first = (jnp.array(whole[:head.vocab // n]) for whole in (w, exact_w))
            for r in rows:
                x = inputs(head, r, first)
                cells[n, r] = jax.block_until_ready((Inputs(x.h, first, x.keys),
                                                     Inputs(exact_states(head, r), exact_first, x.keys)))
    with ThreadPoolExecutor(8) as pool:
        compiled = {cell: {name: pool.submit(compile_loop, name, f, x, iterations) for name, f in contenders(cell[0]).items()}
                    for cell, (x, _) in cells.items()}
        compiled = {cell: {name: program.result() for name, program in here.items()} for cell, here in compiled.items()}
    for (n, r), (x, exact) in cells.items():
        with harness.alone():
            check(compiled[n, r][SHARD], exact, f"{head.name} / {n}, {r} rows")
            row = measure(head, n, compiled[n, r], x, read_rate, rounds=rounds)
        yield row


def table(results: list[dict[str, Any]]) -> Table:
    """Microseconds; "/ floor" is what is left of the time without 6 us, over the floor."""
    shown = Table(title="The work of one shard, bfloat16: median us per call", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("head", "shards", "rows", "runs", *results[0]["seconds"], "floor", "bar", "/ floor"):
        shown.add_column(column, justify="left" if column == "head" else "right", no_wrap=True)
    for row in results:
        t = row["seconds"][SHARD]["median"]
        shown.add_row(row["head"]["name"], str(row["shards"]), str(row["rows"]), row["implementation"],
                      *(f"{1e6 * s['median']:.1f}" for s in row["seconds"].values()), f"{1e6 * row['floor']:.1f}",
                      f"{1e6 * row['bar']:.1f}", f"{(t - SLACK) / row['floor']:.3f}{' over' * (t > row['bar'])}")
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_shards", description=__doc__.splitlines()[0])
    parser.add_argument("--heads", nargs="+", choices=[head.name for head in HEADS], default=[QWEN3_8B.name])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--shards", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--rounds", type=int, default=20, help="loops timed for each median (default 20)")
    parser.add_argument("--iterations", type=int, help="of a timed loop (default: what fills about 30 ms on a GPU)")
    parser.add_argument("--name", default="shards", help="results/<name>.json is written (default shards)")
    arguments = parser.parse_args()
    results, start = [], time.perf_counter()
    for head in (head for head in HEADS if head.name in arguments.heads):
        if wrong := [n for n in arguments.shards if head.vocab % n]:
            parser.error(f"--shards must divide the vocabulary of {head.name}, {head.vocab}; got {wrong}")
        for row in of_head(head, arguments.rows, arguments.shards, rounds=arguments.rounds, iterations=arguments.iterations):
            results.append(row)
            # After every cell: a long run may be cut short.
            harness.save(arguments.name, results, claim=__doc__.splitlines()[0], base=MATMUL)
            print(f"{head.name} / {row['shards']}, {row['rows']} rows: {time.perf_counter() - start:.0f} s so far", flush=True)
    Console(width=150).print(table(results))
    print(f"best read rate {results[-1]['read_rate'] / 1e12:.2f} TB/s")


if __name__ == "__main__":
    main()
