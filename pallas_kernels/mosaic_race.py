"""What a warpgroup of the Mosaic GPU kernel makes of the logits of a tile, in steps short enough to hide behind products.

Rows run along axis 0 here. Row vectors are held by four lanes each, so work on them is done four times over: the masses of the
groups are put into one matrix of a column each before the noise. Reductions run along the vocabulary only: one across warps
would share scratch memory between the warpgroups.
"""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import noise, race
from pallas_kernels.logits import LOG2_E

LEAST_COLUMNS = 8  # of a matrix with a column for each group: what the layout wants a multiple of


class Tile(NamedTuple):
    """The logits of a tile: `group(g)` is `[rows, 16]`, the g-th group of 16 ids."""

    group: Any
    num_groups: int
    first_id: Any


def sample_of(group):
    """Which logit of a group stands for it in a sample of the row: any other one in the next group."""
    return (5 * (group + (group >> 4))) & (noise.GROUP - 1)


def columns(shape):
    """The number of its column at every entry."""
    return lax.broadcasted_iota(jnp.int32, shape, 1)


def over(shape):
    """Broadcasts a row vector over a `[rows, n]` tile."""
    return lambda v: lax.broadcast_in_dim(v, shape, (0,))


def row_vector(mgpu, ref, index, size: int):
    """Loads `[size]` rows; a number that has no slice in its index is that of all of them."""
    layout = mgpu.Layout.WGMMA.reduce(1)
    if not any(isinstance(i, pl.Slice) for i in index):
        return mgpu.layout_cast(jnp.full((size,), ref[index]), layout)
    return mgpu.layout_cast(mgpu.load(ref.at[index], layout=layout, optimized=False), layout)


def store(mgpu, ref, value):
    """Stores to global memory, parts of its lines too: jax 0.12 refuses these in an assignment, the only way before."""
    if hasattr(mgpu, "store"):
        mgpu.store(ref, value, optimized=False)
    else:
        ref[...] = value


def finite(top):
    """`top`, or a finite number where it is -inf, so that `-inf - top` is -inf and not NaN. One instruction, where
    `race.finite_or_zero` takes two."""
    return jnp.maximum(top, -3.4e38)


def merged_totals(old_top, new_top, old, new, scales):
    """The larger top, and the totals of both sides rescaled to it."""
    top = jnp.maximum(old_top, new_top)
    old_down, new_down = (x - finite(top) for x in (old_top, new_top))
    return top, [a * jnp.exp2(old_down * scale) + b * jnp.exp2(new_down * scale)
                 for a, b, scale in zip(old, new, scales, strict=True)]


def race_steps(mgpu, tile: Tile, t, scale, words, sample, best, keep=None):
    """Adds the race over a tile to `best`, as `race.race_of` and `race.merge`. `scale` is `log2(e) / T`. `keep` is given what
    `race.Scores` says of the tile.

    `best` is what the tiles before said, row vectors: (high, low, top, total[, model total], winner), and the winner's logits
    `[rows, 16]`. A generator: each `next` does one step, and the last thing that it yields is the new `best`.
    """
    (*old_scores, old_top), old_totals, old_winner, old_logits = best[:3], best[3:-2], best[-2], best[-1]
    rows = t.shape[0]
    num_columns = pl.cdiv(tile.num_groups, LEAST_COLUMNS) * LEAST_COLUMNS
    shape = (rows, num_columns)
    column, spread, spread_group = columns(shape), over(shape), over((rows, noise.GROUP))
    scales = [scale, jnp.full_like(t, LOG2_E)][:len(old_totals)]
    tops, totals = jnp.full(shape, -jnp.inf, jnp.float32), [jnp.zeros(shape, jnp.float32) for _ in scales]
    for g in range(tile.num_groups):
        x = tile.group(g)
        top = jnp.max(x, axis=1)
        below = x - spread_group(finite(top))
        tops = jnp.where(column == g, spread(top), tops)
        for i, factor in enumerate(scales):
            total = jnp.sum(jnp.exp2(below * spread_group(factor)), axis=1)
            totals[i] = jnp.where(column == g, spread(total), totals[i])
        yield
    tops, *totals = (mgpu.layout_cast(v, mgpu.Layout.WGMMA) for v in (tops, *totals))
    ids = race.global_ids((None, None, *map(spread, words[2:])), tile.first_id + noise.GROUP * column)
    stream = jnp.full(shape, noise.stream(noise.DRAW, sample, noise.GROUP_LEVEL))
    gumbel = noise.gumbel(spread(words[0]), spread(words[1]), stream, ids)
    yield
    high, low = race.scores(tops, totals[0], gumbel, spread(t))
    best_high = jnp.max(high, axis=1)
    tied = high == spread(best_high)
    best_low = jnp.max(jnp.where(tied, low, -jnp.inf), axis=1)
    # The first column by a maximum: this backend reduces no minimum of integers.
    first = jnp.max(jnp.where(tied & (low == spread(best_low)), num_columns - column, 0), axis=1)
    winner = jnp.where(first > 0, tile.first_id + noise.GROUP * (num_columns - first), race.NO_ID)
    if keep is not None:
        second = jnp.max(jnp.where(column == spread(num_columns - first), -jnp.inf, high), axis=1)
        keep(race.told(best_high, second, num_columns - first))
    yield
    top = jnp.max(tops, axis=1)
    down = tops - spread(finite(top))
    totals = [jnp.sum(total * jnp.exp2(down * spread(factor)), axis=1) for total, factor in zip(totals, scales, strict=True)]
    top, totals = merged_totals(old_top, top, old_totals, totals, scales)
    # Ids grow from tile to tile, so that of equal scores the older one is the one with the lowest id.
    old_high, old_low = old_scores
    better = (best_high > old_high) | ((best_high == old_high) & (best_low > old_low))
    yield
    logits = old_logits
    for g in range(tile.num_groups):
        logits = jnp.where(spread_group(better & (winner == tile.first_id + noise.GROUP * g)), tile.group(g), logits)
    yield (jnp.where(better, best_high, old_high), jnp.where(better, best_low, old_low), top, *totals,
           jnp.where(better, winner, old_winner), logits)


