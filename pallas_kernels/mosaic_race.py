"""What a warpgroup of the Mosaic GPU kernel makes of the logits of a tile, in steps short enough to hide behind products.

Rows run along axis 0 here. Row vectors are held by four lanes each, so work on them is done four times over: the masses of the
groups are put into one `[rows, 8]` matrix before the noise. Reductions run along the vocabulary only: one across warps would
share scratch memory between the warpgroups.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from pallas_kernels import noise, race
from pallas_kernels.logits import inverse_temperature

LOG2_E = 1.4426950408889634
COLUMNS = 8  # groups in a tile at most, and what the layout wants a multiple of


class Tile(NamedTuple):
    """The logits of a tile: `group(g)` is `[rows, 16]`, the g-th group of 16 ids."""

    group: Any
    num_groups: int
    first_id: Any


class Running(NamedTuple):
    """Where a warpgroup keeps what its tiles have said so far, in shared memory: floats `[n, rows]` in the order of `race.Race`
    or `race.Mass` without the ids, ids `[rows]`, and for a race the winners' logits `[rows, 16]`."""

    floats: Any
    ids: Any
    logits: Any = None


def columns(shape):
    """The number of its column at every entry."""
    return lax.broadcasted_iota(jnp.int32, shape, 1)


def over(shape):
    """Broadcasts a row vector over a `[rows, n]` tile."""
    return lambda v: lax.broadcast_in_dim(v, shape, (0,))


def row_vector(mgpu, ref):
    """Loads `[rows]`."""
    layout = mgpu.Layout.WGMMA.reduce(1)
    return mgpu.layout_cast(mgpu.load(ref, layout=layout, optimized=False), layout)


def lowest(condition, column, n, first_id, step):
    """`first_id + step * column` of the first column where `condition` holds, or NO_ID. By a maximum: this backend
    reduces no minimum of integers."""
    first = jnp.max(jnp.where(condition, n - column, 0), axis=1)
    return jnp.where(first > 0, first_id + step * (n - first), race.NO_ID)


def start(mgpu, running: Running, rows):
    """Writes that nothing has been seen."""
    vector = lambda value, dtype: mgpu.layout_cast(jnp.full((rows,), value, dtype), mgpu.Layout.WGMMA.reduce(1))  # noqa: E731
    empties = (-jnp.inf, 0.0) if running.logits is None else (-jnp.inf, 0.0, -jnp.inf, 0.0, 0.0)
    for i in range(running.floats.shape[0]):
        running.floats[i] = vector(empties[i], jnp.float32)
    running.ids[...] = vector(race.NO_ID, jnp.int32)
    if running.logits is not None:
        running.logits[...] = mgpu.layout_cast(jnp.zeros((rows, noise.GROUP), jnp.float32), mgpu.Layout.WGMMA)


def merged_totals(old_top, new_top, old, new, scales):
    """The larger top, and the totals of both sides rescaled to it."""
    top = jnp.maximum(old_top, new_top)
    down = [x - race.finite_or_zero(top) for x in (old_top, new_top)]
    return top, [a * jnp.exp2(down[0] * scale) + b * jnp.exp2(down[1] * scale) for a, b, scale in zip(old, new, scales, strict=True)]


def race_steps(mgpu, tile: Tile, t, words, running: Running):
    """Adds the race over a tile, as `race.race_of` and `race.merge`. A generator: each `next` does one step."""
    rows = t.shape[0]
    shape = (rows, COLUMNS)
    column, spread, spread_group = columns(shape), over(shape), over((rows, noise.GROUP))
    scales = [inverse_temperature(t) * LOG2_E, jnp.full_like(t, LOG2_E)][:running.floats.shape[0] - 3]
    tops, totals = jnp.full(shape, -jnp.inf, jnp.float32), [jnp.zeros(shape, jnp.float32) for _ in scales]
    for g in range(tile.num_groups):
        x = tile.group(g)
        top = jnp.max(x, axis=1)
        below = x - spread_group(race.finite_or_zero(top))
        tops = jnp.where(column == g, spread(top), tops)
        for i, scale in enumerate(scales):
            total = jnp.sum(jnp.exp2(below * spread_group(scale)), axis=1)
            totals[i] = jnp.where(column == g, spread(total), totals[i])
        yield
    tops, *totals = (mgpu.layout_cast(v, mgpu.Layout.WGMMA) for v in (tops, *totals))
    ids = race.global_ids((None, None, *map(spread, words[2:])), tile.first_id + noise.GROUP * column)
    stream = jnp.full(shape, noise.stream(noise.DRAW, 0, noise.GROUP_LEVEL))
    gumbel = noise.gumbel(spread(words[0]), spread(words[1]), stream, ids)
    yield
    high, low = race.scores(tops, totals[0], gumbel, spread(t))
    best_high = jnp.max(high, axis=1)
    tied = high == spread(best_high)
    best_low = jnp.max(jnp.where(tied, low, -jnp.inf), axis=1)
    winner = lowest(tied & (low == spread(best_low)), column, COLUMNS, tile.first_id, noise.GROUP)
    yield
    top = jnp.max(tops, axis=1)
    down = tops - spread(race.finite_or_zero(top))
    totals = [jnp.sum(total * jnp.exp2(down * spread(scale)), axis=1) for total, scale in zip(totals, scales, strict=True)]
    old_high, old_low, old_top, *old_totals = (row_vector(mgpu, running.floats.at[i]) for i in range(running.floats.shape[0]))
    top, totals = merged_totals(old_top, top, old_totals, totals, scales)
    # Ids grow from tile to tile, so that of equal scores the older one is the one with the lowest id.
    better = (best_high > old_high) | ((best_high == old_high) & (best_low > old_low))
    values = jnp.where(better, best_high, old_high), jnp.where(better, best_low, old_low), top, *totals
    for i, value in enumerate(values):
        running.floats[i] = value
    running.ids[...] = jnp.where(better, winner, row_vector(mgpu, running.ids))
    yield
    layout = mgpu.Layout.WGMMA
    logits = mgpu.layout_cast(mgpu.load(running.logits, layout=layout, optimized=False), layout)
    for g in range(tile.num_groups):
        logits = jnp.where(spread_group(better & (winner == tile.first_id + noise.GROUP * g)), tile.group(g), logits)
    running.logits[...] = logits


def mass_steps(mgpu, tile: Tile, t, running: Running):
    """Adds the mass of a tile, as `race.mass_over` and `race.merge_masses`. A generator as `race_steps`."""
    rows = t.shape[0]
    spread = over((rows, noise.GROUP))
    scale = inverse_temperature(t) * LOG2_E
    column = columns((rows, noise.GROUP))
    for g in range(tile.num_groups):
        x = tile.group(g)
        old_top, old_total, old_best = (*(row_vector(mgpu, running.floats.at[i]) for i in range(2)), row_vector(mgpu, running.ids))
        top = jnp.max(x, axis=1)
        best = lowest(x == spread(top), column, noise.GROUP, tile.first_id + noise.GROUP * g, 1)
        total = jnp.sum(jnp.exp2((x - spread(race.finite_or_zero(top))) * spread(scale)), axis=1)
        new_top, (total,) = merged_totals(old_top, top, [old_total], [total], [scale])
        running.floats[0], running.floats[1] = new_top, total
        running.ids[...] = jnp.where(top > old_top, best, old_best)
        yield
