"""LM head + sampling on one GPU, bfloat16: `gumbeljax.sample(h, w, key)` against XLA's matmul, argmax and categorical.

Device time per call inside one jitted loop; the loops of a cell take turns. The floor of a cell is the larger of the matrix
product alone, measured in the cell, and the bytes of `w` over the best rate at which a reduction read a head in this run.
Before a cell is timed, the tokens of `sample` and of implementation="xla" are compared on a head whose logits are exact: all
must be equal. On the head that is timed, where sums round, the tokens that differ are counted.
"""

import argparse
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

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

SAMPLE, WITH_LOG_PROBS, LOG_PROB = "sample", "with log probs", "log_prob"
LOW, HIGH, ARGMAX, MATMUL = "categorical", "categorical high", "argmax", "matmul"
ALWAYS = (SAMPLE, LOW, MATMUL)


class Inputs(NamedTuple):
    """Of every contender; `tokens` are to be scored."""

    h: jax.Array
    w: jax.Array
    keys: jax.Array
    tokens: jax.Array


def logits_of(h, w):
    return jnp.matmul(h, w.T, preferred_element_type=jnp.float32)


CONTENDERS: dict[str, Callable[[Inputs], Any]] = {
    SAMPLE: lambda x: gumbeljax.sample(x.h, x.w, x.keys),
    WITH_LOG_PROBS: lambda x: gumbeljax.sample_with_log_probs(x.h, x.w, x.keys, temperature=0.7)[:3],
    LOG_PROB: lambda x: gumbeljax.log_prob(x.h, x.w, x.tokens),
    LOW: lambda x: jax.random.categorical(x.keys[0], logits_of(x.h, x.w)),
    HIGH: lambda x: jax.random.categorical(x.keys[0], logits_of(x.h, x.w), mode="high"),
    ARGMAX: lambda x: jnp.argmax(logits_of(x.h, x.w), axis=-1),
    # A slice of the product is enough for XLA to have to write all of it, and costs nothing to read.
    MATMUL: lambda x: logits_of(x.h, x.w)[:, 0],
}

# Ways to read `w` once; the best of them, on any head, is the read rate of a run.
READERS: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "sum": lambda w, x: jnp.sum(w + x, dtype=jnp.float32),
    "max": lambda w, x: jnp.max(w + x).astype(jnp.float32),
    "row sums": lambda w, x: jnp.max(jnp.sum(w + x, axis=1, dtype=jnp.float32)),
}


@partial(jax.jit, static_argnames="head")
def random_head(head: Head) -> jax.Array:
    """bf16 w whose logits spread about as a language model's do."""
    w = jax.random.normal(jax.random.key(1), (head.vocab, head.d_model), jnp.bfloat16)
    return w * jnp.bfloat16(2 / head.d_model**0.5)


@partial(jax.jit, static_argnames="head")
def exact_head(head: Head) -> jax.Array:
    """bf16 w of three values: with `exact_states` every logit is exact, in whatever order it is summed."""
    scale = 2.0 ** -np.round(np.log2(head.d_model**0.5 / 3))
    w = jax.random.randint(jax.random.key(2), (head.vocab, head.d_model), -1, 2, jnp.int8)
    return w.astype(jnp.bfloat16) * jnp.bfloat16(scale)


def exact_states(head: Head, rows: int) -> jax.Array:
    return jax.random.randint(jax.random.key(3), (rows, head.d_model), -1, 2).astype(jnp.bfloat16)


def inputs(head: Head, rows: int, w: jax.Array) -> Inputs:
    h = jax.random.normal(jax.random.key(4), (rows, head.d_model), jnp.bfloat16)
    tokens = jax.random.randint(jax.random.key(5), (rows,), 0, head.vocab)
    return Inputs(h, w, jax.random.split(jax.random.key(6), rows), tokens)


def best_read_rate(w: jax.Array, *, rounds: int) -> float:
    """Bytes a second of the fastest reader: its median."""
    iterations = timing.calls_per_loop(w.nbytes, 0)

    def step(x, w, reader):
        return harness.depend(x, reader(w, x))

    loops = {name: harness.jitted_loop(partial(step, reader=reader), jnp.bfloat16(0), w, iterations=iterations)
             for name, reader in READERS.items()}
    return w.nbytes / min(timing.summarize(s).median for s in timing.take_turns(loops, rounds=rounds).values())


def compiled_loop(f: Callable[[Inputs], Any], x: Inputs, iterations: int) -> Callable[[], Callable[[], float]]:
    """`harness.timed` of calls of f, each of which waits for the one before: the hidden states come from an elementwise kernel
    that reads its results, as in a model they come from the last norm."""
    def step(results, x):
        return f(x._replace(h=harness.depend(x.h, *jax.tree.leaves(results))))

    first = jax.tree.map(jnp.zeros_like, jax.eval_shape(f, x))
    loop = harness.compiled_loop(step, first, x, iterations=iterations)
    return lambda: harness.timed(loop, first, x, iterations=iterations)


class Cell(NamedTuple):
    """What is compiled for some rows of a head: draws, and for each contender a function that makes its loop ready."""

    x: Inputs
    iterations: int
    draw: Callable
    plain: Callable
    loops: dict[str, Callable[[], Callable[[], float]]]


