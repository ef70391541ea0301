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
from pallas_kernels.finish import Draw, Piece
from pallas_kernels.logits import Elementwise, model_logits, processed_logits
from pallas_kernels.vectors import Vectors, places, vectors_of

CHUNK = 2**14  # numbers of a table that a program reads at a time. (With fewer, Triton compiles for long: each read costs it a
# look at the whole kernel.)
AHEAD = 4  # such reads, of 16 bits, on the way at the same time: 64 registers of a thread, of 16 warps


def given(options: Elementwise) -> list:
    """The options that kernels read from memory: the dense ones in order, then `valid`."""
    dense = [x.astype(jnp.int8) if name == "mask" else x for name, x in options.dense().items()]
    return dense if options.valid is None else [*dense, jnp.asarray(options.valid, jnp.int32).reshape(1)]


def widened(w, dtype):
    """w in the dtype of h, exactly. float8 becomes bfloat16 by way of float16 and float32: Hopper converts these in pairs, and
    float16 to bfloat16 slowly."""
    if w.dtype == jnp.float8_e4m3fn and dtype == jnp.bfloat16:
        w = w.astype(jnp.float16).astype(jnp.float32)
    return w.astype(dtype)


def like(arguments, shape, dtype):
    """An output of a kernel. Inside `shard_map` it varies over the mesh axes over which any argument does."""
    varying = frozenset().union(*(jax.typeof(x).manual_axis_type.varying for x in arguments))
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.sharding.ManualAxisType(varying=varying))


def row_numbers(plt, refs: Vectors, rows, num_keys: int, mask=None):
    """(T, words of the keys) of some rows: an index, or a slice, of which the mask says what exists."""
    (t_ref, at_t), _, *words = places(refs, rows, num_keys)

    def load(ref, at):
        if mask is None:
            return plt.load(ref.at[at])
        if not any(isinstance(i, pl.Slice) for i in at):
            return jnp.broadcast_to(plt.load(ref.at[at]), mask.shape)
        return plt.load(ref.at[at], mask=mask, other=0)

    t = load(t_ref, at_t)
    return t if t.dtype == jnp.float32 else lax.bitcast_convert_type(t, jnp.float32), tuple(load(*word) for word in words)


