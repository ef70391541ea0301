"""Timing jax on a noisy machine: contenders take turns, and the report is medians and ratios of one run."""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import records
from benchmarks.lock import alone as alone
from benchmarks.timing import take_turns


def interleave(
    contenders: Mapping[str, Callable[[], Any]], *, rounds: int = 20, min_time: float = 0.02, seed: int = 0
) -> dict[str, list[float]]:
    """Seconds per call of each contender in each round, in turns (see `take_turns`).

    Each sample blocks on every call and repeats it until about `min_time` seconds have passed.
    """
    loops = {}
    for name, call in contenders.items():
        jax.block_until_ready(call())  # compiles
        repeats = max(1, round(min_time / _seconds(call, 2)))
        loops[name] = lambda call=call, repeats=repeats: _seconds(call, repeats)
    return take_turns(loops, rounds=rounds, seed=seed)


def _seconds(call: Callable[[], Any], repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        jax.block_until_ready(call())
    return (time.perf_counter() - start) / repeats


def jitted_loop(step: Callable[..., Any], carry: Any, *constants: Any, iterations: int) -> Callable[[], float]:
    """Compiles `carry = step(carry, *constants)`, `iterations` times in one jitted loop, and runs it once. A call of the result
    runs it again and returns device seconds per iteration.

    Launch and dispatch are paid once for the whole loop, whose trip count is static: a traced one makes XLA ask the
    host before every iteration.  The carry that `step` returns must depend on all that is to be timed (see `depend`),
    else XLA drops it or moves it out of the loop.  Large arrays that do not change are `constants`: the loop does not return
    them, which would copy them once, and they are no part of the program, as what `step` closes over is.
    """
    return timed(compiled_loop(step, carry, *constants, iterations=iterations), carry, *constants, iterations=iterations)


def compiled_loop(step: Callable[..., Any], carry: Any, *constants: Any, iterations: int) -> Callable[..., Any]:
    """The loop of `jitted_loop`, compiled for arguments of these shapes and not run: many can be compiled in threads. XLA times
    candidates for a matrix product while it compiles, so that part is `alone`."""
    @jax.jit
    def loop(carry, *constants):
        return jax.lax.scan(lambda carry, _: (step(carry, *constants), None), carry, length=iterations)[0]

    lowered = loop.lower(carry, *constants)
    with alone():
        return lowered.compile()


def timed(loop: Callable[..., Any], carry: Any, *constants: Any, iterations: int) -> Callable[[], float]:
    """Runs a compiled loop once. A call of the result runs it again and returns device seconds per iteration."""
    jax.block_until_ready(loop(carry, *constants))
    return lambda: _seconds(lambda: loop(carry, *constants), 1) / iterations


def time_inside_jit(step: Callable[..., Any], carry: Any, *constants: Any, iterations: int = 100,
                    rounds: int = 10) -> list[float]:
    """Device seconds per iteration of `carry = step(carry, *constants)` inside one jitted loop, one value per round."""
    loop = jitted_loop(step, carry, *constants, iterations=iterations)
    return [loop() for _ in range(rounds)]


def depend(x: jax.Array, *outputs: jax.Array) -> jax.Array:
    """`x`, of a float dtype, unchanged in effect but computed from every element of the outputs."""
    reach = sum(jnp.max(output).astype(jnp.float32) for output in outputs)
    return x + (1e-30 * reach).astype(x.dtype)


def temp_bytes(compiled) -> int:
    """Bytes that a compiled function takes beside its arguments and results."""
    return int(compiled.memory_analysis().temp_size_in_bytes)


def environment(**versions: str) -> dict[str, Any]:
    """Where and with what a result was made; `versions` of further packages."""
    device = jax.devices()[0]
    return records.environment(
        device=None if device.platform == "cpu" else device.device_kind, platform_name=device.platform,
        num_devices=jax.device_count(), versions={"jax": jax.__version__, "numpy": np.__version__, **versions})


def save(name: str, rows: Sequence[Mapping[str, Any]], *, versions: Mapping[str, str] | None = None, **about: Any) -> Path:
    """`records.save` with jax's devices as the environment."""
    return records.save(name, rows, environment(**(versions or {})), **about)
