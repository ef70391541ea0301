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

from pallas_kernels import noise, race
from pallas_kernels.logits import inverse_temperature, model_logits
from pallas_kernels.tiles import MosaicTiles

LOG2_E = 1.4426950408889634


def why_not(h, w, options, vocab_axis: int) -> str | None:
    """Why this kernel cannot run a call, or None if it can."""
    if h.dtype != w.dtype or h.dtype.name not in ("bfloat16", "float16"):
        return f"it multiplies bfloat16 or float16 by the same, not {h.dtype} by {w.dtype}"
    if w.shape[0] % 8 or w.shape[1] % 64 or h.shape[1] % 64:
        return f"its bulk copies need a vocabulary that is a multiple of 8 and d_model of 64, not w {list(w.shape)}"
    if vocab_axis == 1:
        return "it reads w [vocab, d_model] only"
    if options.bias is not None or options.mask is not None:
        return "it takes neither logit_bias nor mask"
    return None


def choose_tiles(num_rows: int, d_model: int) -> MosaicTiles:
    """Tiles that were fast on an H200."""
    if num_rows <= 64:
        return MosaicTiles(split_rows=False, vocab=128, d_model=64, steps=4)
    if num_rows <= 128 and d_model % 128 == 0:
        return MosaicTiles(split_rows=True, vocab=256, d_model=128, steps=2)
    return MosaicTiles(split_rows=True, vocab=256, d_model=64, steps=4)


