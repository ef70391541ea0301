"""What a time is and how contenders take turns; for any library (it imports no jax)."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from benchmarks.lock import alone


class Timing(NamedTuple):
    """Seconds per call: the median over rounds and the quartiles around it."""

    median: float
    q25: float
    q75: float
    rounds: int


def take_turns(loops: Mapping[str, Callable[[], float]], *, rounds: int, seed: int = 0) -> dict[str, list[float]]:
    """Seconds per call of each contender in each round, as its loop returns them; the order within a round is shuffled.

    A slow spell of the machine then falls on all of them alike, so that ratios within a round stand where times do not.
    """
    samples = {name: [] for name in loops}
    rng = np.random.default_rng(seed)
    with alone():
        for _ in range(rounds):
            for name in rng.permutation(list(loops)):
                samples[name].append(loops[name]())
    return samples


def summarize(samples: Sequence[float]) -> Timing:
    """Median and quartiles."""
    q25, median, q75 = np.percentile(samples, [25, 50, 75])
    return Timing(float(median), float(q25), float(q75), len(samples))


def ratio(samples: Sequence[float], base: Sequence[float]) -> Timing:
    """Median and quartiles of samples / base, round by round."""
    return summarize(np.asarray(samples) / np.asarray(base))


def calls_per_loop(bytes_read: int, flops: int, *, seconds: float = 0.015) -> int:
    """How many calls fill a timed loop of about `seconds` on a GPU that reads 4 TB/s and multiplies 600 Tflop/s."""
    return int(np.clip(round(seconds / max(bytes_read / 4e12, flops / 6e14)), 5, 500))
