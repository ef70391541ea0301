"""Stage 2 behind the Mosaic kernel: a program per row merges the pieces of the vocabulary and draws, from the logits of their
winners that stage 1 kept, or with new ones where it kept none."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import finish, noise, race
from pallas_kernels.finish import Draw, Piece
from pallas_kernels.logits import Elementwise, model_logits
from pallas_kernels.triton_finish import group_products, like, row_numbers
from pallas_kernels.vectors import Vectors, pack

MASS_ROWS = 16  # rows of a program
AT_ONCE = 128  # pieces of which all logits are read, without waiting for the winner


class Head(NamedTuple):
    """What logits come from; options without dense ones."""

    h: Any
    w: Any
    options: Elementwise
    vocab_axis: int


def kernel(
    *refs,  # Vectors; [pieces, rows], f32, winner i32: high, low, winner, top, total(, model total); logits f32
    # [pieces, rows, 16], or h and w; outputs
    vectors, with_model, num_keys, sample, plt, vocab, num_pieces, raw,
):
    """What one program does: the draw of its row. `vectors`: their structure. `raw`: how to make logits, or None."""
    vector_refs, refs = jax.tree.unflatten(vectors, refs[:vectors.num_leaves]), refs[vectors.num_leaves:]
    race_refs, refs = refs[:5 + with_model], refs[5 + with_model:]
    logits_refs, out_refs = (refs[:1], refs[1:]) if raw is None else (refs[:2], refs[2:])
    row = pl.program_id(0)
    zero = row - row  # a start that is not a constant: JAX refuses slices that it can see to end out of bounds, masked or not
    padded = pl.next_power_of_2(num_pieces)
    piece = lax.broadcasted_iota(jnp.int32, (padded,), 0)
    t, words = row_numbers(plt, vector_refs, row, num_keys)
    t, keys = t[None], tuple(word[None] for word in words)
    empties = (-jnp.inf, 0.0, race.NO_ID, -jnp.inf, 0.0, 0.0)
    high, low, winner, top, total, *model_total = (
        plt.load(ref.at[pl.ds(zero, padded), row], mask=piece < num_pieces, other=other)[:, None]
        for ref, other in zip(race_refs, empties, strict=False))
    won = race.merge(race.Race(high, low, winner, top, total), t)
    first = jnp.where(won.winner == race.NO_ID, 0, won.winner)
    is_winner = (winner == won.winner) & (winner != race.NO_ID)
    if raw is None and padded <= AT_ONCE:
        logits = plt.load(logits_refs[0].at[pl.ds(zero, padded), row, pl.ds(0, noise.GROUP)],
                          mask=jnp.broadcast_to((piece < num_pieces)[:, None], (padded, noise.GROUP)), other=0.0)
        logits = jnp.sum(jnp.where(is_winner, logits, 0.0), axis=0)[:, None]
    elif raw is None:
        where = jnp.sum(jnp.where(is_winner, piece[:, None], 0))
        logits = plt.load(logits_refs[0].at[where, row, pl.ds(0, noise.GROUP)])[:, None]
    else:
        logits = raw(plt, *logits_refs, row, jnp.sum(first), zero, vocab=vocab)
    ids = first[None] + lax.broadcasted_iota(jnp.int32, (noise.GROUP, 1), 0)
    logits = jnp.where(ids < vocab, logits, -jnp.inf)
    model_mass = None
    if with_model:
        model_top, model_sum = race.mass_of(top, model_total[0], jnp.ones_like(t))
        model_mass = race.Mass(model_top, won.winner, model_sum)
    draw = finish.draw_in_group(keys, t, won, model_mass, first, ids, logits, logits, vocab=vocab, sample=sample)
    outputs = draw.token, draw.model_log_prob, draw.tempered_log_prob, draw.log_normalizer, won, model_mass
    if num_keys > 2:
        *out_refs, words_ref = out_refs
        for i, value in enumerate(finish.said(Piece(draw, won, model_mass), keys[2].astype(jnp.int32), with_model)):
            plt.store(words_ref.at[zero + i, pl.ds(row, 1)], lax.bitcast_convert_type(value, jnp.int32))
    for ref, value in zip(out_refs, jax.tree.leaves(outputs), strict=True):
        plt.store(ref.at[pl.ds(row, 1)], value)


def group_of(plt, h_ref, w_ref, row, first, zero, *, scale, soft_cap, d_model, vocab, vocab_axis):
    """Model logits `[16, 1]` of the group whose first id is `first`."""
    x = group_products(plt, h_ref, w_ref, row, first, zero, vocab=vocab, d_model=d_model, vocab_axis=vocab_axis)
    return model_logits(jnp.sum(x, axis=1)[:, None], scale, soft_cap)


def merge(keys, t, pieces: race.Race, model_total, logits, *, plt, vocab, sample=0, vectors: Vectors | None = None,
          interpret=False) -> Piece:
    """As `finish.finish`, from the unmerged leaves `[pieces, rows]` of stage 1 and the model logits of each piece's winning
    group `[pieces, rows, 16]`, or a `Head` to make those of the winner from. Without bias and mask the processed logits are the
    model's, so the two laws share `top`. `vectors`: t and keys as stage 1 had them."""
    vectors = Vectors(pack(t, keys)) if vectors is None else vectors
    num_rows, with_model, raw = t.shape[0], model_total is not None, None
    if isinstance(logits, Head):
        raw = functools.partial(group_of, scale=logits.options.scale, soft_cap=logits.options.soft_cap,
                                d_model=logits.h.shape[1], vocab_axis=logits.vocab_axis)
    arguments = [*jax.tree.leaves(vectors), *pieces, *([model_total] if with_model else []),
                 *([logits] if raw is None else logits[:2])]
    body = functools.partial(kernel, vectors=jax.tree.structure(vectors), with_model=with_model,
                             num_keys=len(keys), sample=sample, plt=plt, vocab=vocab, num_pieces=pieces.high.shape[0], raw=raw)
    f32, i32 = (like(arguments, (num_rows,), dtype) for dtype in (jnp.float32, jnp.int32))
    # A shard sends its answer as one array: the kernel makes it, since XLA would spend a launch on it.
    words = like(arguments, (9 if with_model else 5, num_rows), jnp.int32) if len(keys) > 2 else None
    outputs = (i32, f32, f32, f32, race.Race(f32, f32, i32, f32, f32), race.Mass(f32, i32, f32) if with_model else None, words)
    out = pl.pallas_call(
        body, grid=(num_rows,), out_shape=jax.tree.leaves(outputs), interpret=interpret, name="gumbeljax_merge",
        compiler_params=plt.CompilerParams(num_warps=4 if raw is None else 16, num_stages=1))(*arguments)
    token, model_log_prob, tempered, log_normalizer, won, mass, words = jax.tree.unflatten(jax.tree.structure(outputs), out)
    return Piece(Draw(token, model_log_prob, tempered, tempered, log_normalizer), won, mass, words)


