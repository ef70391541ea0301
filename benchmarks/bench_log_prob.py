"""`gumbeljax.log_prob` and its gradients on bfloat16, against jax-cce and against log_softmax of stored logits.

Forward: log-probabilities of given tokens, beside the matrix product alone and a reading of `w`. Backward: the mean of
-log_prob and its gradients with respect to h and w. Times are of the device, inside one jitted loop, in turns; memory is what
the compiler sets aside beside arguments and results. Before anything is timed, losses and gradients are compared with the
stored logits' in float32.
"""

import argparse
import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table

import gumbeljax
from benchmarks import harness, timing
from benchmarks.bench_gpu import best_read_rate, logits_of, random_head
from benchmarks.shapes import HEADS, QWEN3_1_7B, QWEN3_8B, Head

OURS, CCE, PLAIN, MATMUL = "log_prob", "jax-cce", "log_softmax", "matmul"
FORWARD, BACKWARD = "forward", "forward + backward"
TOLERANCE = 0.02  # of the largest gradient: gradients are bfloat16


class Scored(NamedTuple):
    """What is scored."""

    h: jax.Array
    w: jax.Array
    tokens: jax.Array


def plain_log_prob(h, w, tokens):
    return jnp.take_along_axis(jax.nn.log_softmax(logits_of(h, w)), tokens[:, None], axis=1)[:, 0]


def cce_loss(h, w, tokens):
    from jax_cce import linear_cross_entropy

    return linear_cross_entropy(h, w, tokens)


LOSSES: dict[str, Callable] = {  # mean of -log_prob
    OURS: lambda h, w, tokens: -jnp.mean(gumbeljax.log_prob(h, w, tokens)),
    CCE: cce_loss,
    PLAIN: lambda h, w, tokens: -jnp.mean(plain_log_prob(h, w, tokens)),
}
SCORES: dict[str, Callable] = {
    OURS: gumbeljax.log_prob, CCE: cce_loss, PLAIN: plain_log_prob, MATMUL: lambda h, w, tokens: logits_of(h, w)[:, 0],
}


def gradients(name: str) -> Callable:
    """(loss, (dh, dw)) of (h, w, tokens)."""
    return jax.value_and_grad(LOSSES[name], argnums=(0, 1))


def inputs(head: Head, rows: int, w: jax.Array) -> Scored:
    h = jax.random.normal(jax.random.key(4), (rows, head.d_model), jnp.bfloat16)
    return Scored(h, w, jax.random.randint(jax.random.key(5), (rows,), 0, head.vocab))


@partial(jax.jit, static_argnames="name")
def worst_error(x: Scored, expected, *, name: str) -> jax.Array:
    """Largest error of loss, dh and dw, each over the largest magnitude of its kind."""
    def error(a, b):
        return jnp.max(jnp.abs(a.astype(jnp.float32) - b.astype(jnp.float32))) / jnp.max(jnp.abs(b)).astype(jnp.float32)

    return jnp.max(jnp.stack(jax.tree.leaves(jax.tree.map(error, gradients(name)(*x), expected))))


def check(x: Scored, names: list[str]) -> dict[str, float]:
    """Raises unless every contender has the loss and the gradients of stored logits, and ours every token's; the errors."""
    expected = jax.jit(gradients(PLAIN))(*x)
    errors = {name: float(worst_error(x, expected, name=name)) for name in names}
    errors["nats of a token"] = float(jnp.max(jnp.abs(jax.jit(SCORES[OURS])(*x) - jax.jit(SCORES[PLAIN])(*x))))
    if worst := {name: e for name, e in errors.items() if not e <= TOLERANCE}:
        raise SystemExit(f"losses or gradients differ from those of stored logits by {worst}: nothing was timed")
    return errors


def compare(loops: dict[str, Callable[[], float]], *, rounds: int, base: str) -> dict[str, Any]:
    samples = timing.take_turns(loops, rounds=rounds)
    return {"seconds": {name: timing.summarize(s)._asdict() for name, s in samples.items()},
            "ratio": {name: timing.ratio(s, samples[base])._asdict() for name, s in samples.items()}}


