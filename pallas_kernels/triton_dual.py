"""The pass over two tables on NVIDIA GPUs, through Pallas' Triton backend: what `dual` says of `max(p - c q, 0)`.

A program makes the logits of both laws for one tile of the vocabulary and one tile of rows, and writes what the residual says
there: five numbers per row for a draw, one for its mass. A draft that always proposes one token has no table: q is 1 there.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import dual, race, triton
from pallas_kernels.logits import Elementwise, model_logits, processed_logits
from pallas_kernels.triton_finish import given, like


def _kernel(
    *refs,  # of each law: its normaliser, t `[rows]` (h, w, dense options); factor f32 [rows]; u32 [rows] x num_keys; outputs
    structure, laws, wanted, sample, plt, vocab, num_rows, tiles,
):
    target, draft, factor_ref, key_refs, out_refs = jax.tree.unflatten(structure, refs)
    row_tiles = jnp.int32(pl.cdiv(num_rows, tiles.rows))  # neighbours read the same tile of a table, from the cache
    tile, first_row = lax.div(pl.program_id(0), row_tiles), lax.rem(pl.program_id(0), row_tiles) * tiles.rows
    first_id = tile * tiles.vocab
    rows = first_row + lax.broadcasted_iota(jnp.int32, (tiles.rows,), 0)
    ids = first_id + lax.broadcasted_iota(jnp.int32, (tiles.vocab, 1), 0)

    def row_vector(ref):
        return plt.load(ref.at[pl.ds(first_row, tiles.rows)], mask=rows < num_rows, other=0)

    def log_law(refs, law):
        t, known = jax.tree.map(row_vector, (refs["t"], refs["normalizer"]))
        side = dual.Side(refs["h"], None, t, Elementwise(), known)
        if refs["h"] is None:
            return dual.log_law(None, ids, side)
        x = triton.tile_logits(plt, refs["h"], refs["w"], first_id, first_row, vocab=vocab, num_rows=num_rows, tiles=tiles,
                               d_model=law["d_model"], vocab_axis=law["vocab_axis"], precision=law["precision"],
                               interleave=False)
        *dense, valid = refs["dense"] if law["has_valid"] else (*refs["dense"], None)
        options = Elementwise(**{
            name: triton.tile_option(plt, ref, first_id, first_row, vocab=vocab, num_rows=num_rows, tiles=tiles)
            for name, ref in zip(law["dense"], dense, strict=True)})
        exists = None if valid is None else ids < plt.load(valid.at[pl.ds(0, 1)])
        x = processed_logits(model_logits(x, law["scale"], law["soft_cap"], options.weight_scale), options, exists)
        return dual.log_law(x, ids, side)

    log_p, log_q = (log_law(refs, law) for refs, law in zip((target, draft), laws, strict=True))
    r = dual.log_residual(log_p, log_q, row_vector(factor_ref))
    if vocab % tiles.vocab:
        r = jnp.where(ids < vocab, r, -jnp.inf)
    if wanted == "race":
        keys, one = tuple(map(row_vector, key_refs)), jnp.ones((tiles.rows,), jnp.float32)
        out = tuple(race.race_of(r, keys, sample, one, first_id))
    else:
        out = (jnp.sum(jnp.exp(r), axis=0),)
    for ref, value in zip(out_refs, out, strict=True):
        plt.store(ref.at[tile, pl.ds(first_row, tiles.rows)], value, mask=rows < num_rows)


def _launch(target: dual.Side, draft: dual.Side, factor, keys, *, plt, wanted, sample, vocab, tiles=None, interpret=False):
    """Runs the kernel over the grid of tiles; every output is `[tiles, rows]`."""
    num_rows, sides = factor.shape[0], (target, draft)
    with_table = [side for side in sides if side.h is not None]
    widest = max(with_table, key=lambda side: side.h.dtype.itemsize * side.h.shape[1])
    tiles = tiles or triton.default_tiles(num_rows, widest.h.shape[1], widest.h.dtype, widest.w.dtype)
    num_tiles = pl.cdiv(vocab, tiles.vocab)

    def arguments_of(side):
        return {"normalizer": side.normalizer, "t": side.t, "h": side.h, "w": side.w, "dense": given(side.options)}

    laws = [{"d_model": None if side.h is None else side.h.shape[1], "vocab_axis": side.vocab_axis,
             "precision": triton.dot_precision(side.precision), "dense": tuple(side.options.dense()),
             "has_valid": side.options.valid is not None, "scale": side.options.scale, "soft_cap": side.options.soft_cap}
            for side in sides]
    inputs = (*map(arguments_of, sides), factor, list(keys))
    flat = jax.tree.leaves(inputs)
    f32, i32 = jnp.float32, jnp.int32
    kinds = {"race": (f32, f32, i32, f32, f32), "mass": (f32,)}[wanted]
    out_shape = [like(flat, (num_tiles, num_rows), kind) for kind in kinds]
    structure = jax.tree.structure((*inputs, out_shape))
    body = functools.partial(_kernel, structure=structure, laws=laws, wanted=wanted, sample=sample, plt=plt, vocab=vocab,
                             num_rows=num_rows, tiles=tiles)
    return pl.pallas_call(
        body, grid=(num_tiles * pl.cdiv(num_rows, tiles.rows),), out_shape=out_shape, interpret=interpret,
        compiler_params=plt.CompilerParams(num_warps=tiles.num_warps, num_stages=tiles.num_stages),
        name=f"gumbeljax_residual_{wanted}")(*flat)


def residual_mass(target: dual.Side, draft: dual.Side, factor, *, plt, vocab, tiles=None, interpret=False):
    """As `dual.residual_mass`."""
    out, = _launch(target, draft, factor, (), plt=plt, wanted="mass", sample=0, vocab=vocab, tiles=tiles, interpret=interpret)
    return jnp.sum(out, axis=0)


def residual_draw(target: dual.Side, draft: dual.Side, factor, keys, *, sample, plt, vocab, tiles=None, interpret=False):
    """As `dual.residual_draw`."""
    out = _launch(target, draft, factor, keys, plt=plt, wanted="race", sample=sample, vocab=vocab, tiles=tiles,
                  interpret=interpret)
    won = race.merge(race.Race(*out), jnp.float32(1.0))
    return dual.choose_in_group(target, draft, factor, keys, won, sample=sample, vocab=vocab)