def compile_cells(head: Head, all_rows: list[int], w: jax.Array, names: list[str]) -> dict[int, Cell]:
    """The cells of a head. Ours compile side by side; XLA's matrix products one by one, since XLA times candidates for them on
    the device, and those times must not disturb each other."""
    ours = {SAMPLE, WITH_LOG_PROBS, LOG_PROB}
    with ThreadPoolExecutor() as pool:
        waiting = {}
        for rows in all_rows:
            with harness.alone():
                x = jax.block_until_ready(inputs(head, rows, w))
            iterations = timing.calls_per_loop(w.nbytes, 2 * rows * w.size)
            draw = pool.submit(jax.jit(gumbeljax.sample).lower(*x[:3]).compile)
            loops = {name: pool.submit(compiled_loop, CONTENDERS[name], x, iterations) for name in names if name in ours}
            waiting[rows] = x, iterations, draw, loops
        cells = {}
        for rows, (x, iterations, draw, loops) in track(waiting.items(), description=f"{head.name}: compiling"):
            with harness.alone():
                plain = jax.jit(partial(gumbeljax.sample, implementation="xla")).lower(*x[:3]).compile()
            made = {name: compiled_loop(CONTENDERS[name], x, iterations) for name in names if name not in ours}
            made |= {name: loop.result() for name, loop in loops.items()}
            cells[rows] = Cell(x, iterations, draw.result(), plain, {name: made[name] for name in names})
    return cells


def measure(head: Head, rows: int, cell: Cell, exact_w: jax.Array, *, rounds: int) -> dict[str, Any]:
    """One row of the table, without its floor."""
    x = cell.x
    exact = exact_states(head, rows), exact_w, x.keys
    if not np.array_equal(cell.draw(*exact), cell.plain(*exact)):
        raise SystemExit(f'{head.name}, {rows} rows: tokens differ from implementation="xla": nothing was timed')
    differing = int(np.sum(np.asarray(cell.draw(*x[:3])) != np.asarray(cell.plain(*x[:3]))))
    samples = timing.take_turns({name: make() for name, make in cell.loops.items()}, rounds=rounds)
    temp = harness.temp_bytes(cell.draw)
    return {
        "head": head._asdict(), "rows": rows, "tokens_compared": rows, "tokens_differing_where_sums_round": differing,
        "implementation": gumbeljax.choose_implementation(x.h, x.w), "bytes_of_w": x.w.nbytes, "iterations": cell.iterations,
        "temp_bytes": temp, "temp_share_of_logits": temp / (4 * rows * head.vocab),
        "seconds": {name: timing.summarize(s)._asdict() for name, s in samples.items()},
        "ratio": {name: timing.ratio(s, samples[LOW])._asdict() for name, s in samples.items()},
    }


def with_floors(results: list[dict[str, Any]], read_rate: float) -> list[dict[str, Any]]:
    """The rows with their floors, from the best rate of a reader in the run."""
    return [{**row, "read_rate": read_rate, "floor": max(row["bytes_of_w"] / read_rate, row["seconds"][MATMUL]["median"])}
            for row in results]


def table(results: list[dict[str, Any]]) -> Table:
    """Microseconds, sample over the floor and over the product alone, and categorical over sample."""
    shown = Table(title="LM head + sampling, bfloat16: median us per call", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("head", "rows", *results[0]["seconds"], "runs", "memory", "/ floor", "/ matmul", "XLA /"):
        shown.add_column(column, justify="left" if column == "head" else "right", no_wrap=True)
    for row in results:
        seconds = {name: t["median"] for name, t in row["seconds"].items()}
        shown.add_row(row["head"]["name"], str(row["rows"]), *(f"{1e6 * t:.1f}" for t in seconds.values()),
                      row["implementation"], f"{100 * row['temp_share_of_logits']:.1f}%",
                      f"{seconds[SAMPLE] / row['floor']:.3f}", f"{seconds[SAMPLE] / seconds[MATMUL]:.3f}",
                      f"{seconds[LOW] / seconds[SAMPLE]:.2f}")
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_gpu", description=__doc__.splitlines()[0])
    heads = [head.name for head in HEADS]
    parser.add_argument("--heads", nargs="+", choices=heads, default=[head.name for head in GPU_HEADS])
    parser.add_argument("--rows", type=int, nargs="+", default=list(GPU_ROWS))
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS),
                        help="sample, categorical and matmul always take part")
    parser.add_argument("--rounds", type=int, default=30, help="loops timed for each median (default 30)")
    parser.add_argument("--name", default="gpu", help="results/<name>.json is written (default gpu)")
    arguments = parser.parse_args()
    if jax.default_backend() != "gpu":
        parser.error("this benchmark is about GPUs, and jax sees none")
    names = [name for name in CONTENDERS if name in {*arguments.contenders, *ALWAYS}]
    results, read_rate = [], 0.0
    for head in (head for head in HEADS if head.name in arguments.heads):
        with harness.alone():
            w, exact_w = jax.block_until_ready((random_head(head), exact_head(head)))
            read_rate = max(read_rate, best_read_rate(w, rounds=arguments.rounds))
        cells = compile_cells(head, arguments.rows, w, names)
        for rows, cell in track(cells.items(), description=f"{head.name}: timing"):
            with harness.alone():
                results.append(measure(head, rows, cell, exact_w, rounds=arguments.rounds))
            # After every cell: a long run may be cut short.
            harness.save(arguments.name, with_floors(results, read_rate), claim=__doc__.splitlines()[0], base=LOW)
        del w, exact_w, cells, cell
    Console(width=170).print(table(with_floors(results, read_rate)))
    print(f"best read rate {read_rate / 1e12:.2f} TB/s")


if __name__ == "__main__":
    main()
