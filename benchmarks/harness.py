"""Timing that survives a noisy machine: contenders take turns, and the report is medians and ratios of one run."""

import json
import os
import platform
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

RESULTS = Path(__file__).parent / "results"


class Timing(NamedTuple):
    """Seconds per call: the median over rounds and the quartiles around it."""

    median: float
    q25: float
    q75: float
    rounds: int


def interleave(
    contenders: Mapping[str, Callable[[], Any]], *, rounds: int = 20, min_time: float = 0.02, seed: int = 0
) -> dict[str, list[float]]:
    """Seconds per call of each contender in each round; the order within a round is shuffled.

    A slow spell of the machine then falls on all of them alike, so that ratios within a round stand where times do not.
    Each sample blocks on every call and repeats it until about `min_time` seconds have passed.
    """
    repeats = {}
    for name, call in contenders.items():
        jax.block_until_ready(call())  # compiles
        repeats[name] = max(1, round(min_time / _seconds(call, 2)))
    samples = {name: [] for name in contenders}
    rng = np.random.default_rng(seed)
    for _ in range(rounds):
        for name in rng.permutation(list(contenders)):
            samples[name].append(_seconds(contenders[name], repeats[name]))
    return samples


def _seconds(call: Callable[[], Any], repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        jax.block_until_ready(call())
    return (time.perf_counter() - start) / repeats


def time_inside_jit(step: Callable[[Any], Any], carry: Any, *, iterations: int = 100, rounds: int = 10) -> list[float]:
    """Device seconds per iteration of `carry = step(carry)` inside one jitted loop, one value per round.

    Launch and dispatch are paid once for the whole loop, whose trip count is static: a traced one makes XLA ask the
    host before every iteration.  The carry that `step` returns must depend on all that is to be timed (see `depend`),
    else XLA drops it or moves it out of the loop.  Large arrays belong in the carry, unchanged: what `step` closes over
    is compiled in as a constant.
    """
    loop = jax.jit(lambda carry: jax.lax.scan(lambda c, _: (step(c), None), carry, length=iterations)[0])
    jax.block_until_ready(loop(carry))
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        jax.block_until_ready(loop(carry))
        seconds.append((time.perf_counter() - start) / iterations)
    return seconds


def depend(x: jax.Array, *outputs: jax.Array) -> jax.Array:
    """`x`, of a float dtype, unchanged in effect but computed from every element of the outputs."""
    reach = sum(jnp.max(output).astype(jnp.float32) for output in outputs)
    return x + (1e-30 * reach).astype(x.dtype)


def summarize(samples: Sequence[float]) -> Timing:
    """Median and quartiles."""
    q25, median, q75 = np.percentile(samples, [25, 50, 75])
    return Timing(float(median), float(q25), float(q75), len(samples))


def ratio(samples: Sequence[float], base: Sequence[float]) -> Timing:
    """Median and quartiles of samples / base, round by round."""
    return summarize(np.asarray(samples) / np.asarray(base))


def environment() -> dict[str, Any]:
    """Where and with what a result was made."""
    device = jax.devices()[0]
    return {
        "device": _cpu_name() if device.platform == "cpu" else device.device_kind,
        "platform": device.platform,
        "num_devices": jax.device_count(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "python": platform.python_version(),
        "versions": {package.__name__: package.__version__ for package in (jax, np)},
        "commit": _commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _commit() -> str | None:
    """Short commit of the working tree, with "+" when it differs; None outside git."""
    try:
        said = [
            subprocess.run(["git", *command], cwd=RESULTS.parent, capture_output=True, text=True, check=True).stdout
            for command in (["rev-parse", "--short=12", "HEAD"], ["status", "--porcelain", "--", "*.py"])
        ]
    except (OSError, subprocess.CalledProcessError):
        return None
    return said[0].strip() + ("+" if said[1].strip() else "")


def save(name: str, rows: Sequence[Mapping[str, Any]], **about: Any) -> Path:
    """Writes results/<name>.json: what was measured, where, and one mapping for each row of the table."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    record = {"name": name, **about, "environment": environment(), "rows": list(rows)}
    path.write_text(json.dumps(record, indent=1) + "\n")
    return path


def load(name: str) -> dict[str, Any]:
    """Reads results/<name>.json."""
    return json.loads((RESULTS / f"{name}.json").read_text())
