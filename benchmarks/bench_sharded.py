"""`gumbeljax.sample` with `w` cut over the devices of one host, against gathering the logits and `jax.random.categorical`.

Every device has its part of the vocabulary; a contender ends with the same tokens on all of them. On one device it is the plain
call, with no mesh. Times are of many draws inside one jitted loop; all numbers of devices and all contenders of a cell take
turns. Before a cell is timed, every contender's tokens on several devices are compared with its own on one, on a head whose
logits are exact in any order of summation: all must be equal. Bytes are those of the results of the collectives in one
iteration of the compiled loop, on one device; efficiency is time on one device over n times that on n.
"""

import argparse
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rich import box
from rich.console import Console
from rich.table import Table

import gumbeljax
from benchmarks import harness, timing
from benchmarks.bench_gpu import exact_head, exact_states, logits_of, random_head
from benchmarks.collectives import executed
from benchmarks.shapes import HEADS, LLAMA3_70B, QWEN3_8B, Head

AXIS = "tp"
SAMPLE, GATHER, GATHER_16, COMPILER = "sample", "gather logits", "gather bfloat16 logits", "categorical, cut by XLA"
ROWS = (1, 16, 64, 128, 256)
DEVICES = (1, 2, 4, 8)


class Inputs(NamedTuple):
    """Of every contender: h `[rows, d_model]` and keys `[rows]` on every device, w `[vocab, d_model]` cut over them."""

    h: jax.Array
    w: jax.Array
    keys: jax.Array


SPECS = Inputs(P(), P(AXIS), P())


def draw(x: Inputs, axis: str | None):
    return gumbeljax.sample(x.h, x.w, x.keys, axis_name=axis)


def gather(x: Inputs, axis: str | None, dtype=jnp.float32):
    logits = logits_of(x.h, x.w).astype(dtype)
    if axis is not None:  # as bits, or XLA may widen before it sends
        bits = lax.bitcast_convert_type(logits, f"uint{8 * logits.dtype.itemsize}")
        logits = lax.bitcast_convert_type(lax.all_gather(bits, axis, axis=1, tiled=True, to="invarying"), dtype)
    return jax.random.categorical(x.keys[0], logits.astype(jnp.float32))


ON_SHARD: dict[str, Callable[[Inputs, str | None], jax.Array]] = {
    SAMPLE: draw, GATHER: gather, GATHER_16: partial(gather, dtype=jnp.bfloat16)}
CONTENDERS = (*ON_SHARD, COMPILER)


def tokens_of(name: str, mesh: Mesh) -> Callable[[Inputs], jax.Array]:
    """A contender as a function of whole arrays."""
    if mesh.size == 1 or name == COMPILER:
        return partial(ON_SHARD.get(name, gather), axis=None)
    return jax.shard_map(partial(ON_SHARD[name], axis=AXIS), mesh=mesh, in_specs=(SPECS,), out_specs=P())


def meshes_of(sizes: list[int]) -> dict[int, Mesh]:
    """Meshes over the first devices of the host."""
    return {n: Mesh(np.array(jax.devices()[:n]), (AXIS,), axis_types=(AxisType.Auto,)) for n in sizes}


def put(x: Inputs, mesh: Mesh) -> Inputs:
    return jax.tree.map(lambda a, spec: jax.device_put(a, NamedSharding(mesh, spec)), x, SPECS)


def step(tokens, x: Inputs, f):
    """One draw, after that of the last tokens: h comes from an elementwise kernel, as in a model from the last norm."""
    return f(x._replace(h=harness.depend(x.h, tokens)))


def no_tokens(x: Inputs):
    """What a loop begins with, placed like h."""
    return jax.device_put(np.full(x.h.shape[0], -1, np.int32), x.h.sharding)


class Program(NamedTuple):
    """A compiled loop, its iterations, and the collectives of one of them: (kind, bytes, how many)."""

    loop: Callable[..., Any]
    iterations: int
    collectives: list[tuple[str, int, float]]

    @property
    def num_bytes(self) -> int:
        return round(sum(size * count for _, size, count in self.collectives))


