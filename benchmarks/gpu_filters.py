"""Filters on one GPU, bfloat16: device time of `sample` with top_k, top_p, min_p beside `sample` without and the usual idioms.

A cell is a head, a number of rows, a set of filters and a kind of logits. Kinds are temperatures of one random head, at which
90% of the mass lies on about so many tokens, and worst cases. Temperature, filters and mask are traced, so all kinds of a cell
run one compiled loop. Before a cell is timed its tokens are compared with implementation="xla" on a head of exact logits.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich import box
from rich.table import Table

import gumbeljax
from benchmarks import bench_gpu, harness, timing
from benchmarks.shapes import Head

NUCLEI = {"random": None, "10": 10, "100": 100, "10000": 10_000}
WORST = ("flat", "one", "p=1-1e-6", "k=V-1")
FILTERS = {"top_k": ("top_k",), "top_p": ("top_p",), "top_k+top_p": ("top_k", "top_p"), "min_p": ("min_p",)}
VALUES = {"top_k": 50, "top_p": 0.9, "min_p": 0.05}
SAMPLE, OURS, IDIOM, MATMUL = "sample", "filtered", "idiom", "matmul"


class Inputs(NamedTuple):
    """Of every contender; `[rows]`, and bias `[vocab]`, mask `[rows, vocab]` or None."""

    h: jax.Array
    w: jax.Array
    keys: jax.Array
    t: jax.Array
    values: dict[str, jax.Array]
    bias: jax.Array | None
    mask: jax.Array | None


def processed(x: Inputs) -> jax.Array:
    logits = bench_gpu.logits_of(x.h, x.w)
    logits = logits if x.bias is None else logits + x.bias
    return (logits if x.mask is None else jnp.where(x.mask, logits, -jnp.inf)) / x.t[:, None]


def by_top_k(x: Inputs) -> jax.Array:
    """`lax.top_k` of a static 50, and top_p among those where that is asked for."""
    logits, ids = jax.lax.top_k(processed(x), VALUES["top_k"])
    if "top_p" in x.values:
        p = jax.nn.softmax(logits)
        logits = jnp.where(jnp.cumsum(p, axis=1) - p < x.values["top_p"][:, None], logits, -jnp.inf)
    return jnp.take_along_axis(ids, jax.random.categorical(x.keys[0], logits)[:, None], axis=1)[:, 0]


def by_sort(x: Inputs) -> jax.Array:
    logits = processed(x)
    ranked = -jnp.sort(-logits, axis=1)
    p = jax.nn.softmax(ranked)
    keep = jnp.cumsum(p, axis=1) - p < x.values["top_p"][:, None]
    least = jnp.min(jnp.where(keep, ranked, jnp.inf), axis=1, keepdims=True)
    return jax.random.categorical(x.keys[0], jnp.where(logits >= least, logits, -jnp.inf))


def by_mask(x: Inputs) -> jax.Array:
    logits = processed(x)
    least = jnp.max(logits, axis=1, keepdims=True) + jnp.log(x.values["min_p"])[:, None]
    return jax.random.categorical(x.keys[0], jnp.where(logits >= least, logits, -jnp.inf))


IDIOMS = {"top_k": by_top_k, "top_k+top_p": by_top_k, "top_p": by_sort, "min_p": by_mask}


def ours(x: Inputs, *, implementation="triton", filtered=True) -> jax.Array:
    values = {"implementation": implementation, **x.values} if filtered else {}
    return gumbeljax.sample(x.h, x.w, x.keys, temperature=x.t, logit_bias=x.bias, mask=x.mask, **values)


def nucleus_sizes(logits: jax.Array, t) -> jax.Array:
    ranked = -jnp.sort(-logits / t, axis=1)
    p = jax.nn.softmax(ranked)
    return jnp.sum(jnp.cumsum(p, axis=1) - p < 0.9, axis=1)


def temperature_for(logits: jax.Array, tokens: int) -> float:
    """At which the nucleus of 0.9 has about so many tokens, in the median row."""
    size = jax.jit(lambda t: jnp.median(nucleus_sizes(logits, t)))
    low, high = 0.01, 4.0
    for _ in range(20):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if size(middle) < tokens else (low, middle)
    return low


def kinds_of(x: Inputs, names: tuple[str, ...], chosen: list[str], vocab: int) -> Iterator[tuple[str, Inputs]]:
    """The kinds of logits that a set of filters can be asked about."""
    logits = bench_gpu.logits_of(x.h[:4], x.w)
    full = partial(jnp.full_like, x.t)
    for kind in chosen:
        if kind in NUCLEI:
            tokens = NUCLEI[kind]
            yield kind, x if tokens is None else x._replace(t=full(temperature_for(logits, tokens)))
        elif kind == "flat":
            yield kind, x._replace(w=jnp.zeros_like(x.w))  # all logits tie, whatever the loop does to h
        elif kind == "one" and x.mask is not None:
            yield kind, x._replace(mask=jnp.zeros_like(x.mask).at[:, vocab // 3].set(True))
        elif kind == "p=1-1e-6" and "top_p" in names:
            yield kind, x._replace(values=x.values | {"top_p": full(1 - 1e-6)})
        elif kind == "k=V-1" and "top_k" in names:
            yield kind, x._replace(values=x.values | {"top_k": jnp.full_like(x.values["top_k"], vocab - 1)})


def exact_inputs(head: Head, x: Inputs) -> Inputs:
    """`x` with states and a head whose logits are exact."""
    return x._replace(h=bench_gpu.exact_states(head, len(x.h)), w=bench_gpu.exact_head(head))


def step(results, x: Inputs, f):
    """One iteration of a loop: hidden states that wait for the results before."""
    return f(x._replace(h=harness.depend(x.h, results)))


def measure(head: Head, rows: int, w: jax.Array, names: str, kinds: list[str], *, with_processors: bool, idioms: bool,
            rounds: int) -> list[dict[str, Any]]:
    """The rows of the table for one head, number of rows and set of filters."""
    with harness.alone():
        plain = bench_gpu.inputs(head, rows, w)
        values = {name: jnp.full(rows, VALUES[name], jnp.int32 if name == "top_k" else jnp.float32) for name in FILTERS[names]}
        bias = mask = None
        if with_processors:
            bias = jax.random.normal(jax.random.key(7), (head.vocab,))
            mask = jax.random.bernoulli(jax.random.key(8), 0.9, (rows, head.vocab))
        x = jax.block_until_ready(Inputs(plain.h, w, plain.keys, jnp.ones(rows), values, bias, mask))
    contenders: dict[str, Callable[[Inputs], jax.Array]] = {
        SAMPLE: partial(ours, filtered=False), OURS: ours, MATMUL: lambda x: bench_gpu.logits_of(x.h, x.w)[:, 0]}
    if idioms:
        contenders[IDIOM] = IDIOMS[names]
    iterations = max(20, timing.calls_per_loop(w.nbytes, 2 * rows * w.size) // 2)
    first = {name: jnp.zeros(rows, jax.eval_shape(f, x).dtype) for name, f in contenders.items()}
    with ThreadPoolExecutor(8) as pool:
        drawers = [pool.submit(jax.jit(partial(ours, implementation=name)).lower(x).compile) for name in ("triton", "xla")]
        loops = {name: pool.submit(harness.compiled_loop, partial(step, f=f), first[name], x, iterations=iterations)
                 for name, f in contenders.items()}
        draw, plain_draw = (job.result() for job in drawers)
        compiled = {name: job.result() for name, job in loops.items()}
    out = []
    with harness.alone():
        exact = exact_inputs(head, x)
        if (differing := int(np.sum(np.asarray(draw(exact)) != np.asarray(plain_draw(exact))))):
            raise SystemExit(f'{head.name}, {rows} rows, {names}: tokens differ from implementation="xla" in {differing} rows: '
                             "nothing was timed")
        del exact
        for kind, y in kinds_of(x, FILTERS[names], kinds, head.vocab):
            timed = {name: harness.timed(loop, first[name], y, iterations=iterations) for name, loop in compiled.items()
                     if (name, kind) != (IDIOM, "k=V-1")}  # whose 50 is static
            samples = timing.take_turns(timed, rounds=rounds)
            out.append({
                "head": head._asdict(), "rows": rows, "filters": names, "logits": kind, "temperature": float(y.t[0]),
                "processors": with_processors, "iterations": iterations, "tokens_compared": rows, "implementation": "triton",
                "seconds": {name: timing.summarize(s)._asdict() for name, s in samples.items()},
                "ratio": {name: timing.ratio(s, samples[SAMPLE])._asdict() for name, s in samples.items()}})
    return out


def table(results: list[dict[str, Any]]) -> Table:
    """Microseconds, ours over the unfiltered call, and the idiom over ours."""
    shown = Table(title="sample under filters, bfloat16: median us per call", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("head", "rows", "filters", "logits", SAMPLE, OURS, IDIOM, MATMUL, "/ sample", "+ us", "idiom /"):
        shown.add_column(column, justify="left" if column in ("head", "filters", "logits") else "right", no_wrap=True)
    for row in results:
        us = {name: 1e6 * t["median"] for name, t in row["seconds"].items()}
        of_idiom = f"{us[IDIOM]:.1f}" if IDIOM in us else ""
        bound = 1.25 if row["rows"] <= 64 else 1.4
        ratio = row["ratio"][OURS]["median"]
        colour = "green" if ratio <= bound else "red"
        names = row["filters"] + (" +mask" if row["processors"] else "")
        shown.add_row(row["head"]["name"], str(row["rows"]), names, row["logits"], f"{us[SAMPLE]:.1f}", f"{us[OURS]:.1f}",
                      of_idiom, f"{us[MATMUL]:.1f}", f"[{colour}]{ratio:.2f}[/]", f"{us[OURS] - us[SAMPLE]:.0f}",
                      f"{us[IDIOM] / us[OURS]:.2f}" if IDIOM in us else "")
    return shown