def mass_steps(tile: Tile, scale, best):
    """Adds the mass of a tile to `best`, (top, total, argmax), as `race.mass_over` and `race.merge_masses`. A generator as
    `race_steps`. Groups are put together entry by entry, so that lanes meet once a tile."""
    old_top, old_total, old_id = best
    shape = (scale.shape[0], noise.GROUP)
    column, spread, groups = columns(shape), over(shape), range(tile.num_groups)
    top = jnp.max(functools.reduce(jnp.maximum, map(tile.group, groups)), axis=1)
    yield
    total, first = jnp.zeros(shape, jnp.float32), jnp.zeros(shape, jnp.int32)
    end = noise.GROUP * tile.num_groups
    for g in groups:
        x = tile.group(g)
        total += jnp.exp2((x - spread(finite(top))) * spread(scale))
        first = jnp.maximum(first, jnp.where(x == spread(top), end - noise.GROUP * g - column, 0))
        yield
    first = jnp.max(first, axis=1)
    best_id = jnp.where(first > 0, tile.first_id + end - first, race.NO_ID)
    new_top, (total,) = merged_totals(old_top, top, [old_total], [jnp.sum(total, axis=1)], [scale])
    yield new_top, total, jnp.where(top > old_top, best_id, old_id)


def logits_steps(tile: Tile, scale, best, keep):
    """Adds the mass of a tile to `best`, row vectors (top, total[, model total]), as `mass_steps`; `keep(g, top, sample)` is
    given of every group its largest logit and that of `sample_of`. A generator as `race_steps`."""
    old_top, *old_totals = best
    shape = (scale.shape[0], noise.GROUP)
    column, spread, groups = columns(shape), over(shape), range(tile.num_groups)
    scales = [scale, jnp.full_like(scale, LOG2_E)][:len(old_totals)]
    tops = []
    for g in groups:
        x = tile.group(g)
        tops.append(jnp.max(x, axis=1))
        chosen = sample_of(lax.div(tile.first_id, jnp.int32(noise.GROUP)) + g)
        keep(g, tops[-1], jnp.max(jnp.where(column == chosen, x, -jnp.inf), axis=1))
        yield
    top = functools.reduce(jnp.maximum, tops)
    totals = [jnp.zeros(shape, jnp.float32) for _ in scales]
    for g in groups:
        below = tile.group(g) - spread(finite(top))
        totals = [total + jnp.exp2(below * spread(factor)) for total, factor in zip(totals, scales, strict=True)]
        yield
    top, totals = merged_totals(old_top, top, old_totals, [jnp.sum(total, axis=1) for total in totals], scales)
    yield top, *totals