def race_in_registers(mgpu, x, words, t, inverse_t, first_id, tile_rows):
    """(high, low, winner, top, total) `[tile_rows]` of logits `[tile_rows, n]`, as `race.race_of` with rows first.

    Group masses are gathered into one `[rows, groups]` matrix before the noise: row vectors are held by four lanes each,
    so noise on them would be made four times over.
    """
    groups = x.shape[1] // noise.GROUP
    shape = (tile_rows, -(-groups // 8) * 8)  # the layout wants a multiple of 8 columns; spare ones have no mass
    column = lax.broadcasted_iota(jnp.int32, shape, 1)
    spread = lambda v, like=shape: lax.broadcast_in_dim(v, like, (0,))  # noqa: E731
    tops, totals = jnp.full(shape, -jnp.inf, jnp.float32), jnp.zeros(shape, jnp.float32)
    scale = inverse_t * LOG2_E
    for g in range(groups):
        part = x[:, g * noise.GROUP:(g + 1) * noise.GROUP]
        top = jnp.max(part, axis=1)
        like = (tile_rows, noise.GROUP)
        total = jnp.sum(jnp.exp2((part - spread(race.finite_or_zero(top), like)) * spread(scale, like)), axis=1)
        tops = jnp.where(column == g, spread(top), tops)
        totals = jnp.where(column == g, spread(total), totals)
    tops, totals = (mgpu.layout_cast(v, mgpu.Layout.WGMMA) for v in (tops, totals))
    ids = first_id + noise.GROUP * column
    stream = jnp.full(shape, noise.stream(noise.DRAW, 0, noise.GROUP_LEVEL))
    gumbel = noise.gumbel(spread(words[0]), spread(words[1]), stream, ids.astype(jnp.uint32))
    high, low = race.scores(tops, totals, gumbel, spread(t))
    best_high = jnp.max(high, axis=1)
    tied = high == spread(best_high)
    best_low = jnp.max(jnp.where(tied, low, -jnp.inf), axis=1)
    first = jnp.max(jnp.where(tied & (low == spread(best_low)), shape[1] - column, 0), axis=1)
    winner = jnp.where(first > 0, first_id + noise.GROUP * (shape[1] - first), race.NO_ID)
    top = jnp.max(tops, axis=1)
    total = jnp.sum(totals * jnp.exp2((tops - spread(race.finite_or_zero(top))) * spread(scale)), axis=1)
    return best_high, best_low, winner, top, total


def stage1(h, w, keys, t, options, *, mgpu, vocab, sample=0, vocab_axis=0, precision=None, with_model=False, tiles=None,
           num_sms=132):
    """As `xla.stage1` for one draw without the model's law: (Race, None), each leaf `[rows]`. `mgpu` is jax's module."""
    if (reason := why_not(h, w, options, vocab_axis)) or with_model or not isinstance(sample, int) or sample:
        raise NotImplementedError(f"implementation='mosaic' cannot run this call: {reason or 'it draws one token per row'}.")
    del precision  # products of 16-bit floats are exact in float32
    num_rows, d_model = h.shape
    tiles = tiles or choose_tiles(num_rows, d_model)
    m, n, k = 64, tiles.vocab, tiles.d_model
    cta_m, cta_n = (2 * m, n) if tiles.split_rows else (m, 2 * n)
    padding = -num_rows % cta_m
    h = jnp.pad(h, ((0, padding), (0, 0)))
    words = jnp.stack([jnp.pad(x, (0, padding)) for x in keys])
    temperatures = jnp.pad(t, (0, padding), constant_values=1.0)
    temperatures = jnp.stack([temperatures, inverse_temperature(temperatures)])
    rows = num_rows + padding
    row_tiles, vocab_tiles = rows // cta_m, pl.cdiv(vocab, cta_n)
    warpgroup_tiles = vocab_tiles if tiles.split_rows else 2 * vocab_tiles
    swizzle = mgpu.find_swizzle(k * jnp.dtype(h.dtype).itemsize * 8)
    transforms = (mgpu.TilingTransform((8, swizzle * 8 // (jnp.dtype(h.dtype).itemsize * 8))), mgpu.SwizzleTransform(swizzle))

    def kernel(h_gmem, w_gmem, words_gmem, t_gmem, floats_gmem, winner_gmem):
        def pipeline(body, context):
            return mgpu.emit_pipeline_warp_specialized(
                body, grid=(d_model // k,), memory_registers=40, wg_axis="wg", num_compute_wgs=2,
                max_concurrent_steps=tiles.steps, compute_context=context,
                in_specs=[mgpu.BlockSpec((size, k), lambda i: (0, i), transforms=transforms, memory_space=mgpu.SMEM)
                          for size in (cta_m, cta_n)])

        nothing = lambda *_: None  # noqa: E731
        buffers = pipeline(nothing, nothing).get_allocations(h_gmem, w_gmem)

        @functools.partial(pl.run_scoped, buffers=buffers, floats=mgpu.SMEM((2, 4, m), jnp.float32),
                           winners=mgpu.SMEM((2, m), jnp.int32), collective_axes="wg")
        def _(buffers, floats, winners):
            wg = lax.axis_index("wg")

            @mgpu.nd_loop((row_tiles * vocab_tiles,), collective_axes="sm")
            def _(loop):
                # Neighbouring programs share a vocabulary tile, so that its second reading comes from L2.
                row_tile, vocab_tile = lax.rem(loop.index[0], row_tiles), lax.div(loop.index[0], row_tiles)
                first_row = row_tile * cta_m + (wg * m if tiles.split_rows else 0)
                first_id = vocab_tile * cta_n + (0 if tiles.split_rows else wg * n)
                my_rows = pl.ds(wg * m, m) if tiles.split_rows else slice(None)
                my_vocab = slice(None) if tiles.split_rows else pl.ds(wg * n, n)

                def epilogue(run):
                    @functools.partial(pl.run_scoped, accumulator=mgpu.ACC((m, n), jnp.float32))
                    def _(accumulator):
                        run(accumulator)
                        x = model_logits(accumulator[...], options.scale, options.soft_cap)
                        if vocab % cta_n:
                            ids = first_id + lax.broadcasted_iota(jnp.int32, (m, n), 1)
                            x = jnp.where(ids < vocab, x, -jnp.inf)
                        layout = mgpu.Layout.WGMMA.reduce(1)

                        def row_vector(ref, i):
                            ref = ref.at[i, pl.ds(first_row, m)]
                            return mgpu.layout_cast(mgpu.load(ref, layout=layout, optimized=False), layout)

                        my_words = row_vector(words_gmem, 0), row_vector(words_gmem, 1)
                        high, low, winner, top, total = race_in_registers(
                            mgpu, x, my_words, row_vector(t_gmem, 0), row_vector(t_gmem, 1), first_id, m)
                        mgpu.wait_smem_to_gmem(0, wait_read_only=True)
                        for i, value in enumerate((high, low, top, total)):
                            floats[wg, i] = value
                        winners[wg] = winner
                        mgpu.commit_smem()
                        tile = vocab_tile if tiles.split_rows else 2 * vocab_tile + wg
                        for i in range(4):
                            mgpu.copy_smem_to_gmem(floats.at[wg, i], floats_gmem.at[i, tile, pl.ds(first_row, m)])
                        mgpu.copy_smem_to_gmem(winners.at[wg], winner_gmem.at[tile, pl.ds(first_row, m)])

                def step(_, h_smem, w_smem, accumulator):
                    mgpu.wgmma(accumulator, h_smem.at[my_rows], w_smem.at[my_vocab].transpose((1, 0)))
                    mgpu.wgmma_wait(0)
                    return accumulator

                pipeline(step, epilogue)(h_gmem.at[pl.ds(row_tile * cta_m, cta_m), :],
                                         w_gmem.at[pl.ds(vocab_tile * cta_n, cta_n), :], allocations=buffers)

        mgpu.wait_smem_to_gmem(0, wait_read_only=True)

    floats, winner = mgpu.kernel(
        kernel, out_type=[jax.ShapeDtypeStruct((4, warpgroup_tiles, rows), jnp.float32),
                          jax.ShapeDtypeStruct((warpgroup_tiles, rows), jnp.int32)],
        grid=(num_sms,), grid_names=("sm",), num_threads=3, thread_name="wg",
        compiler_params=mgpu.CompilerParams(lowering_semantics=mgpu.LoweringSemantics.Warpgroup))(
            h, w, words, temperatures)
    high, low, top, total = floats[:, :, :num_rows]
    return race.merge(race.Race(high, low, winner[:, :num_rows], top, total), t), None
