"""Stage 2 in one launch: a program per row merges what the tiles say, scores the winning group again, draws the token.

The same steps as `race.merge` and `finish.finish`, which take ten launches of XLA's own.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import finish as plain
from pallas_kernels import noise, race
from pallas_kernels.finish import Draw
from pallas_kernels.logits import Elementwise, model_logits, processed_logits


def kernel(
    h_ref,  # [rows, d_model]
    w_ref,  # [vocab, d_model] or [d_model, vocab]
    t_ref,  # f32 [rows]
    key0_ref, key1_ref,  # u32 [rows]
    *refs,  # the dense options; per tile: high, low, winner, top, total [tiles, rows] (model top, total); outputs
    with_model, scale, soft_cap, dense, sample, plt, vocab, d_model, vocab_axis, num_tiles, chunk,
):
    """What one program does: the draw of its row."""
    refs = list(refs)
    dense_refs = {name: refs.pop(0) for name in dense}
    tile_refs, out_refs = refs[:5 + 2 * with_model], refs[5 + 2 * with_model:]
    row = pl.program_id(0)
    zero = row - row  # a start that is not a constant: JAX refuses slices that it can see to end out of bounds, masked or not
    padded = pl.next_power_of_2(num_tiles)
    tile = lax.broadcasted_iota(jnp.int32, (padded,), 0)

    def of_tiles(ref, other):
        return plt.load(ref.at[pl.ds(zero, padded), row], mask=tile < num_tiles, other=other)[:, None]

    t = plt.load(t_ref.at[row])[None]
    keys = plt.load(key0_ref.at[row])[None], plt.load(key1_ref.at[row])[None]
    empties = (-jnp.inf, 0.0, race.NO_ID, -jnp.inf, 0.0)
    won = race.merge(race.Race(*(of_tiles(ref, other) for ref, other in zip(tile_refs, empties, strict=False))), t)
    first = jnp.where(won.winner == race.NO_ID, 0, won.winner)
    ids = first[None] + lax.broadcasted_iota(jnp.int32, (noise.GROUP, 1), 0)

    total = jnp.zeros((noise.GROUP,), jnp.float32)
    group = first.sum() if first.ndim else first
    for start in range(0, d_model, chunk):  # unrolled: all loads are in flight together
        start = zero + start
        dims = start + lax.broadcasted_iota(jnp.int32, (chunk,), 0)
        token = group + lax.broadcasted_iota(jnp.int32, (noise.GROUP,), 0)
        keep = (token < vocab)[:, None] & (dims < d_model)[None, :]
        if vocab_axis == 0:
            w = plt.load(w_ref.at[pl.ds(group, noise.GROUP), pl.ds(start, chunk)], mask=keep, other=0.0)
        else:
            w = plt.load(w_ref.at[pl.ds(start, chunk), pl.ds(group, noise.GROUP)], mask=keep.T, other=0.0).T
        h = plt.load(h_ref.at[row, pl.ds(start, chunk)], mask=dims < d_model, other=0.0)
        total += jnp.sum(w.astype(h.dtype).astype(jnp.float32) * h.astype(jnp.float32)[None, :], axis=1)

    def option(ref):
        where = (pl.ds(group, noise.GROUP),) if len(ref.shape) == 1 else (row, pl.ds(group, noise.GROUP))
        x = plt.load(ref.at[where], mask=(ids < vocab)[:, 0], other=0)[:, None]
        return x != 0 if x.dtype == jnp.int8 else x

    model = model_logits(total[:, None], scale, soft_cap)
    x = processed_logits(model, Elementwise(**{name: option(ref) for name, ref in dense_refs.items()}), ids < vocab)
    model_mass = None
    if with_model:
        top, total = (of_tiles(ref, other) for ref, other in zip(tile_refs[5:], (-jnp.inf, 0.0), strict=True))
        top, total = race.mass_of(top, total, jnp.ones_like(t))
        model_mass = race.Mass(top, first, total)
    draw = plain.draw_in_group(keys, t, won, model_mass, first, ids, model, x, vocab=vocab, sample=sample)
    outputs = draw.token, draw.model_log_prob, draw.tempered_log_prob, draw.log_normalizer
    for ref, value in zip(out_refs, outputs, strict=True):
        plt.store(ref.at[pl.ds(row, 1)], value)


def finish(h, w, keys, t, options: Elementwise, tiles: race.Race, model_tiles, *, plt, vocab, sample=0, vocab_axis=0,
           interpret=False) -> Draw:
    """As `finish.finish`, from the unmerged leaves `[tiles, rows]` of stage 1."""
    num_rows, d_model = h.shape
    num_tiles = tiles.high.shape[0]
    dense = {name: x.astype(jnp.int8) if name == "mask" else x for name, x in options.dense().items()}
    arguments = [h, w, t, *keys, *dense.values(), *tiles]
    if model_tiles is not None:
        arguments += [model_tiles.top, model_tiles.total]
    body = functools.partial(
        kernel, with_model=model_tiles is not None, scale=options.scale, soft_cap=options.soft_cap,
        dense=tuple(dense), sample=sample, plt=plt, vocab=vocab, d_model=d_model,
        vocab_axis=vocab_axis, num_tiles=num_tiles, chunk=min(2048, pl.next_power_of_2(d_model)))
    out_shape = [jax.ShapeDtypeStruct((num_rows,), dtype) for dtype in (jnp.int32, jnp.float32, jnp.float32, jnp.float32)]
    token, model_log_prob, tempered, log_normalizer = pl.pallas_call(
        body, grid=(num_rows,), out_shape=out_shape, interpret=interpret, name="gumbeljax_finish",
        compiler_params=plt.CompilerParams(num_warps=16, num_stages=1))(*arguments)
    return Draw(token, model_log_prob, tempered, tempered, log_normalizer)