def forward(x: Scored, names: list[str], *, rounds: int) -> dict[str, Any]:
    def step(h, x: Scored, f):
        return harness.depend(h, f(*x._replace(h=h)))

    iterations = timing.calls_per_loop(x.w.nbytes, 2 * len(x.h) * x.w.size)
    loops = {name: harness.jitted_loop(partial(step, f=SCORES[name]), x.h, x, iterations=iterations)
             for name in (*names, MATMUL)}
    memory = {name: harness.temp_bytes(jax.jit(SCORES[name]).lower(*x).compile()) for name in names}
    return {"pass": FORWARD, "iterations": iterations, "temp_bytes": memory, **compare(loops, rounds=rounds, base=names[-1])}


def backward(x: Scored, names: list[str], *, rounds: int) -> dict[str, Any]:
    def step(carry, x: Scored, f):  # dw is carried, so that every iteration has to write it
        loss, (dh, dw) = f(*x._replace(h=carry[0]))
        return harness.depend(carry[0], loss, dh), dw

    iterations = timing.calls_per_loop(3 * x.w.nbytes, 8 * len(x.h) * x.w.size)
    loops, memory = {}, {}
    for name in names:
        loops[name] = harness.jitted_loop(partial(step, f=gradients(name)), (x.h, jnp.zeros_like(x.w)), x,
                                          iterations=iterations)
        memory[name] = harness.temp_bytes(jax.jit(gradients(name)).lower(*x).compile())
    return {"pass": BACKWARD, "iterations": iterations, "temp_bytes": memory, **compare(loops, rounds=rounds, base=names[-1])}


def measure(head: Head, rows: int, w: jax.Array, names: list[str], *, rounds: int, read_rate: float) -> list[dict[str, Any]]:
    """Two rows of the table: each pass."""
    x = inputs(head, rows, w)
    about = {"head": head._asdict(), "rows": rows, "errors": check(x, names), "bytes_of_w": w.nbytes,
             "implementation": gumbeljax.choose_implementation(x.h, x.w)}
    scored = forward(x, names, rounds=rounds)
    floor = max(w.nbytes / read_rate, scored["seconds"][MATMUL]["median"])
    return [{**about, **scored, "floor": floor}, {**about, **backward(x, names, rounds=rounds)}]


def table(results: list[dict[str, Any]], names: list[str]) -> Table:
    """Microseconds and MiB of temporary memory."""
    shown = Table(title="Log-probabilities of given tokens, bfloat16: median us per call (MiB of temporary memory)",
                  box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("head", "rows", "pass", *names, "log_prob / floor"):
        shown.add_column(column, justify="left" if column in ("head", "pass") else "right")
    for row in results:
        cells = [f"{1e6 * row['seconds'][name]['median']:.1f} ({row['temp_bytes'][name] / 2**20:.1f})" for name in names]
        over = f"{row['seconds'][OURS]['median'] / row['floor']:.3f}" if "floor" in row else ""
        shown.add_row(row["head"]["name"], str(row["rows"]), row["pass"], *cells, over)
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_log_prob", description=__doc__.splitlines()[0])
    parser.add_argument("--heads", nargs="+", choices=[head.name for head in HEADS], default=[QWEN3_1_7B.name, QWEN3_8B.name])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64, 256, 1024])
    parser.add_argument("--contenders", nargs="+", choices=LOSSES, default=list(LOSSES), help="log_prob always takes part")
    parser.add_argument("--rounds", type=int, default=30, help="loops timed for each median (default 30)")
    parser.add_argument("--name", default="log_prob", help="results/<name>.json is written (default log_prob)")
    arguments = parser.parse_args()
    names = [name for name in LOSSES if name in {*arguments.contenders, OURS}]
    if CCE in names and importlib.util.find_spec("jax_cce") is None:
        parser.error("jax-cce is not installed: pip install jax-cce, or leave it out of --contenders")
    results = []
    for head in (head for head in HEADS if head.name in arguments.heads):
        w = random_head(head)
        read_rate = best_read_rate(w, rounds=arguments.rounds)
        for rows in track(arguments.rows, description=head.name):
            results += measure(head, rows, w, names, rounds=arguments.rounds, read_rate=read_rate)
            harness.save(arguments.name, results, claim=__doc__.splitlines()[0], base=names[-1])
        del w
    Console(width=150).print(table(results, names))


if __name__ == "__main__":
    main()
