"""Measure which implementation and tiles are fastest for a shape on this device, once, into a file.

Nothing is measured when tokens are drawn: a measured table is passed as `implementation`, which makes it part of what a call is
compiled for.
"""

import dataclasses
import functools
import itertools
import os
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gumbeljax import _checks, _implementation, _tuning
from gumbeljax._tuning import Tiles, TunedShape, Tuning
from gumbeljax.sampling import sample
from pallas_kernels import mosaic_tiles, triton, xla
from pallas_kernels.tiles import MosaicTiles, TritonTiles, XlaTiles

SHARED_MEMORY = 227 * 1024  # bytes that a program may take on the GPUs that we have tuned for
LOOP_SECONDS = 0.01


class Candidate(NamedTuple):
    """What is tried."""

    implementation: str
    tiles: Tiles


def candidates(h, w, vocab_axis: int = 0) -> list[Candidate]:
    """What `autotune` tries: today's rule for every implementation that can run the shape, and its neighbours."""
    head, device = _checks.head(h, w, vocab_axis, None), _implementation.device_facts(h)
    rows, d_model = head.h.shape
    found = []
    for name in _implementation.NAMES:
        if _implementation.why_not(name, head.h, head.w, device, vocab_axis=head.vocab_axis) is not None:
            continue
        if name == "xla":
            rule = xla.choose_tiles(head.h, head.w, head.vocab) if device.platform == "cpu" else XlaTiles(32768)
            # XLA is slow for a GPU's many rows, and takes long to compile: no search there.
            near = near_xla(rule, head.vocab) if device.platform == "cpu" else iter([rule])
        elif name == "triton":
            dtypes = head.h.dtype, head.w.dtype
            near = near_triton(triton.default_tiles(rows, d_model, *dtypes), *dtypes)
        else:
            itemsize = head.w.dtype.itemsize
            rule = mosaic_tiles.choose_tiles(rows, head.vocab, head.vocab_axis, device.cores or mosaic_tiles.NUM_SMS, itemsize,
                                             d_model)
            near = near_mosaic(rule, d_model, itemsize)
        found += [Candidate(name, tiles) for tiles in dict.fromkeys(near)]
    return found


def near_xla(rule: XlaTiles, vocab: int) -> Iterator[XlaTiles]:
    """Blocks of other sizes, and the whole vocabulary as one."""
    yield rule
    for block in (1024, 2048, 4096, 8192):
        if block < vocab:
            yield XlaTiles(block)
    yield xla.whole(vocab)


def near_triton(rule: TritonTiles, h_dtype, w_dtype) -> Iterator[TritonTiles]:
    """Tiles of half and twice the size, other warps and stages, as far as they fit; stored logits for few rows."""
    yield rule
    if rule.rows <= 16:
        yield from (triton.stored_tiles(rows) for rows in (1, 4, 16))
    warps = (2, 4, 8) if triton.is_narrow(h_dtype, w_dtype) else (4, 8)
    for vocab, width in ((1, 1), (2, 1), (1, 0.5), (1, 2), (0.5, 2)):
        for num_warps in warps:
            for num_stages in (3, 4, 5):
                tiles = dataclasses.replace(rule, vocab=int(rule.vocab * vocab), d_model=max(16, int(rule.d_model * width)),
                                            num_warps=num_warps, num_stages=num_stages)
                bytes_of_step = tiles.vocab * jnp.dtype(w_dtype).itemsize + tiles.rows * jnp.dtype(h_dtype).itemsize
                buffers = tiles.num_stages * tiles.d_model * bytes_of_step
                sums_of_a_thread = tiles.vocab * tiles.rows // (32 * tiles.num_warps)
                if tiles.vocab >= 16 and buffers <= SHARED_MEMORY and sums_of_a_thread <= 128:
                    yield tiles


def near_mosaic(rule: MosaicTiles, d_model: int, itemsize: int = 2) -> Iterator[MosaicTiles]:
    """The other ways to split, and other sizes, with as many fetches in flight as fit, or fewer."""
    yield rule
    for split_rows in {rule.split_rows, True}:
        pairs = {(rule.pair_rows and split_rows, False), (False, rule.pair_vocab), (False, False)}
        for vocab, width, (pair_rows, pair_vocab) in itertools.product(sorted({rule.vocab, 64, 128}), (64, 128), sorted(pairs)):
            fits = d_model % width == 0 and not (itemsize == 1 and vocab % (128 if split_rows else 64))
            for steps in (mosaic_tiles.most_steps(split_rows, vocab, width, itemsize=itemsize) - fewer for fewer in (0, 2)):
                if fits and steps >= 2:
                    yield MosaicTiles(split_rows, vocab, width, steps, pair_rows, pair_vocab)


