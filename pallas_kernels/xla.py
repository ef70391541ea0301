"""The plain twin of the kernels: pure JAX on any device, the vocabulary streamed in blocks.

Memory is O(rows * block): a scan slices a block of `w`, makes its logits, and merges what the block says into the carry.
XLA copies the slice, so where all the logits are smaller than that (few rows of float32) the vocabulary is one block.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import noise, race
from pallas_kernels.finish import Draw, Piece, finish
from pallas_kernels.logits import Elementwise, block_of, existing, made_logits, made_once, processed_logits
from pallas_kernels.tiles import XlaTiles, at_most

COPIED = 2**21  # coordinates of `w` in a block
WIDTH = 64  # ids that share a kept score


def choose_tiles(h, w, vocab: int) -> XlaTiles:
    """Blocks that were fast on a CPU, and never take more memory than the short ones would. Narrower numbers are widened
    block by block: a whole table of them takes XLA ten times as long."""
    if w is None:
        return XlaTiles()
    few = at_most(h.shape[0] * vocab, XlaTiles().block * h.shape[1], if_unknown=False)
    if h.dtype == w.dtype == jnp.float32 and few:
        return whole(vocab)
    return XlaTiles(block_of_width(h.shape[1]))


def block_of_width(width: int) -> int:
    """Tokens in a block of rows of `width` coordinates: a power of two from 16 to 2048."""
    return min(2048, max(noise.GROUP, 2 ** ((COPIED // width).bit_length() - 1)))


def whole(vocab: int) -> XlaTiles:
    """The whole vocabulary in one block."""
    return XlaTiles(-(-vocab // noise.GROUP) * noise.GROUP)


def keep_order(x):
    """x, a pytree. XLA for CPUs folds no transpose behind it into a product, and makes all of x before what needs any of it."""
    return lax.platform_dependent(x, cpu=lax.optimization_barrier, default=lambda x: x)


def block_logits(h, w, start, size, vocab_axis, precision):
    """Raw logits `[size, rows]`, accumulated in float32; with w None, h holds the logits `[rows, vocab]` themselves.

    The order of the operands is that in which XLA's CPU code reads `w` along its rows: for the other one it has slow
    products (3x at one row, 6x at eight), and none at all for bfloat16 under `vmap`. Barriers keep XLA from turning one into
    the other.
    """
    if w is None:
        return lax.dynamic_slice_in_dim(h, start, size, axis=1).T.astype(jnp.float32)
    w = lax.dynamic_slice_in_dim(keep_order(w), start, size, axis=vocab_axis).astype(h.dtype)
    product = functools.partial(lax.dot_general, precision=precision, preferred_element_type=jnp.float32)
    if vocab_axis == 1:
        return keep_order(product(h, w, (((1,), (0,)), ((), ())))).T
    out = product(w, h, (((1,), (1,)), ((), ())))
    return made_once(out) if h.shape[1] == 1 else out  # of one coordinate it is a multiplication


def fold_blocks(block_fn, merge_fn, vocab, block) -> Any:
    """`merge_fn` over `block_fn(start, size)` for every block; the last may be shorter. No block is sliced twice."""
    return fold_and_keep(lambda start, size: (block_fn(start, size), None), merge_fn, vocab, block)[0]


def fold_and_keep(block_fn, merge_fn, vocab, block) -> Any:
    """`fold_blocks` over the first result of `block_fn`, and its second, an array or None, of all blocks along axis 0."""
    block = min(block, vocab)
    first, kept = block_fn(jnp.int32(0), block)

    def step(carry, start):
        new, kept = block_fn(start, block)
        return pair(carry, new), kept

    def pair(a, b):
        return merge_fn(jax.tree.map(lambda x, y: jnp.stack([x, y]), a, b))

    starts = jnp.arange(1, vocab // block, dtype=jnp.int32) * block
    out, parts = first, [kept]
    if starts.size:
        out, kept = lax.scan(step, first, starts)
        parts.append(jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), kept))
    if tail := vocab % block:
        out, start = keep_order((out, jnp.int32(vocab - tail)))  # else both blocks would be alive at once
        new, kept = block_fn(start, tail)
        out = pair(out, new)
        parts.append(kept)
    return out, jax.tree.map(lambda *x: jnp.concatenate(x), *parts)


def pad_to_group(x):
    """Fill the last group with -inf: ids past the vocabulary have no mass."""
    return jnp.pad(x, ((0, -x.shape[0] % noise.GROUP), (0, 0)), constant_values=-jnp.inf)


def processed_block(h, w, start, size, options: Elementwise, vocab_axis, precision):
    """(model logits, processed logits) of one block, `[size, rows]`."""
    own = block_of(options, start, size)
    raw = block_logits(h, w, start, size, vocab_axis, precision)
    model = made_logits(raw, options.scale, options.soft_cap, own.weight_scale)
    exists = existing(start + lax.broadcasted_iota(jnp.int32, (size, 1), 0), options)
    return processed_logits(model, Elementwise(), exists), processed_logits(model, own, exists)


def stage1(h, w, keys, t, options: Elementwise = Elementwise(), *, vocab, sample=0, vocab_axis=0, precision=None,
           with_model=False, tiles=None):
    """The race over `[0, vocab)`: (Race, Mass of the model law or None), each leaf `[rows]`.

    h `[rows, d_model]`, w `[>= vocab, d_model]` (or transposed, vocab_axis=1), keys = two uint32 `[rows]` (in a shard of a
    vocabulary three: the third is the id of its first token), t `[rows]`.
    """
    def of_block(start, size):
        model, x = processed_block(h, w, start, size, options, vocab_axis, precision)
        out = race.race_of(pad_to_group(x), keys, sample, t, start)
        return out, race.mass_over(model, jnp.float32(1.0), start) if with_model else None

    def merge(pair):
        return race.merge(pair[0], t), race.merge_masses(pair[1], jnp.float32(1.0)) if with_model else None

    return fold_blocks(of_block, merge, vocab, (tiles or choose_tiles(h, w, vocab)).block)


def piece(h, w, keys, t, options: Elementwise = Elementwise(), *, vocab, sample=0, vocab_axis=0, precision=None,
          with_model=False, tiles=None) -> Piece:
    """A draw from `[0, vocab)` and what it takes to merge it with those of other shards: stage 1 and the finish."""
    won, model_mass = stage1(h, w, keys, t, options, vocab=vocab, sample=sample, vocab_axis=vocab_axis, precision=precision,
                             with_model=with_model, tiles=tiles)
    draw = finish(h, w, keys, t, options, won, model_mass, vocab=vocab, sample=sample, vocab_axis=vocab_axis)
    return Piece(draw, won, model_mass)


def scored_piece(h, w, keys, t, options: Elementwise = Elementwise(), *, vocab, sample=0, vocab_axis=0, precision=None,
                 tiles=None) -> tuple[Piece, race.Scores]:
    """`piece`, and what the groups scored, tile by tile."""
    block = (tiles or choose_tiles(h, w, vocab)).block
    width = WIDTH if block >= vocab else math.gcd(block, WIDTH)

    def of_block(start, size):
        x = pad_to_group(processed_block(h, w, start, size, options, vocab_axis, precision)[1])
        groups = race.groups_of(*race.group_masses(x, t), keys, sample, t, start)
        in_tile = width // noise.GROUP
        high = jnp.pad(groups.high, ((0, -groups.high.shape[0] % in_tile), (0, 0)), constant_values=-jnp.inf)
        return race.merge(groups, t), race.halved(jnp.max(high.reshape(-1, in_tile, high.shape[1]), axis=1))

    won, best = fold_and_keep(of_block, lambda pair: race.merge(pair, t), vocab, block)
    out = finish(h, w, keys, t, options, won, None, vocab=vocab, sample=sample, vocab_axis=vocab_axis)
    return Piece(out, won, None), race.Scores(best, width)


def draw(*arguments, **options) -> Draw:
    """One token per row from `[0, vocab)`; arguments as in `piece`."""
    return piece(*arguments, **options).draw


def stage1_mass(h, w, t, options: Elementwise = Elementwise(), *, vocab, vocab_axis=0, precision=None, tiles=None):
    """Mass of the processed law over `[0, vocab)`, each leaf `[rows]`."""
    def of_block(start, size):
        return race.mass_over(processed_block(h, w, start, size, options, vocab_axis, precision)[1], t, start)

    return fold_blocks(of_block, lambda m: race.merge_masses(m, t), vocab, (tiles or choose_tiles(h, w, vocab)).block)


def stage1_groups(h, w, t, options: Elementwise = Elementwise(), *, vocab, vocab_axis=0, precision=None, tiles=None):
    """(top, total) of every group, `[groups, rows]`: an eighth of the logits, for draws that need more than one group."""
    def of_block(start, size):
        x = processed_block(h, w, start, size, options, vocab_axis, precision)[1]
        return race.group_masses(pad_to_group(x), t)

    block = min((tiles or choose_tiles(h, w, vocab)).block, vocab)
    starts = jnp.arange(vocab // block, dtype=jnp.int32) * block
    _, (top, total) = lax.scan(lambda _, start: (None, of_block(start, block)), None, starts)
    top, total = top.reshape(-1, h.shape[0]), total.reshape(-1, h.shape[0])
    if tail := vocab % block:
        last_top, last_total = of_block(jnp.int32(vocab - tail), tail)
        top, total = jnp.concatenate([top, last_top]), jnp.concatenate([total, last_total])
    return top, total