def products(plt, h_ref, w_ref, rows, ids, keep, zero, *, d_model, vocab_axis):
    """Raw logits of the tokens `ids` `[n]`, each with its row of h, 0 where not `keep`: numbers `[n, some]` to be added up.

    Added up here, they would halt the loads of whatever follows: warps meet for that. `AHEAD` loads are under way before one is
    waited for.
    """
    chunk = min(pl.next_power_of_2(d_model), max(16, CHUNK // ids.shape[0]))
    dims = [(zero + start + lax.broadcasted_iota(jnp.int32, (chunk,), 0))[None, :] for start in range(0, d_model, chunk)]

    wanted = jnp.broadcast_to(keep[:, None], (ids.shape[0], chunk))

    def load(ref, at, d):
        exists = wanted if d_model % chunk == 0 else wanted & (d < d_model)
        return plt.load(ref.at[at], mask=exists, other=0.0)

    def of_table(d):
        return load(w_ref, (ids[:, None], d) if vocab_axis == 0 else (d, ids[:, None]), d)

    ahead = max(1, 2 * AHEAD // w_ref.dtype.itemsize)
    waiting, total = [of_table(d) for d in dims[:ahead]], jnp.zeros((ids.shape[0], chunk), jnp.float32)
    for i, d in enumerate(dims):
        h = load(h_ref, (rows[:, None], d), d)
        total += widened(waiting.pop(0), h.dtype).astype(jnp.float32) * h.astype(jnp.float32)
        if i + ahead < len(dims):
            waiting.append(of_table(dims[i + ahead]))
    return total


def group_products(plt, h_ref, w_ref, row, group, zero, *, vocab, d_model, vocab_axis, wanted=True):
    """`products` of the group whose first id is `group`, `[16, some]`; 0 unless `wanted`."""
    ids = group + lax.broadcasted_iota(jnp.int32, (noise.GROUP,), 0)
    return products(plt, h_ref, w_ref, jnp.full_like(ids, row), ids, (ids < vocab) & wanted, zero, d_model=d_model,
                    vocab_axis=vocab_axis)


def group_option(plt, ref, row, group, ids, vocab):
    """A dense option at the ids `[16, 1]` of the group whose first id is `group`."""
    where = (pl.ds(group, noise.GROUP),) if len(ref.shape) == 1 else (row, pl.ds(group, noise.GROUP))
    x = plt.load(ref.at[where], mask=(ids < vocab)[:, 0], other=0)[:, None]
    return x != 0 if x.dtype == jnp.int8 else x


def kernel(
    h_ref,  # [rows, d_model], or raw logits f32 [rows, vocab]
    *refs,  # Vectors; w [vocab, d_model] or [d_model, vocab], unless h holds the logits; dense options; valid i32 [1]; per
    # tile: high, low, winner, top, total [tiles, rows] (model top, total); outputs
    vectors, has_w, with_model, scale, soft_cap, num_keys, dense, has_valid, sample, plt, vocab, d_model, vocab_axis, num_tiles,
):
    """What one program does: the draw of its row. `vectors`: their structure."""
    vector_refs, refs = jax.tree.unflatten(vectors, refs[:vectors.num_leaves]), list(refs[vectors.num_leaves:])
    w_ref = refs.pop(0) if has_w else None
    dense_refs = {name: refs.pop(0) for name in dense}
    valid_ref = refs.pop(0) if has_valid else None
    tile_refs, out_refs = refs[:5 + 2 * with_model], refs[5 + 2 * with_model:]
    row = pl.program_id(0)
    zero = row - row  # a start that is not a constant: JAX refuses slices that it can see to end out of bounds, masked or not
    padded = pl.next_power_of_2(num_tiles)
    tile = lax.broadcasted_iota(jnp.int32, (padded,), 0)

    def of_tiles(ref, other):
        return plt.load(ref.at[pl.ds(zero, padded), row], mask=tile < num_tiles, other=other)[:, None]

    t, words = row_numbers(plt, vector_refs, row, num_keys)
    t, keys = t[None], tuple(word[None] for word in words)
    empties = (-jnp.inf, 0.0, race.NO_ID, -jnp.inf, 0.0)
    won = race.merge(race.Race(*(of_tiles(ref, other) for ref, other in zip(tile_refs, empties, strict=False))), t)
    first = jnp.where(won.winner == race.NO_ID, 0, won.winner)
    ids = first[None] + lax.broadcasted_iota(jnp.int32, (noise.GROUP, 1), 0)

    group = first.sum() if first.ndim else first
    if w_ref is None:
        raw = plt.load(h_ref.at[row, pl.ds(group, noise.GROUP)], mask=(ids < vocab)[:, 0], other=0.0)
    else:
        raw = group_products(plt, h_ref, w_ref, row, group, zero, vocab=vocab, d_model=d_model, vocab_axis=vocab_axis)
        raw = jnp.sum(raw, axis=1)

    own = Elementwise(**{name: group_option(plt, ref, row, group, ids, vocab) for name, ref in dense_refs.items()})
    model = model_logits(raw[:, None], scale, soft_cap, own.weight_scale)
    exists = ids < (vocab if valid_ref is None else jnp.minimum(plt.load(valid_ref.at[pl.ds(0, 1)]), vocab))
    x = processed_logits(model, own, exists)
    model_mass = None
    if with_model:
        top, total = (of_tiles(ref, other) for ref, other in zip(tile_refs[5:], (-jnp.inf, 0.0), strict=True))
        top, total = race.mass_of(top, total, jnp.ones_like(t))
        model_mass = race.Mass(top, won.winner, total)
    draw = plain.draw_in_group(keys, t, won, model_mass, first, ids, model, x, vocab=vocab, sample=sample)
    outputs = draw.token, draw.model_log_prob, draw.tempered_log_prob, draw.log_normalizer, won, model_mass
    for ref, value in zip(out_refs, jax.tree.leaves(outputs), strict=True):
        plt.store(ref.at[pl.ds(row, 1)], value)


def finish(h, w, keys, t, options: Elementwise, tiles: race.Race, model_tiles, *, plt, vocab, sample=0, vocab_axis=0,
           one_temperature=False, interpret=False) -> Piece:
    """As `finish.finish`, from the unmerged leaves `[tiles, rows]` of stage 1; what they merge to comes with the draw."""
    num_rows, d_model = h.shape
    num_tiles = tiles.high.shape[0]
    vectors = vectors_of(t, keys, one_temperature=one_temperature, rows_read=num_rows)
    arguments = [h, *jax.tree.leaves(vectors), *([] if w is None else [w]), *given(options), *tiles]
    if model_tiles is not None:
        arguments += [model_tiles.top, model_tiles.total]
    body = functools.partial(
        kernel, vectors=jax.tree.structure(vectors), has_w=w is not None, with_model=model_tiles is not None,
        scale=options.scale, soft_cap=options.soft_cap, num_keys=len(keys), dense=tuple(options.dense()),
        has_valid=options.valid is not None, sample=sample, plt=plt, vocab=vocab, d_model=d_model, vocab_axis=vocab_axis,
        num_tiles=num_tiles)
    f32, i32 = (like(arguments, (num_rows,), dtype) for dtype in (jnp.float32, jnp.int32))
    outputs = (i32, f32, f32, f32, race.Race(f32, f32, i32, f32, f32),
               None if model_tiles is None else race.Mass(f32, i32, f32))
    out = pl.pallas_call(
        body, grid=(num_rows,), out_shape=jax.tree.leaves(outputs), interpret=interpret, name="gumbeljax_finish",
        compiler_params=plt.CompilerParams(num_warps=16, num_stages=1))(*arguments)
    token, model_log_prob, tempered, log_normalizer, won, mass = jax.tree.unflatten(jax.tree.structure(outputs), out)
    return Piece(Draw(token, model_log_prob, tempered, tempered, log_normalizer), won, mass)
