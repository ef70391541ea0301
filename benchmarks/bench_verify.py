"""`gumbeljax.speculative.verify` from hidden states to tokens, against two log-softmax tensors and the products it contains.

The draft's table is the first half of the target's columns, and the target's hidden states are the draft's with the rest filled
in: the logits of the two differ by normal noise, whose size sets the acceptance. Times are of the device, inside one jitted
loop, in turns; every iteration verifies other drafts with other keys. The floor of a cell is made of matrix products alone,
the matmul passes that `verify` makes: each table once over all its positions, and in the calls whose search leaves a row
undecided (a share of them, which is counted and shown) both tables once over the rejected rows. Memory is what the compiler
sets aside beside arguments and results. Before a cell is timed, tokens must be in the vocabulary and the first token must be
accepted as often as the sum of min(p, q) says.
"""

import argparse
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from statistics import NormalDist
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

import gumbeljax
from benchmarks import harness, timing
from benchmarks.bench_gpu import logits_of, random_head
from benchmarks.shapes import QWEN3_1_7B, QWEN3_8B, Head
from gumbeljax.speculative import Law, acceptance, verify
from gumbeljax.speculative.verify import verify_one

VERIFY, IDIOM, HEADS, RESIDUAL = "verify", "log-softmax", "products of both heads", "products of the residual"
ROUNDS_OF_DRAFTS = 64  # drafts that the iterations of a loop take in turn


class Inputs(NamedTuple):
    """Of every contender. `drafted` `[rounds, rows, draft_len]`, `keys` `[rounds]`."""

    h: jax.Array
    draft_h: jax.Array
    w: jax.Array
    draft_w: jax.Array
    drafted: jax.Array
    keys: jax.Array


def ours(x: Inputs, drafted, key):
    return verify(Law(x.h, x.w), Law(x.draft_h, x.draft_w), drafted, key)


def idiom(x: Inputs, drafted, key):
    """(tokens, num_accepted) by two log-softmax tensors, gather, residual and categorical."""
    logits = partial(jnp.einsum, "rkd,vd->rkv", preferred_element_type=jnp.float32)
    log_p, log_q = jax.nn.log_softmax(logits(x.h, x.w)), jax.nn.log_softmax(logits(x.draft_h, x.draft_w))
    draft_len, of_drafts = drafted.shape[1], partial(jnp.take_along_axis, indices=drafted[..., None], axis=-1)
    coin, noise = jax.random.split(key)
    accepted = jnp.log(jax.random.uniform(coin, drafted.shape)) < (of_drafts(log_p[:, :-1]) - of_drafts(log_q))[..., 0]
    n = jnp.sum(jnp.cumprod(accepted, axis=1), axis=1)
    p = jnp.take_along_axis(log_p, n[:, None, None], axis=1)[:, 0]
    q = jnp.take_along_axis(log_q, jnp.minimum(n, draft_len - 1)[:, None, None], axis=1)[:, 0]
    residual = jnp.log(jnp.maximum(jnp.exp(p) - jnp.exp(q), 0.0))
    last = jax.random.categorical(noise, jnp.where((n < draft_len)[:, None], residual, p))
    place = jnp.arange(draft_len + 1)
    return jnp.where(place == n[:, None], last[:, None], jnp.pad(drafted, ((0, 0), (0, 1)))), n


def products(x: Inputs, rows: int | None = None):
    """One slice of each table's product, over all positions or over the first ones of some rows."""
    h, draft_h = (x.reshape(-1, x.shape[-1]) if rows is None else x[:rows, 0] for x in (x.h, x.draft_h))
    return logits_of(h, x.w)[:, 0], logits_of(draft_h, x.draft_w)[:, 0]


def step(carry, x: Inputs, f):
    """One iteration: the next drafts. `carry` is the target's and the draft's hidden states, and the round."""
    h, draft_h, i = carry
    at = i % len(x.keys)
    out = f(x._replace(h=h, draft_h=draft_h), x.drafted[at], x.keys[at])
    return harness.depend(h, *out[:2]), harness.depend(draft_h, *out[:2]), i + 1


def noise_for(accepted: float) -> float:
    """The standard deviation of normal noise on many logits that leaves an overlap of `accepted`: 2 Phi(-s / 2)."""
    return -2 * NormalDist().inv_cdf(accepted / 2)