def compile_loop(name: str, mesh: Mesh, x: Inputs, iterations: int | None) -> Program:
    flops = 2 * x.h.shape[0] * x.w.size
    iterations = iterations or timing.calls_per_loop(x.w.nbytes // mesh.size, flops // mesh.size, seconds=0.03)
    loop = harness.compiled_loop(partial(step, f=tokens_of(name, mesh)), no_tokens(x), x, iterations=iterations)
    return Program(loop, iterations, [(*c, count / iterations) for c, count in executed(loop).items()])


def check(programs: dict[tuple[int, str], Program], exact: dict[int, Inputs], where: str) -> None:
    """Raises unless every contender draws the tokens of one device."""
    alone = {}
    for (n, name), program in programs.items():  # one device comes first
        tokens = np.asarray(program.loop(no_tokens(exact[n]), exact[n]))
        if not np.array_equal(tokens, alone.setdefault(name, tokens)) or tokens.min() < 0:
            raise SystemExit(f"{where}: tokens of {name!r} on {n} devices differ from those on one: nothing was timed")


def measure(head: Head, programs: dict[tuple[int, str], Program], x: dict[int, Inputs], *, rounds: int) -> list[dict[str, Any]]:
    """Rows of the table, one for each number of devices."""
    loops = {f"{n} {name}": harness.timed(p.loop, no_tokens(x[n]), x[n], iterations=p.iterations)
             for (n, name), p in programs.items()}
    samples = timing.take_turns(loops, rounds=rounds)
    results = []
    for n, own in x.items():
        names = [name for devices, name in programs if devices == n]
        at = {name: samples[f"{n} {name}"] for name in names}
        speedup = {name: timing.ratio(samples[f"1 {name}"], s) for name, s in at.items()}
        on_first = [a.addressable_shards[0].data for a in (own.h, own.w)]
        results.append({
            "head": head._asdict(), "rows": own.h.shape[0], "devices": n, "tokens_compared": own.h.shape[0],
            "implementation": gumbeljax.choose_implementation(*on_first),
            "iterations": programs[n, SAMPLE].iterations,
            "collectives": {name: programs[n, name].collectives for name in names},
            "collective_bytes": {name: programs[n, name].num_bytes for name in names},
            "seconds": {name: timing.summarize(s)._asdict() for name, s in at.items()},
            "speedup": {name: s._asdict() for name, s in speedup.items()},
            "efficiency": {name: s.median / n for name, s in speedup.items()},
            "over_sample": {name: timing.ratio(s, at[SAMPLE])._asdict() for name, s in at.items()},
        })
    return results


def of_head(head: Head, rows: list[int], sizes: list[int], names: list[str], *, rounds: int, iterations: int | None = None):
    """Rows of the table, a list for each number of rows: all programs are compiled first, in threads."""
    meshes, keys = meshes_of(sizes), jax.random.split(jax.random.key(6), max(rows))

    def cut(w):
        return {n: jax.device_put(w, NamedSharding(mesh, SPECS.w)) for n, mesh in meshes.items()}

    def inputs(h, ws, r):
        return {n: put(Inputs(h, ws[n], keys[:r]), mesh) for n, mesh in meshes.items()}

    ws, exact_ws = cut(random_head(head)), cut(exact_head(head))
    random = {r: inputs(jax.random.normal(jax.random.key(4), (r, head.d_model), jnp.bfloat16), ws, r) for r in rows}
    with ThreadPoolExecutor(8) as pool:
        compiled = {r: {(n, name): pool.submit(compile_loop, name, mesh, random[r][n], iterations)
                        for n, mesh in meshes.items() for name in names} for r in rows}
        compiled = {r: {cell: program.result() for cell, program in of_rows.items()} for r, of_rows in compiled.items()}
    for r in rows:
        check(compiled[r], inputs(exact_states(head, r), exact_ws, r), f"{head.name}, {r} rows")
        yield measure(head, compiled[r], random[r], rounds=rounds)


def table(results: list[dict[str, Any]]) -> Table:
    """Microseconds, what `sample` gains by devices and over the gathered logits, and bytes moved."""
    shown = Table(title="w cut over the devices, bfloat16: median us per call", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    names = list(dict.fromkeys(name for row in results for name in row["seconds"]))
    for column in ("head", "rows", "devices", "runs", *names, "speed-up", "efficiency", "gather /", "bytes", "gather's"):
        shown.add_column(column, justify="left" if column == "head" else "right")
    for row in results:
        shown.add_row(row["head"]["name"], str(row["rows"]), str(row["devices"]), row["implementation"],
                      *(f"{1e6 * row['seconds'][name]['median']:.1f}" for name in names),
                      f"{row['speedup'][SAMPLE]['median']:.2f}", f"{row['efficiency'][SAMPLE]:.0%}",
                      f"{row['over_sample'][GATHER]['median']:.2f}",
                      *(f"{row['collective_bytes'][name]:,}" for name in (SAMPLE, GATHER)))
    return shown


def main() -> None:
    there = jax.device_count()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_sharded", description=__doc__.splitlines()[0])
    parser.add_argument("--heads", nargs="+", choices=[head.name for head in HEADS], default=[QWEN3_8B.name, LLAMA3_70B.name])
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    parser.add_argument("--devices", type=int, nargs="+", default=[n for n in DEVICES if n <= there],
                        help="1 always takes part (default: 1, 2, 4 and 8, as far as they are there)")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS),
                        help="sample and the gathered logits always take part")
    parser.add_argument("--rounds", type=int, default=15, help="loops timed for each median (default 15)")
    parser.add_argument("--iterations", type=int, help="of a timed loop (default: what fills about 30 ms on a GPU)")
    parser.add_argument("--name", default="sharded", help="results/<name>.json is written (default sharded)")
    arguments = parser.parse_args()
    sizes = sorted({1, *arguments.devices})
    names = [name for name in CONTENDERS if name in {*arguments.contenders, SAMPLE, GATHER}]
    if sizes[-1] > there:
        parser.error(f"--devices must be at most the {there} that jax sees; got {sizes[-1]}")
    results, start = [], time.perf_counter()
    for head in (head for head in HEADS if head.name in arguments.heads):
        if wrong := [n for n in sizes if head.vocab % n]:
            parser.error(f"--devices must divide the vocabulary of {head.name}, {head.vocab}; got {wrong}")
        for rows in of_head(head, arguments.rows, sizes, names, rounds=arguments.rounds, iterations=arguments.iterations):
            results += rows
            # After every cell: a long run may be cut short.
            harness.save(arguments.name, results, claim=__doc__.splitlines()[0], base=SAMPLE)
            print(f"{head.name}, {rows[0]['rows']} rows: {time.perf_counter() - start:.0f} s so far", flush=True)
    Console(width=180).print(table(results))


if __name__ == "__main__":
    main()