def mass_kernel(*refs, vectors, plt, num_pieces, num_rows):
    """The masses of some rows: Vectors, a Mass `[pieces, at least as many rows]`, a Mass `[rows]`."""
    vector_refs, refs = jax.tree.unflatten(vectors, refs[:vectors.num_leaves]), refs[vectors.num_leaves:]
    (top_ref, argmax_ref, total_ref), out_refs = refs[:3], refs[3:]
    first = pl.program_id(0) * MASS_ROWS
    rows = first + lax.broadcasted_iota(jnp.int32, (MASS_ROWS,), 0)
    shape = pl.next_power_of_2(num_pieces), MASS_ROWS
    exists = (lax.broadcasted_iota(jnp.int32, shape, 0) < num_pieces) & (rows < num_rows)[None]
    zero = first - first
    top, argmax, total = (plt.load(ref.at[pl.ds(zero, shape[0]), pl.ds(first, MASS_ROWS)], mask=exists, other=other)
                          for ref, other in ((top_ref, -jnp.inf), (argmax_ref, race.NO_ID), (total_ref, 0)))
    t, _ = row_numbers(plt, vector_refs, pl.ds(first, MASS_ROWS), 0, mask=rows < num_rows)
    for ref, value in zip(out_refs, race.merge_masses(race.Mass(top, argmax, total), t), strict=True):
        plt.store(ref.at[pl.ds(first, MASS_ROWS)], value, mask=rows < num_rows)


def merge_masses(pieces: race.Mass, t, *, plt, vectors: Vectors | None = None, interpret=False) -> race.Mass:
    """As `race.merge_masses` in one launch, where XLA makes four; the rows of `pieces` may be padded. `vectors`: as in
    `merge`."""
    vectors = Vectors(pack(t)) if vectors is None else vectors
    num_pieces, num_rows = pieces.top.shape[0], t.shape[0]
    arguments = *jax.tree.leaves(vectors), *pieces
    body = functools.partial(mass_kernel, vectors=jax.tree.structure(vectors), plt=plt, num_pieces=num_pieces,
                             num_rows=num_rows)
    out_shape = [like(arguments, (num_rows,), x.dtype) for x in pieces]
    return race.Mass(*pl.pallas_call(
        body, grid=(pl.cdiv(num_rows, MASS_ROWS),), out_shape=out_shape, interpret=interpret, name="gumbeljax_merge_masses",
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=1))(*arguments))
