"""Stage 1 on NVIDIA GPUs through Pallas' Triton backend: the pass over `w`, logits never leave the chip.

A program scores a tile of the vocabulary for a tile of rows and writes what the tile says: five numbers per row for a
draw, three for a mass. Tails are masked by absolute id: a zero-padded column would have logit 0 and could win.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import noise, race, triton_finish
from pallas_kernels.finish import Draw, Piece
from pallas_kernels.logits import Elementwise, model_logits, processed_logits
from pallas_kernels.tiles import TritonTiles
from pallas_kernels.triton_finish import given, like, row_numbers, widened
from pallas_kernels.vectors import vectors_of


def interleaved(x):
    """x `[n, d]` with its columns reordered inside every 16: a product of two such tables is that of the tables.

    A thread of a warpgroup multiplies columns 2t, 2t + 1, 2t + 8 and 2t + 9. Reordered, these are four neighbours in memory:
    one load of four numbers of 8 bits in place of two loads and the shuffles that join them.
    """
    n, d = x.shape
    return x.reshape(n, d // 16, 4, 2, 2).transpose(0, 1, 3, 2, 4).reshape(n, d)


def tile_logits(plt, h_ref, w_ref, first_id, first_row, *, vocab, num_rows, d_model, vocab_axis, precision, tiles, interleave):
    """Raw logits `[tile vocab, tile rows]`, f32; with w None, h holds them. `interleave`: h is interleaved, and w is to be."""
    ids = first_id + lax.broadcasted_iota(jnp.int32, (tiles.vocab,), 0)
    rows = first_row + lax.broadcasted_iota(jnp.int32, (tiles.rows,), 0)
    whole = vocab % tiles.vocab == 0 and d_model % tiles.d_model == 0
    whole_h = num_rows % tiles.rows == 0 and d_model % tiles.d_model == 0

    def step(k, acc):
        start = k * tiles.d_model
        dims = start + lax.broadcasted_iota(jnp.int32, (tiles.d_model,), 0)
        vocab_slice, d_slice = pl.ds(first_id, tiles.vocab), pl.ds(start, tiles.d_model)
        if vocab_axis == 0:
            keep = None if whole else (ids < vocab)[:, None] & (dims < d_model)[None, :]
            w = plt.load(w_ref.at[vocab_slice, d_slice], mask=keep, other=None if whole else 0.0)
        else:
            keep = None if whole else (dims < d_model)[:, None] & (ids < vocab)[None, :]
            w = plt.load(w_ref.at[d_slice, vocab_slice], mask=keep, other=None if whole else 0.0).T
        keep = None if whole_h else (rows < num_rows)[:, None] & (dims < d_model)[None, :]
        h = plt.load(h_ref.at[pl.ds(first_row, tiles.rows), d_slice], mask=keep, other=None if whole_h else 0.0)
        w = interleaved(w) if interleave else w
        return acc + plt.dot(widened(w, h.dtype), h.T, precision=precision)

    if w_ref is None:
        keep = (rows < num_rows)[:, None] & (ids < vocab)[None, :]
        return plt.load(h_ref.at[pl.ds(first_row, tiles.rows), pl.ds(first_id, tiles.vocab)], mask=keep, other=0.0).T
    acc = jnp.zeros((tiles.vocab, tiles.rows), jnp.float32)
    return lax.fori_loop(0, pl.cdiv(d_model, tiles.d_model), step, acc)


def tile_option(plt, ref, first_id, first_row, *, vocab, num_rows, tiles):
    """The tile of a dense option, `[tile vocab, 1]` or `[tile vocab, tile rows]`."""
    ids = first_id + lax.broadcasted_iota(jnp.int32, (tiles.vocab,), 0)
    if len(ref.shape) == 1:
        x = plt.load(ref.at[pl.ds(first_id, tiles.vocab)], mask=ids < vocab, other=0)[:, None]
    else:
        rows = first_row + lax.broadcasted_iota(jnp.int32, (tiles.rows,), 0)
        keep = (rows < num_rows)[:, None] & (ids < vocab)[None, :]
        x = plt.load(ref.at[pl.ds(first_row, tiles.rows), pl.ds(first_id, tiles.vocab)], mask=keep, other=0).T
    return x != 0 if x.dtype == jnp.int8 else x


def kernel(
    h_ref,  # [rows, d_model], or raw logits f32 [rows, vocab]
    *refs,  # Vectors; w [vocab, d_model] or [d_model, vocab], unless h holds the logits; the dense options, f32 or i8 [vocab]
    # or [rows, vocab]; valid i32 [1]; outputs
    vectors, has_w, wanted, with_model, scale, soft_cap, num_keys, dense, has_valid, sample, plt, vocab, num_rows, d_model,
    vocab_axis, precision, tiles, interleave, with_scores, column,
):
    """What one program does: the logits of its tile, and what they say in the `wanted` form. `vectors`: their structure."""
    vector_refs, refs = jax.tree.unflatten(vectors, refs[:vectors.num_leaves]), list(refs[vectors.num_leaves:])
    w_ref = refs.pop(0) if has_w else None
    dense_refs = {name: refs.pop(0) for name in dense}
    valid_ref = refs.pop(0) if has_valid else None
    row_tiles = jnp.int32(pl.cdiv(num_rows, tiles.rows))  # neighbours read the same tile of `w`, from the cache
    tile, first_row = lax.div(pl.program_id(0), row_tiles), lax.rem(pl.program_id(0), row_tiles) * tiles.rows
    first_id = tile * tiles.vocab
    rows = first_row + lax.broadcasted_iota(jnp.int32, (tiles.rows,), 0)
    x = tile_logits(plt, h_ref, w_ref, first_id, first_row, vocab=vocab, num_rows=num_rows, d_model=d_model,
                    vocab_axis=vocab_axis, precision=precision, tiles=tiles, interleave=interleave)
    option = functools.partial(tile_option, plt, first_id=first_id, first_row=first_row, vocab=vocab,
                               num_rows=num_rows, tiles=tiles)
    ids = first_id + lax.broadcasted_iota(jnp.int32, (tiles.vocab, 1), 0)
    allowed = None if vocab % tiles.vocab == 0 else ids < vocab
    if valid_ref is not None:
        allowed = ids < jnp.minimum(plt.load(valid_ref.at[pl.ds(0, 1)]), vocab)
    own = Elementwise(**{name: option(ref) for name, ref in dense_refs.items()})
    model = model_logits(x, scale, soft_cap, own.weight_scale)
    x = processed_logits(model, own, allowed)
    t, keys = row_numbers(plt, vector_refs, pl.ds(column + first_row, tiles.rows), num_keys, mask=rows < num_rows)
    if wanted == "race":
        groups = race.groups_of(*race.group_masses(x, t), keys, sample, t, first_id)
        won = race.merge(groups, t)
        out = tuple(won)
    elif wanted == "mass":
        out = tuple(race.mass_over(x, t, first_id))
    else:
        out = race.group_masses(x, t)
    if with_model:
        one = jnp.ones((tiles.rows,), jnp.float32)
        out += tuple(race.mass_over(processed_logits(model, Elementwise(), allowed), one, first_id))
    if with_scores:
        number = jnp.where(won.winner == race.NO_ID, 0, won.winner - first_id) // noise.GROUP
        out += (race.told(won.high, race.second_best(groups, won.winner), number),)
    for ref, value in zip(refs, out, strict=True):
        if value.ndim == 1:
            plt.store(ref.at[tile, pl.ds(first_row, tiles.rows)], value, mask=rows < num_rows)
        else:
            groups = tiles.vocab // noise.GROUP
            keep = jnp.broadcast_to((rows < num_rows)[None, :], (groups, tiles.rows))
            plt.store(ref.at[pl.ds(tile * groups, groups), pl.ds(first_row, tiles.rows)], value, mask=keep)


def is_narrow(h_dtype, w_dtype) -> bool:
    """Whether w has 8 bits and h 16."""
    return (jnp.dtype(h_dtype).itemsize, jnp.dtype(w_dtype).itemsize) == (2, 1)


def narrow_tiles(num_rows: int, d_model: int) -> TritonTiles:
    """Tiles for tables of 8 bits and an h of 16, by the instructions that a number takes to be widened and multiplied: three to
    four. Few rows: two warps, which need no `interleaved` h. Many: so many that two programs still fit, and take turns.
    (Slower on an H200: programs that score several tiles, one after the other, though there is less to merge then.)
    """
    rows = min(max(16, pl.next_power_of_2(num_rows)), 128)
    width = max(32, min(128 if rows <= 64 else 64, pl.next_power_of_2(d_model)))
    if rows == 16:
        return TritonTiles(vocab=64, rows=rows, d_model=width, num_warps=2, num_stages=4)
    return TritonTiles(vocab=128, rows=rows, d_model=width, num_warps=4, num_stages=3 if rows <= 64 else 4)


def default_tiles(num_rows: int, d_model: int, dtype, w_dtype) -> TritonTiles:
    """Tiles that were fast on an H200; any power of two is right."""
    if is_narrow(dtype, w_dtype):
        return narrow_tiles(num_rows, d_model)
    rows = min(max(16, pl.next_power_of_2(num_rows)), 64)
    width = max(16, min(128, pl.next_power_of_2(d_model)))
    if jnp.dtype(dtype).itemsize == 4:  # float32 operands take twice the shared memory
        width = min(width, 32 if rows > 32 else 64)
    vocab = 64 if rows <= 32 else 128
    return TritonTiles(vocab=vocab, rows=rows, d_model=min(width, 64 if rows > 32 else 128),
                       num_warps=4 if rows <= 32 else 8, num_stages=4 if rows <= 32 else 3)


def dot_precision(precision):
    """Triton's name for a lax.Precision: HIGH is three TF32 products, DEFAULT one."""
    names = {lax.Precision.HIGH: lax.DotAlgorithmPreset.TF32_TF32_F32_X3,
             lax.Precision.DEFAULT: lax.DotAlgorithmPreset.TF32_TF32_F32}
    return names.get(precision, precision)


