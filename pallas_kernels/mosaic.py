"""Stage 1 on NVIDIA Hopper through Pallas' Mosaic GPU backend: TMA loads, wgmma products, the race in the epilogue.

Persistent and warp-specialised: one warpgroup fetches, two multiply and race. `h` is the M operand (rows padded to 64)
and `w` the N operand, so a group is 16 neighbouring accumulators of a row and its reduction stays inside a quad of lanes.
Reductions run along the vocabulary only: one across warps would share scratch memory between the two warpgroups.

bfloat16 and float16 tables whose rows TMA can address; the elementwise options that are constants of the model.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import noise, race, triton_finish
from pallas_kernels.finish import Draw, Piece
from pallas_kernels.logits import Elementwise, inverse_temperature, model_logits
from pallas_kernels.tiles import MosaicTiles

LOG2_E = 1.4426950408889634


def why_not(h, w, options, vocab_axis: int) -> str | None:
    """Why this kernel cannot run a call, or None if it can."""
    if h.dtype != w.dtype or h.dtype.name not in ("bfloat16", "float16"):
        return f"it multiplies bfloat16 or float16 by the same, not {h.dtype} by {w.dtype}"
    if w.shape[vocab_axis] % (8, 64)[vocab_axis] or h.shape[1] % 64:
        return (f"its bulk copies need a vocabulary that is a multiple of {(8, 64)[vocab_axis]} and d_model of 64, "
                f"not w {list(w.shape)}")
    if options.dense():
        return "it takes neither logit_bias nor mask nor processors"
    if options.valid is not None:
        return "it takes no shard of a padded vocabulary"
    return None


def choose_tiles(num_rows: int, d_model: int) -> MosaicTiles:
    """Tiles that were fast on an H200."""
    if num_rows <= 64:
        return MosaicTiles(split_rows=False, vocab=64, d_model=128 if d_model % 128 == 0 else 64, steps=4)
    if num_rows <= 128:
        return MosaicTiles(split_rows=True, vocab=128, d_model=64, steps=6)
    return MosaicTiles(split_rows=True, vocab=256, d_model=64, steps=4)


def over(shape):
    """Broadcasts a row vector over a `[rows, n]` tile."""
    return lambda v: lax.broadcast_in_dim(v, shape, (0,))


def race_in_registers(mgpu, x, words, t, inverse_t, first_id, with_model):
    """(high, low, top, total[, model total], winner) `[rows]` of logits `[rows, n]`, as `race.race_of` with rows first.

    Group masses are gathered into one `[rows, groups]` matrix before the noise: row vectors are held by four lanes each,
    so noise on them would be made four times over.
    """
    rows, groups = x.shape[0], x.shape[1] // noise.GROUP
    shape = (rows, -(-groups // 8) * 8)  # the layout wants a multiple of 8 columns; spare ones have no mass
    column = lax.broadcasted_iota(jnp.int32, shape, 1)
    spread, spread_group = over(shape), over((rows, noise.GROUP))
    scales = [inverse_t * LOG2_E] + ([jnp.full_like(inverse_t, LOG2_E)] if with_model else [])
    tops, totals = jnp.full(shape, -jnp.inf, jnp.float32), [jnp.zeros(shape, jnp.float32) for _ in scales]
    for g in range(groups):
        part = x[:, g * noise.GROUP:(g + 1) * noise.GROUP]
        top = jnp.max(part, axis=1)
        below = part - spread_group(race.finite_or_zero(top))
        tops = jnp.where(column == g, spread(top), tops)
        for i, scale in enumerate(scales):
            total = jnp.sum(jnp.exp2(below * spread_group(scale)), axis=1)
            totals[i] = jnp.where(column == g, spread(total), totals[i])
    tops, *totals = (mgpu.layout_cast(v, mgpu.Layout.WGMMA) for v in (tops, *totals))
    ids = race.global_ids((None, None, *map(spread, words[2:])), first_id + noise.GROUP * column)
    stream = jnp.full(shape, noise.stream(noise.DRAW, 0, noise.GROUP_LEVEL))
    gumbel = noise.gumbel(spread(words[0]), spread(words[1]), stream, ids)
    high, low = race.scores(tops, totals[0], gumbel, spread(t))
    best_high = jnp.max(high, axis=1)
    tied = high == spread(best_high)
    best_low = jnp.max(jnp.where(tied, low, -jnp.inf), axis=1)
    winner = lowest(tied & (low == spread(best_low)), column, shape[1], first_id, noise.GROUP)
    top = jnp.max(tops, axis=1)
    down = tops - spread(race.finite_or_zero(top))
    sums = [jnp.sum(total * jnp.exp2(down * spread(scale)), axis=1) for total, scale in zip(totals, scales, strict=True)]
    return best_high, best_low, top, *sums, winner


def mass_in_registers(x, inverse_t, first_id):
    """(top, total, argmax) `[rows]` of logits `[rows, n]`, as `race.mass_over` with rows first."""
    spread = over(x.shape)
    top = jnp.max(x, axis=1)
    total = jnp.sum(jnp.exp2((x - spread(race.finite_or_zero(top))) * spread(inverse_t * LOG2_E)), axis=1)
    column = lax.broadcasted_iota(jnp.int32, x.shape, 1)
    return top, total, lowest(x == spread(top), column, x.shape[1], first_id, 1)


def lowest(condition, column, n, first_id, step):
    """`first_id + step * column` of the first column where `condition` holds, or NO_ID. By a maximum: this backend
    reduces no minimum of integers."""
    first = jnp.max(jnp.where(condition, n - column, 0), axis=1)
    return jnp.where(first > 0, first_id + step * (n - first), race.NO_ID)


def launch(h, w, keys, t, options, *, mgpu, wanted, vocab, vocab_axis, with_model, tiles, num_sms):
    """Runs the kernel; float outputs and ids, each `[tiles, rows padded to whole tiles]`."""
    if reason := why_not(h, w, options, vocab_axis):
        raise NotImplementedError(f"implementation='mosaic' cannot run this call: {reason}; leave implementation out.")
    num_rows, d_model = h.shape
    tiles = tiles or choose_tiles(num_rows, d_model)
    m, n, k = 64, tiles.vocab, tiles.d_model
    cta_m, cta_n = (2 * m, n) if tiles.split_rows else (m, 2 * n)
    padding = -num_rows % cta_m
    rows = num_rows + padding
    h = jnp.pad(h, ((0, padding), (0, 0)))
    vectors = [jnp.pad(t, (0, padding), constant_values=1.0)]
    if wanted == "race":
        vectors += [jnp.pad(x, (0, padding)) for x in keys]
    row_tiles, vocab_tiles = rows // cta_m, pl.cdiv(vocab, cta_n)
    warpgroup_tiles = vocab_tiles if tiles.split_rows else 2 * vocab_tiles
    num_floats = 2 if wanted == "mass" else 4 + with_model

    def block_spec(shape, index_map):
        bits = jnp.dtype(h.dtype).itemsize * 8
        swizzle = mgpu.find_swizzle(shape[1] * bits)
        transforms = (mgpu.TilingTransform((8, swizzle * 8 // bits)), mgpu.SwizzleTransform(swizzle))
        return mgpu.BlockSpec(shape, index_map, transforms=transforms, memory_space=mgpu.SMEM)

    h_spec = block_spec((cta_m, k), lambda i: (0, i))
    w_spec = block_spec((cta_n, k), lambda i: (0, i)) if vocab_axis == 0 else block_spec((k, cta_n), lambda i: (i, 0))

    def kernel(h_gmem, w_gmem, t_gmem, *refs):
        words_gmem, (*floats_gmem, ids_gmem) = refs[:len(vectors) - 1], refs[len(vectors) - 1:]

        def pipeline(body, context):
            return mgpu.emit_pipeline_warp_specialized(
                body, grid=(d_model // k,), in_specs=[h_spec, w_spec], memory_registers=40, wg_axis="wg", num_compute_wgs=2,
                max_concurrent_steps=tiles.steps, compute_context=context)

        nothing = lambda *_: None  # noqa: E731
        buffers = pipeline(nothing, nothing).get_allocations(h_gmem, w_gmem)

        @functools.partial(pl.run_scoped, buffers=buffers, floats=mgpu.SMEM((2, num_floats, m), jnp.float32),
                           ids=mgpu.SMEM((2, m), jnp.int32), collective_axes="wg")
        def _(buffers, floats, ids):
            wg = lax.axis_index("wg")

            @mgpu.nd_loop((row_tiles * vocab_tiles,), collective_axes="sm")
            def _(loop):
                # Neighbouring programs share a vocabulary tile, so that its second reading comes from L2.
                row_tile, vocab_tile = lax.rem(loop.index[0], row_tiles), lax.div(loop.index[0], row_tiles)
                first_row = row_tile * cta_m + (wg * m if tiles.split_rows else 0)
                first_id = vocab_tile * cta_n + (0 if tiles.split_rows else wg * n)
                my_rows = pl.ds(wg * m, m) if tiles.split_rows else slice(None)
                my_vocab = slice(None) if tiles.split_rows else pl.ds(wg * n, n)

                def row_vector(ref):
                    layout = mgpu.Layout.WGMMA.reduce(1)
                    return mgpu.layout_cast(mgpu.load(ref.at[pl.ds(first_row, m)], layout=layout, optimized=False), layout)

                def epilogue(run):
                    @functools.partial(pl.run_scoped, accumulator=mgpu.ACC((m, n), jnp.float32))
                    def _(accumulator):
                        run(accumulator)
                        x = model_logits(accumulator[...], options.scale, options.soft_cap)
                        if vocab % cta_n:
                            token = first_id + lax.broadcasted_iota(jnp.int32, (m, n), 1)
                            x = jnp.where(token < vocab, x, -jnp.inf)
                        my_t = row_vector(t_gmem)
                        inverse_t = inverse_temperature(my_t)
                        if wanted == "mass":
                            *values, best = mass_in_registers(x, inverse_t, first_id)
                        else:
                            my_words = tuple(map(row_vector, words_gmem))
                            *values, best = race_in_registers(mgpu, x, my_words, my_t, inverse_t, first_id, with_model)
                        mgpu.wait_smem_to_gmem(0, wait_read_only=True)
                        for i, value in enumerate(values):
                            floats[wg, i] = value
                        ids[wg] = best
                        mgpu.commit_smem()
                        tile = vocab_tile if tiles.split_rows else 2 * vocab_tile + wg
                        for i in range(num_floats):
                            mgpu.copy_smem_to_gmem(floats.at[wg, i], floats_gmem[i].at[tile, pl.ds(first_row, m)])
                        mgpu.copy_smem_to_gmem(ids.at[wg], ids_gmem.at[tile, pl.ds(first_row, m)])

                def step(_, h_smem, w_smem, accumulator):
                    table = w_smem.at[my_vocab].transpose((1, 0)) if vocab_axis == 0 else w_smem.at[:, my_vocab]
                    mgpu.wgmma(accumulator, h_smem.at[my_rows], table)
                    mgpu.wgmma_wait(0)
                    return accumulator

                my_w = w_gmem.at[(slice(None),) * vocab_axis + (pl.ds(vocab_tile * cta_n, cta_n),)]
                pipeline(step, epilogue)(h_gmem.at[pl.ds(row_tile * cta_m, cta_m), :], my_w, allocations=buffers)

        mgpu.wait_smem_to_gmem(0, wait_read_only=True)

    return mgpu.kernel(
        kernel, out_type=[jax.ShapeDtypeStruct((warpgroup_tiles, rows), dtype)
                          for dtype in (jnp.float32,) * num_floats + (jnp.int32,)],
        grid=(num_sms,), grid_names=("sm",), num_threads=3, thread_name="wg",
        compiler_params=mgpu.CompilerParams(lowering_semantics=mgpu.LoweringSemantics.Warpgroup))(
            h, w, *vectors)


def piece(h, w, keys, t, options=Elementwise(), *, mgpu, plt, vocab, sample=0, vocab_axis=0, precision=None,
          with_model=False, tiles=None, num_sms=132) -> Piece:
    """As `xla.piece`. `mgpu` and `plt` are jax's Mosaic GPU and Triton modules: the finish is a Triton kernel."""
    del precision  # products of 16-bit floats are exact in float32
    high, low, top, total, *model, winner = launch(
        h, w, keys, t, options, mgpu=mgpu, wanted="race", vocab=vocab, vocab_axis=vocab_axis, with_model=with_model,
        tiles=tiles, num_sms=num_sms)
    # Without bias and mask the processed logits are the model's, so the two laws share `top`.
    model = race.Mass(top, winner, model[0]) if with_model else None
    return triton_finish.finish(h, w, keys, t, options, race.Race(high, low, winner, top, total), model, plt=plt, vocab=vocab,
                                sample=sample, vocab_axis=vocab_axis)


def draw(*arguments, **options) -> Draw:
    """As `xla.draw`; arguments as in `piece`."""
    return piece(*arguments, **options).draw


def stage1_mass(h, w, t, options=Elementwise(), *, mgpu, vocab, vocab_axis=0, precision=None, tiles=None, num_sms=132):
    """As `xla.stage1_mass`: Mass of the processed law, each leaf `[rows]`."""
    del precision
    out = launch(h, w, None, t, options, mgpu=mgpu, wanted="mass", vocab=vocab, vocab_axis=vocab_axis, with_model=False,
                 tiles=tiles, num_sms=num_sms)
    top, total, argmax = (x[:, :h.shape[0]] for x in out)
    return race.merge_masses(race.Mass(top, argmax, total), t)
