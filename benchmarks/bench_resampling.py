"""Resampling by `gumbeljax.smc` against a plain cumulative sum and a binary search, many small groups and one large one.

Times are of the device, inside one jitted loop, in turns. The plain way is `jnp.cumsum` of normalised float32 weights and
`jnp.searchsorted`, with one uniform number for a group (as systematic resampling has) or with one for each output (as the
others have). Before anything is timed, ancestors are held against the weights in float64: none out of range or of weight 0,
systematic counts within rounding, mean counts n w within 5 standard errors on the groups together.
"""

import argparse
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks import harness, timing
from gumbeljax import smc

PLAIN, PLAIN_EACH = "plain, one uniform", "plain, n uniforms"
BASE = {"systematic": PLAIN, "stratified": PLAIN_EACH, "residual": PLAIN_EACH, "multinomial": PLAIN_EACH}


def searched(log_weights, points):
    """The first particle whose cumulative weight exceeds each point."""
    sums = jnp.cumsum(jax.nn.softmax(log_weights), axis=-1)
    return jax.vmap(partial(jnp.searchsorted, side="right"))(sums, points).astype(jnp.int32)


def plain_systematic(log_weights, key):
    groups, n = log_weights.shape
    return searched(log_weights, (jnp.arange(n) + jax.random.uniform(key, (groups, 1))) / n)


def plain_multinomial(log_weights, key):
    return searched(log_weights, jax.random.uniform(key, log_weights.shape))


CONTENDERS: dict[str, Callable] = {
    "systematic": smc.systematic, "stratified": smc.stratified, "residual": smc.residual, "multinomial": smc.multinomial,
    PLAIN: plain_systematic, PLAIN_EACH: plain_multinomial,
}


def check(name: str, log_weights, ancestors) -> None:
    """Raises unless the ancestors could be those of the weights."""
    groups, n = log_weights.shape
    weights = np.exp(np.asarray(log_weights, np.float64))
    weights /= weights.sum(axis=1, keepdims=True)
    ancestors = np.asarray(ancestors)
    wrong = ancestors.min() < 0 or ancestors.max() >= n
    if not wrong:
        counts = np.bincount((ancestors + n * np.arange(groups)[:, None]).ravel(), minlength=groups * n).reshape(groups, n)
        wrong = bool(counts[weights == 0].any())
        if name == "systematic":  # float32 weights are right to 1e-6
            wrong |= bool((np.abs(counts - n * weights) >= 1 + 1e-5 * n * weights + 1e-3).any())
        heavy = weights > 1 / n  # half of the mass or so: how many outputs it has, over all groups, has at most this variance
        share = (weights * heavy).sum(axis=1)
        error = counts[heavy].sum() - n * share.sum()
        wrong |= bool(abs(error) > 5 * np.sqrt((n * share * (1 - share)).sum()) + 1)
    if wrong:
        raise SystemExit(f"{name} on {groups} x {n}: ancestors do not fit the weights: nothing was timed")


def step(carry, f):
    log_weights, key = carry
    key, now = jax.random.split(key)
    return harness.depend(log_weights, f(log_weights, now)), key


def measure(groups: int, n: int, names: list[str], *, rounds: int) -> dict[str, Any]:
    """One row of the table."""
    log_weights = jax.random.normal(jax.random.key(1), (groups, n)).at[:, ::7].set(-jnp.inf)
    key = jax.random.key(2)
    for name in names:
        if name in BASE:
            check(name, log_weights, CONTENDERS[name](log_weights, key))
    iterations = 100 if jax.default_backend() != "cpu" else 3
    with ThreadPoolExecutor(8) as pool:
        compiled = {name: pool.submit(harness.compiled_loop, partial(step, f=CONTENDERS[name]), (log_weights, key),
                                      iterations=iterations) for name in names}
        alone = {name: pool.submit(lambda f: jax.jit(f).lower(log_weights, key).compile(), CONTENDERS[name]) for name in names}
        memory = {name: harness.temp_bytes(program.result()) for name, program in alone.items()}
    loops = {name: harness.timed(loop.result(), (log_weights, key), iterations=iterations) for name, loop in compiled.items()}
    samples = timing.take_turns(loops, rounds=rounds)
    return {"groups": groups, "particles": n, "iterations": iterations, "temp_bytes": memory,
            "seconds": {name: timing.summarize(s)._asdict() for name, s in samples.items()},
            "ratio": {name: timing.ratio(samples[name], samples[base])._asdict() for name, base in BASE.items()
                      if name in samples}}


def table(results: list[dict[str, Any]]) -> Table:
    """Microseconds, and in brackets the time over that of the plain way."""
    names = list(results[0]["seconds"])
    shown = Table(title="Resampling, median us per call (over the plain way)", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("groups x particles", *names):
        shown.add_column(column, justify="right")
    for row in results:
        cells = [f"{1e6 * row['seconds'][name]['median']:.1f}"
                 + (f" ({row['ratio'][name]['median']:.2f})" if name in row["ratio"] else "") for name in names]
        shown.add_row(f"{row['groups']:,} x {row['particles']:,}", *cells)
    return shown


def shape(text: str) -> tuple[int, int]:
    groups, n = text.split("x")
    return int(groups), int(n)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_resampling", description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", type=shape, nargs="+", default=[(8192, 32), (1, 1_000_000)], help="as 8192x32 1x1000000")
    parser.add_argument("--schemes", nargs="+", choices=list(BASE), default=list(BASE))
    parser.add_argument("--rounds", type=int, default=20, help="loops timed for each median (default 20)")
    parser.add_argument("--name", default="resampling", help="results/<name>.json is written (default resampling)")
    arguments = parser.parse_args()
    names = [name for name in CONTENDERS if name in {*arguments.schemes, *(BASE[s] for s in arguments.schemes)}]
    results, start = [], time.perf_counter()
    for groups, n in arguments.shapes:
        results.append(measure(groups, n, names, rounds=arguments.rounds))
        harness.save(arguments.name, results, claim=__doc__.splitlines()[0])
        print(f"{groups} x {n}: {time.perf_counter() - start:.0f} s so far", flush=True)
    Console(width=150).print(table(results))


if __name__ == "__main__":
    main()