def stored_tiles(num_rows: int) -> TritonTiles:
    """Tiles of stored logits, 4,096 a program."""
    rows = min(pl.next_power_of_2(num_rows), 16)
    return TritonTiles(vocab=4096 // rows, rows=rows, stored=True)


def operands(h, w, tiles: TritonTiles, *, vocab, vocab_axis, precision):
    """(h, w), or (raw logits, None) where they are to be stored."""
    if not tiles.stored or w is None:
        return h, w
    table = lax.slice_in_dim(w, 0, vocab, axis=vocab_axis)
    contract = ((1,), (1 - vocab_axis,)), ((), ())
    return lax.dot_general(h, widened(table, h.dtype), contract, precision=precision, preferred_element_type=jnp.float32), None


def launch(h, w, keys, t, options: Elementwise, *, plt, wanted, vocab, sample, vocab_axis, precision, with_model, tiles,
           interpret, one_temperature=False, with_scores=False, vectors=None, column=0):
    """Runs the kernel over the grid of tiles; every output is `[tiles, rows]` (or `[groups, rows]`). With w None, h holds the
    raw logits `[rows, vocab]`. `with_scores`: the last output is `race.Scores.told`. `one_temperature`: t is one
    number, broadcast. `vectors`: what is to be read of these rows, from `column` on, where it was made for more than them."""
    num_rows, d_model = h.shape
    tiles = tiles or default_tiles(num_rows, d_model, h.dtype, w.dtype)
    h, w = operands(h, w, tiles, vocab=vocab, vocab_axis=vocab_axis, precision=precision)
    num_tiles = pl.cdiv(vocab, tiles.vocab)
    f32, i32 = jnp.float32, jnp.int32
    kinds = {"race": (f32, f32, i32, f32, f32), "mass": (f32, i32, f32), "groups": (f32, f32)}[wanted]
    height = num_tiles * (tiles.vocab // noise.GROUP if wanted == "groups" else 1)
    words = keys if wanted == "race" else ()
    if vectors is None:
        vectors = vectors_of(t, words, one_temperature=one_temperature, rows_read=num_rows)
    interleave = (w is not None and is_narrow(h.dtype, w.dtype) and tiles.num_warps % 4 == 0 and d_model % 16 == 0
                  and vocab_axis == 0)
    arguments = [interleaved(h) if interleave else h, *jax.tree.leaves(vectors), *([] if w is None else [w]), *given(options)]
    out_shape = [like(arguments, (height, num_rows), kind) for kind in kinds]
    if with_model:
        out_shape += [like(arguments, (num_tiles, num_rows), kind) for kind in (f32, i32, f32)]
    if with_scores:
        out_shape.append(like(arguments, (num_tiles, num_rows), i32))
    body = functools.partial(
        kernel, vectors=jax.tree.structure(vectors), has_w=w is not None, wanted=wanted, with_model=with_model,
        scale=options.scale, soft_cap=options.soft_cap, num_keys=len(words),
        dense=tuple(options.dense()), has_valid=options.valid is not None, sample=sample, plt=plt, vocab=vocab,
        num_rows=num_rows, d_model=d_model, vocab_axis=vocab_axis, precision=dot_precision(precision), tiles=tiles,
        interleave=interleave, with_scores=with_scores, column=column)
    return pl.pallas_call(
        body, grid=(num_tiles * pl.cdiv(num_rows, tiles.rows),), out_shape=out_shape, interpret=interpret,
        compiler_params=plt.CompilerParams(num_warps=tiles.num_warps, num_stages=tiles.num_stages),
        name=f"gumbeljax_{wanted}")(*arguments)


def piece(*arguments, **options) -> Piece:
    """As `xla.piece`. `plt` is jax's Triton module."""
    return _piece(*arguments, **options, with_scores=False)[0]


def scored_piece(*arguments, **options) -> tuple[Piece, race.Scores]:
    """As `xla.scored_piece`."""
    drawn, told, width = _piece(*arguments, **options, with_scores=True)
    return drawn, race.Scores(told, width)


def _piece(h, w, keys, t, options: Elementwise = Elementwise(), *, plt, vocab, sample=0, vocab_axis=0, precision=None,
           with_model=False, tiles=None, interpret=False, one_temperature=False, with_scores):
    tiles = tiles or default_tiles(h.shape[0], h.shape[1], h.dtype, w.dtype)
    h, w = operands(h, w, tiles, vocab=vocab, vocab_axis=vocab_axis, precision=precision)
    out = launch(h, w, keys, t, options, plt=plt, wanted="race", vocab=vocab, sample=sample, vocab_axis=vocab_axis,
                 precision=precision, with_model=with_model, tiles=tiles, interpret=interpret, one_temperature=one_temperature,
                 with_scores=with_scores)
    model = race.Mass(*out[5:8]) if with_model else None
    drawn = triton_finish.finish(h, w, keys, t, options, race.Race(*out[:5]), model, plt=plt, vocab=vocab, sample=sample,
                                 vocab_axis=vocab_axis, one_temperature=one_temperature, interpret=interpret)
    return drawn, out[-1], tiles.vocab


def race_pieces(h, w, keys, t, options: Elementwise = Elementwise(), *, plt, vocab, sample=0, vocab_axis=0, precision=None,
                tiles=None, vectors=None, interpret=False) -> tuple[race.Race, race.Scores]:
    """What the tiles of the vocabulary say, `[tiles, rows]`, and their groups' scores. `vectors`: as in `launch`."""
    tiles = tiles or default_tiles(h.shape[0], h.shape[1], h.dtype, w.dtype)
    *won, told = launch(h, w, keys, t, options, plt=plt, wanted="race", vocab=vocab, sample=sample, vocab_axis=vocab_axis,
                        precision=precision, with_model=False, tiles=tiles, interpret=interpret, with_scores=True,
                        vectors=vectors)
    return race.Race(*won), race.Scores(told, tiles.vocab)


def draw(*arguments, **options) -> Draw:
    """As `xla.draw`; arguments as in `piece`."""
    return piece(*arguments, **options).draw


def mass_pieces(h, w, t, options: Elementwise = Elementwise(), *, plt, vocab, vocab_axis=0, precision=None, tiles=None,
                vectors=None, column=0, one_temperature=False, interpret=False) -> race.Mass:
    """The masses of the tiles of the vocabulary, `[tiles, rows]`. `vectors`, `column`: as in `launch`."""
    return race.Mass(*launch(h, w, None, t, options, plt=plt, wanted="mass", vocab=vocab, sample=0, vocab_axis=vocab_axis,
                             precision=precision, with_model=False, tiles=tiles, one_temperature=one_temperature,
                             vectors=vectors, column=column, interpret=interpret))


def stage1_mass(h, w, t, *arguments, **options) -> race.Mass:
    """As `xla.stage1_mass`: Mass of the processed law, each leaf `[rows]`."""
    return race.merge_masses(mass_pieces(h, w, t, *arguments, **options), t)


def stage1_groups(h, w, t, options: Elementwise = Elementwise(), *, plt, vocab, vocab_axis=0, precision=None, tiles=None,
                  one_temperature=False, interpret=False):
    """As `xla.stage1_groups`: (top, total) of every group, `[groups, rows]`."""
    top, total = launch(h, w, None, t, options, plt=plt, wanted="groups", vocab=vocab, sample=0, vocab_axis=vocab_axis,
                        precision=precision, with_model=False, tiles=tiles, one_temperature=one_temperature,
                        interpret=interpret)
    groups = pl.cdiv(vocab, noise.GROUP)
    return top[:groups], total[:groups]