@partial(jax.jit, static_argnames=("rows", "draft_len"))
def inputs(w, draft_w, deviation, *, rows: int, draft_len: int) -> Inputs:
    """Laws whose logits differ by normal noise of this standard deviation."""
    d_model, width = w.shape[1], draft_w.shape[1]
    noise = deviation / (2 * (1 - width / d_model) ** 0.5)
    spread = (d_model / width) ** 0.5  # of the logits, as if the whole width were in use
    shared = spread * jax.random.normal(jax.random.key(4), (rows, draft_len + 1, width), jnp.float32)
    rest = noise * jax.random.normal(jax.random.key(5), (rows, draft_len + 1, d_model - width), jnp.float32)
    h, draft_h = jnp.concatenate([shared, rest], axis=-1).astype(w.dtype), shared[:, :-1].astype(w.dtype)
    keys = jax.random.split(jax.random.key(6), ROUNDS_OF_DRAFTS)
    drafted = jax.lax.map(lambda key: gumbeljax.sample(draft_h, draft_w, key), jax.random.split(jax.random.key(7), len(keys)))
    return Inputs(h, draft_h, w, draft_w, drafted, keys)


@jax.jit
def observe(x: Inputs):
    """(all tokens are valid, num_accepted `[rounds, rows]`, rows that the search left undecided, overlaps of the laws at the
    first position, over all)."""
    out = jax.lax.map(lambda drafts: verify_one(Law(x.h, x.w), Law(x.draft_h, x.draft_w), *drafts, None), (x.drafted, x.keys))
    place = jnp.arange(out.tokens.shape[-1])
    inside = (out.tokens >= 0) & (out.tokens < x.w.shape[0])
    is_valid = jnp.where(place <= out.num_accepted[..., None], inside, out.tokens == -1)
    overlap = jax.lax.map(lambda h: acceptance(logits_of(h[0], x.w), logits_of(h[1], x.draft_w)),
                          (jnp.moveaxis(x.h[:, :-1], 1, 0), jnp.moveaxis(x.draft_h, 1, 0)))
    return jnp.all(is_valid), out.num_accepted, out.undecided, jnp.mean(overlap[0]), jnp.mean(overlap)


def check(x: Inputs, observe=observe) -> dict[str, float]:
    """Raises unless the tokens are valid and accepted as often as they should be; what was seen. `observe` may be compiled."""
    is_valid, accepted, undecided, first, everywhere = map(np.asarray, observe(x))
    seen, draft_len = float((accepted > 0).mean()), x.drafted.shape[-1]
    if not is_valid or abs(seen - first) > 5 * (first * (1 - first) / accepted.size) ** 0.5 + 1e-3:
        raise SystemExit(f"tokens valid: {bool(is_valid)}; first token accepted {seen:.3f} of the time, not {first:.3f}: "
                         "nothing was timed")
    rejected = (accepted < draft_len).sum(axis=1)
    return {"acceptance": float(everywhere), "first_accepted": seen, "first_expected": float(first),
            "accepted_per_block": float(accepted.mean()), "share_of_calls_with_rejections": float((rejected > 0).mean()),
            "share_of_calls_with_both_tables": float(undecided.any(axis=1).mean()), "undecided_rows": int(undecided.sum()),
            "rejected_rows": float(rejected[rejected > 0].mean()) if rejected.any() else 0.0}


class Programs(NamedTuple):
    """What is compiled for a number of rows and a draft length: loops by contender, and bytes of temporary memory."""

    loops: dict[str, Any]
    temp_bytes: dict[str, int]
    iterations: int


def compile_all(x: Inputs, seen: list[dict[str, float]]) -> Programs:
    """The products of the residual once for each number of rejected rows, all else once."""
    carry = x.h, x.draft_h, jnp.int32(0)
    size = x.w.size + x.draft_w.size
    iterations = timing.calls_per_loop(x.w.nbytes + x.draft_w.nbytes, 2 * x.h.shape[0] * x.h.shape[1] * size)
    functions = {VERIFY: ours, IDIOM: idiom, HEADS: lambda x, *_: products(x)}
    for rows in {rejected_rows(s) for s in seen}:
        functions[f"{RESIDUAL}, {rows} rows"] = lambda x, *_, rows=rows: products(x, rows)
    with ThreadPoolExecutor(8) as pool:
        loops = {name: pool.submit(harness.compiled_loop, partial(step, f=f), carry, x, iterations=iterations)
                 for name, f in functions.items()}
        single = {name: pool.submit(lambda f: jax.jit(f).lower(x, x.drafted[0], x.keys[0]).compile(), functions[name])
                  for name in (VERIFY, IDIOM)}
        return Programs({name: loop.result() for name, loop in loops.items()},
                        {name: harness.temp_bytes(program.result()) for name, program in single.items()}, iterations)


def rejected_rows(seen: dict[str, float]) -> int:
    """How many rows the products of the residual have: the mean of the calls that reject."""
    return max(1, round(seen["rejected_rows"]))