def timed_loop(draw: Callable, h, w, keys, iterations: int) -> tuple[Callable[[], float], np.ndarray]:
    """(a function that runs a compiled loop of draws and returns device seconds for each, the tokens of a draw)."""
    def draws(h, w, keys):
        def step(tokens, _):  # the next draw waits for this one
            return draw(h + (1e-30 * jnp.max(tokens)).astype(h.dtype), w, keys), None

        # w is no part of the carry: a loop that returned it would have to copy it.
        return jax.lax.scan(step, jnp.zeros(h.shape[:1], jnp.int32), length=iterations)[0]

    loop = jax.jit(draws).lower(h, w, keys).compile()

    def run() -> float:
        start = time.perf_counter()
        jax.block_until_ready(loop(h, w, keys))
        return (time.perf_counter() - start) / iterations

    return run, np.asarray(loop(h, w, keys))


def autotune(h, w, path: str | Path | None = None, *, vocab_axis: int = 0, rounds: int = 20, command: str = "") -> Tuning:
    """Finds what is fastest for draws of `h`'s rows from the head `w` on this device, and keeps it.

    Runs `sample` with every implementation that can and with the tiles next to those of its rule, compiles them side by side
    and times each in loops on the device, in turns; the best few are timed again, and one is kept if it gains more than 1%.
    Passed over, with one warning, are candidates that do not compile, and those whose tokens differ from those of "xla" in more
    than one row of fifty (sums that round in another order may flip a near-tie).

    Args:
      h: `[*batch, d_model]`, on the device to tune for; its values do not matter, but must be finite.
      w: output table `[vocab, d_model]` (see `vocab_axis`), or a `gumbeljax.QuantizedHead`.
      path: a file; the choice is put into the table that is there, which is made if it is not. None: nothing is written.
      vocab_axis: as in `gumbeljax.sample`.
      rounds: turns that each of the best candidates takes.
      command: said in the file, if not empty: how the table was made.

    Returns:
      The table, that of the file included. Pass it as `implementation`.

    Raises:
      ValueError, TypeError: an argument breaks its rule, or the file is not such a table.

    >>> import jax.numpy as jnp, gumbeljax
    >>> tuning = gumbeljax.autotune(jnp.ones((2, 16)), jnp.ones((64, 16)), rounds=1)
    >>> gumbeljax.choose_implementation(jnp.ones((2, 16)), jnp.ones((64, 16)), tuning)
    'xla'
    """
    if not (_checks.is_concrete(h) and _checks.is_concrete(w)):
        raise TypeError("h must be a concrete array, since draws from it are timed; got a traced one: leave jit.")
    rounds = _checks.count(rounds, "rounds")
    table = _tuning.load_tuning(path) if path is not None and Path(path).exists() else Tuning()
    head = _checks.head(h, w, vocab_axis, None)
    h, w, axis, device = head.h, w if _checks.is_quantized(w) else head.w, head.vocab_axis, _implementation.device_facts(head.h)
    keys = jax.random.split(jax.random.key(0), len(h))
    place = _tuning.place_of(device.kind, h, head.w, axis)

    def loop_of(implementation, iterations: int) -> tuple[Callable[[], float], np.ndarray]:
        return timed_loop(functools.partial(sample, vocab_axis=axis, implementation=implementation), h, w, keys, iterations)

    def loop_of_candidate(x: Candidate) -> Callable[[], float] | str:
        """Its loop, or why it is passed over."""
        try:
            run, tokens = loop_of(Tuning((TunedShape(place, x.implementation, x.tiles, 0.0, 0.0),)), iterations)
        except Exception as error:  # whatever a backend says of tiles that do not fit
            return f"{type(error).__name__}: {error}"[:200]
        return run if np.mean(tokens != expected) <= 0.02 else "other tokens than xla's"

    run, expected = loop_of("xla", 3)
    run = loop_of(None, 3)[0]
    iterations = max(3, min(500, round(LOOP_SECONDS / min(run(), run()))))
    tried = candidates(h, w, axis)
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        made = dict(zip(tried, pool.map(loop_of_candidate, tried), strict=True))
    if failed := {x: why for x, why in made.items() if isinstance(why, str)}:
        x, why = next(iter(failed.items()))
        warnings.warn(f"autotune passed over {len(failed)} of {len(tried)} candidates; of them {x}: {why}", stacklevel=2)
    loops: dict[Candidate | None, Callable] = {x: loop for x, loop in made.items() if not isinstance(loop, str)}
    loops[None] = loop_of(None, iterations)[0]  # what runs without a table
    first = _medians(loops, 3)
    final = _medians({x: loops[x] for x in {None, *sorted(first, key=lambda x: first[x])[:4]}}, rounds)
    best, table = min(final, key=lambda x: final[x]), table.without(place)
    if best is not None and final[best] < 0.99 * final[None]:
        table = table.updated(TunedShape(place, best.implementation, best.tiles, final[best], final[None]))
    table = dataclasses.replace(table, command=command or table.command)
    if path is not None:
        _tuning.save_tuning(table, path)
    return table


def _medians(loops: dict, rounds: int) -> dict:
    """Seconds of each, timed in turns."""
    samples = {name: [] for name in loops}
    for _ in range(rounds):
        for name, loop in loops.items():
            samples[name].append(loop())
    return {name: float(np.median(s)) for name, s in samples.items()}