def measure(x: Inputs, programs: Programs, seen: dict[str, float], *, rounds: int) -> dict[str, Any]:
    """One row of the table."""
    carry = x.h, x.draft_h, jnp.int32(0)
    own = {RESIDUAL: programs.loops[f"{RESIDUAL}, {rejected_rows(seen)} rows"]}
    own |= {name: programs.loops[name] for name in (VERIFY, IDIOM, HEADS)}
    loops = {name: harness.timed(loop, carry, x, iterations=programs.iterations) for name, loop in own.items()}
    samples = timing.take_turns(loops, rounds=rounds)
    share = seen["share_of_calls_with_both_tables"]
    floor = [a + share * b for a, b in zip(samples[HEADS], samples[RESIDUAL], strict=True)]
    return {**seen, "iterations": programs.iterations, "temp_bytes": programs.temp_bytes,
            "implementation": gumbeljax.choose_implementation(x.h, x.w),
            "seconds": {**{name: timing.summarize(s)._asdict() for name, s in samples.items()},
                        "floor": timing.summarize(floor)._asdict()},
            "ratio": {"verify / floor": timing.ratio(samples[VERIFY], floor)._asdict(),
                      "log-softmax / verify": timing.ratio(samples[IDIOM], samples[VERIFY])._asdict()}}


def table(results: list[dict[str, Any]]) -> Table:
    """Microseconds, ratios of times, calls that read both tables again, and MiB of temporary memory."""
    shown = Table(title="Verification from hidden states, median us per call", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("rows", "drafted", "overlap", "verify", "log-softmax", "floor", "/ floor", "log-softmax /", "both tables",
                   "MiB", "share"):
        shown.add_column(column, justify="right", no_wrap=True)
    for row in results:
        memory, ratio = row["temp_bytes"], row["ratio"]
        shown.add_row(str(row["rows"]), str(row["draft_len"]), f"{row['acceptance']:.2f}",
                      *(f"{1e6 * row['seconds'][name]['median']:.1f}" for name in (VERIFY, IDIOM, "floor")),
                      f"{ratio['verify / floor']['median']:.3f}", f"{ratio['log-softmax / verify']['median']:.2f}",
                      f"{100 * row['share_of_calls_with_both_tables']:.0f}%",
                      f"{memory[VERIFY] / 2**20:.1f}", f"{100 * memory[VERIFY] / memory[IDIOM]:.1f}%")
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_verify", description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--draft-lens", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--acceptances", type=float, nargs="+", default=[0.5, 0.8], help="wanted overlaps of the two laws")
    parser.add_argument("--vocab", type=int, default=QWEN3_8B.vocab)
    parser.add_argument("--d-model", type=int, default=QWEN3_8B.d_model, help="of the target")
    parser.add_argument("--draft-d-model", type=int, default=QWEN3_1_7B.d_model, help="less than the target's")
    parser.add_argument("--rounds", type=int, default=20, help="loops timed for each median (default 20)")
    parser.add_argument("--name", default="verify", help="results/<name>.json is written (default verify)")
    arguments = parser.parse_args()
    if not 0 < arguments.draft_d_model < arguments.d_model:
        parser.error("--draft-d-model must be less than --d-model")
    with harness.alone():
        w = random_head(Head("target", arguments.vocab, arguments.d_model))
        draft_w = jax.block_until_ready(jnp.array(w[:, :arguments.draft_d_model]))
    results, start = [], time.perf_counter()
    for rows in arguments.rows:
        for draft_len in arguments.draft_lens:
            make = inputs.lower(w, draft_w, noise_for(0.5), rows=rows, draft_len=draft_len).compile()
            with harness.alone():
                xs = jax.block_until_ready([make(w, draft_w, noise_for(a)) for a in arguments.acceptances])
            observer = observe.lower(xs[0]).compile()
            with harness.alone():
                seen = [check(x, observer) for x in xs]
            programs = compile_all(xs[0], seen)
            for x, here, wanted in zip(xs, seen, arguments.acceptances, strict=True):
                with harness.alone():
                    row = measure(x, programs, here, rounds=arguments.rounds)
                results.append({
                    "head": Head("target", *w.shape)._asdict(), "draft_head": Head("draft", *draft_w.shape)._asdict(),
                    "rows": rows, "draft_len": draft_len, "wanted": wanted, **row})
                # After every cell: a long run may be cut short.
                harness.save(arguments.name, results, claim=__doc__.splitlines()[0], base=IDIOM)
                print(f"{rows} x {draft_len} at {wanted}: {time.perf_counter() - start:.0f} s so far", flush=True)
    Console(width=150).print(table(results))


if __name__ == "__main__":
    main()
