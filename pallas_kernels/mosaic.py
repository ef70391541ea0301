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

from pallas_kernels import noise, race, triton_merge
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
    return MosaicTiles(split_rows=True, vocab=256, d_model=64, steps=4, pair_rows=-(-num_rows // 128) % 2 == 0)


def columns(shape):
    """The number of its column at every entry."""
    return lax.broadcasted_iota(jnp.int32, shape, 1)


def over(shape):
    """Broadcasts a row vector over a `[rows, n]` tile."""
    return lambda v: lax.broadcast_in_dim(v, shape, (0,))


def noise_of_groups(words, first_id, shape):
    """Gumbel noise of the groups that start at `first_id + 16 * column`."""
    spread = over(shape)
    ids = race.global_ids((None, None, *map(spread, words[2:])), first_id + noise.GROUP * columns(shape))
    stream = jnp.full(shape, noise.stream(noise.DRAW, 0, noise.GROUP_LEVEL))
    return noise.gumbel(spread(words[0]), spread(words[1]), stream, ids)


def gather_groups(mgpu, x, scales):
    """(top, totals) `[rows, groups]` of logits `[rows, n]`, a total for each scale.

    Row vectors are held by four lanes each, so work on them is done four times over: the masses of eight groups are put into
    one matrix, and the matrices side by side. Spare columns have no mass.
    """
    rows, groups = x.shape[0], x.shape[1] // noise.GROUP
    shape = (rows, 8)
    column, spread, spread_group = columns(shape), over(shape), over((rows, noise.GROUP))
    parts = []
    for first in range(0, groups, 8):
        tops, totals = jnp.full(shape, -jnp.inf, jnp.float32), [jnp.zeros(shape, jnp.float32) for _ in scales]
        for g in range(first, min(first + 8, groups)):
            part = x[:, g * noise.GROUP:(g + 1) * noise.GROUP]
            top = jnp.max(part, axis=1)
            below = part - spread_group(race.finite_or_zero(top))
            tops = jnp.where(column == g - first, spread(top), tops)
            for i, scale in enumerate(scales):
                total = jnp.sum(jnp.exp2(below * spread_group(scale)), axis=1)
                totals[i] = jnp.where(column == g - first, spread(total), totals[i])
        parts.append([mgpu.layout_cast(v, mgpu.Layout.WGMMA) for v in (tops, *totals)])
    return [jnp.concatenate(part, axis=1) if len(part) > 1 else part[0] for part in zip(*parts, strict=True)]


def race_in_registers(mgpu, x, gumbel, t, inverse_t, first_id, with_model):
    """(high, low, top, total[, model total], winner) `[rows]` of logits `[rows, n]`, as `race.race_of` with rows first."""
    shape = gumbel.shape
    column, spread = columns(shape), over(shape)
    scales = [inverse_t * LOG2_E] + ([jnp.full_like(inverse_t, LOG2_E)] if with_model else [])
    tops, *totals = gather_groups(mgpu, x, scales)
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
    return top, total, lowest(x == spread(top), columns(x.shape), x.shape[1], first_id, 1)


def lowest(condition, column, n, first_id, step):
    """`first_id + step * column` of the first column where `condition` holds, or NO_ID. By a maximum: this backend
    reduces no minimum of integers."""
    first = jnp.max(jnp.where(condition, n - column, 0), axis=1)
    return jnp.where(first > 0, first_id + step * (n - first), race.NO_ID)


def merge_rows(old, new, inverse_t):
    """As `race.merge` or `race.merge_masses` of two, `([high, low,] top, total[, model total], id)` each, and where `new` has
    the better one. The ids of `new` are larger, so what is equal stays with `old`."""
    num_scores = 2 if len(old) > 3 else 0
    old_top, new_top = old[num_scores], new[num_scores]
    top = jnp.maximum(old_top, new_top)
    finite = race.finite_or_zero(top)
    totals = [a * jnp.exp2((old_top - finite) * scale) + b * jnp.exp2((new_top - finite) * scale) for a, b, scale
              in zip(old[num_scores + 1:-1], new[num_scores + 1:-1], (inverse_t * LOG2_E, LOG2_E), strict=False)]
    better = new_top > old_top
    if num_scores:
        better = (new[0] > old[0]) | ((new[0] == old[0]) & (new[1] > old[1]))
    scores = [jnp.where(better, b, a) for a, b in zip(old[:num_scores], new[:num_scores], strict=True)]
    return [*scores, top, *totals, jnp.where(better, new[-1], old[-1])], better


def launch(h, w, keys, t, options, *, mgpu, wanted, vocab, vocab_axis, with_model, tiles, num_sms):
    """Runs the kernel; the leaves of a race (high, low, top, total[, model total], winner) or a mass (top, total, argmax), each
    `[pieces of the vocabulary, rows padded to whole tiles]`, and after a race the model logits of each winning group `[pieces,
    rows, 16]`.

    A program keeps one tile of rows and walks over every n-th tile of the vocabulary; its third warpgroup fetches ahead, over
    the ends of tiles too, so that memory never waits for an epilogue.
    """
    if reason := why_not(h, w, options, vocab_axis):
        raise NotImplementedError(f"implementation='mosaic' cannot run this call: {reason}; leave implementation out.")
    num_rows, d_model = h.shape
    tiles = tiles or choose_tiles(num_rows, d_model)
    m, n, k, slots = 64, tiles.vocab, tiles.d_model, tiles.steps
    cta_m, cta_n = (2 * m, n) if tiles.split_rows else (m, 2 * n)
    pair = 1 + tiles.pair_rows
    row_tiles, vocab_tiles, steps = pl.cdiv(num_rows, cta_m * pair) * pair, pl.cdiv(vocab, cta_n), d_model // k
    if row_tiles > num_sms:
        whole = row_tiles // pair // 2 * pair * cta_m
        parts = [launch(h[part], w, keys and tuple(x[part] for x in keys), t[part], options, mgpu=mgpu, wanted=wanted, vocab=vocab,
                        vocab_axis=vocab_axis, with_model=with_model, tiles=tiles, num_sms=num_sms)
                 for part in (slice(0, whole), slice(whole, None))]
        return [jnp.concatenate(part, 1) for part in zip(*parts, strict=True)]
    rows = row_tiles * cta_m
    walkers = min(num_sms // row_tiles, vocab_tiles)  # programs that share the vocabulary of one tile of rows
    # Only rows that exist are copied, counted in eights: what lies outside an array is slow to fill, and rows of the tile that
    # hold nothing multiply to nothing that is read.
    h = jnp.pad(h, ((0, -num_rows % 8), (0, 0)))
    h_rows = min(cta_m, h.shape[0])
    vectors = jnp.pad(triton_merge.pack(t, keys if wanted == "race" else ()), ((0, 0), (0, rows - num_rows)))
    num_floats = 2 if wanted == "mass" else 4 + with_model
    noises = -(-n // (8 * noise.GROUP))  # noise is made for eight groups at a time
    empties = (-jnp.inf, 0.0) if wanted == "mass" else (-jnp.inf, 0.0, -jnp.inf, 0.0, 0.0)[:num_floats]

    def buffer(shape):
        swizzle = mgpu.find_swizzle(shape[1] * jnp.dtype(h.dtype).itemsize * 8)
        transforms = mgpu.TilingTransform((8, swizzle // jnp.dtype(h.dtype).itemsize)), mgpu.SwizzleTransform(swizzle)
        return mgpu.SMEM((slots, *shape), h.dtype, transforms=transforms)

    barrier = functools.partial(mgpu.ClusterBarrier, collective_axes=("pair",)) if tiles.pair_rows else mgpu.Barrier
    scratch = {"h_smem": buffer((cta_m, k)), "w_smem": buffer((cta_n, k) if vocab_axis == 0 else (k, cta_n)),
               "filled": mgpu.Barrier(num_arrivals=2, num_barriers=slots), "emptied": barrier(num_arrivals=2, num_barriers=slots),
               "started": mgpu.Barrier(), "floats": mgpu.SMEM((2, num_floats, m), jnp.float32), "ids": mgpu.SMEM((2, m), jnp.int32)}
    if wanted == "race":
        scratch |= {"gumbels": mgpu.SMEM((2, m, 8 * noises), jnp.float32),
                    "winners": mgpu.SMEM((2, m, noise.GROUP), jnp.float32)}

    def kernel(h_gmem, w_gmem, vectors_gmem, *out_gmem, h_smem, w_smem, filled, emptied, started, floats, ids, gumbels=None,
               winners=None):
        floats_gmem, ids_gmem, winners_gmem = out_gmem[:num_floats], out_gmem[num_floats], out_gmem[num_floats + 1:]
        wg, program = lax.axis_index("wg"), lax.axis_index("program")
        row_tile = lax.rem(program, row_tiles // pair) * pair + (lax.axis_index("pair") if tiles.pair_rows else 0)
        walker = lax.div(program, row_tiles // pair)
        num_tiles = lax.div(vocab_tiles - walker + walkers - 1, walkers)

        def fetch():
            mgpu.set_max_registers(40, action="decrease")

            @pl.loop(0, num_tiles)
            def _(turn):
                @pl.loop(0, steps)
                def _(j):
                    step = turn * steps + j
                    slot = lax.rem(step, slots)

                    @pl.when(step >= slots)
                    def _():
                        mgpu.barrier_wait(emptied.at[slot])

                    d_slice, vocab_slice = pl.ds(j * k, k), pl.ds((walker + turn * walkers) * cta_n, cta_n)
                    mgpu.copy_gmem_to_smem(h_gmem.at[pl.ds(row_tile * cta_m, h_rows), d_slice], h_smem.at[slot, 0:h_rows],
                                           filled.at[slot])
                    mgpu.copy_gmem_to_smem(w_gmem.at[(vocab_slice, d_slice)[::1 - 2 * vocab_axis]], w_smem.at[slot],
                                           filled.at[slot], collective_axes="pair" if tiles.pair_rows else None)

            @pl.loop(jnp.maximum(num_tiles * steps - slots, 0), num_tiles * steps)
            def _(step):  # a program must not end before its partner has read what both were sent
                mgpu.barrier_wait(emptied.at[lax.rem(step, slots)])

        def compute():
            mgpu.set_max_registers(232, action="increase")
            first_row = row_tile * cta_m + (wg * m if tiles.split_rows else 0)
            my_rows = pl.ds(wg * m, m) if tiles.split_rows else slice(None)
            my_vocab = slice(None) if tiles.split_rows else pl.ds(wg * n, n)
            row_layout = mgpu.Layout.WGMMA.reduce(1)

            def row_vector(ref):
                return mgpu.layout_cast(mgpu.load(ref, layout=row_layout, optimized=False), row_layout)

            for i, empty in enumerate(empties):
                floats[wg, i] = mgpu.layout_cast(jnp.full((m,), empty, jnp.float32), row_layout)
            ids[wg] = mgpu.layout_cast(jnp.full((m,), race.NO_ID, jnp.int32), row_layout)
            if wanted == "race":
                winners[wg] = mgpu.layout_cast(jnp.zeros((m, noise.GROUP), jnp.float32), mgpu.Layout.WGMMA)

            @pl.when(wg == 1)  # half a step behind the other: the tensor cores work on while one of the two draws
            def _():
                mgpu.barrier_wait(started)

            @pl.loop(0, num_tiles)
            def _(turn):
                first_id = (walker + turn * walkers) * cta_n + (0 if tiles.split_rows else wg * n)

                @functools.partial(pl.run_scoped, accumulator=mgpu.ACC((m, n), jnp.float32))
                def _(accumulator):
                    def multiply(j):
                        slot = lax.rem(turn * steps + j, slots)
                        mgpu.barrier_wait(filled.at[slot])
                        table = w_smem.at[slot]
                        table = table.at[my_vocab].transpose((1, 0)) if vocab_axis == 0 else table.at[:, my_vocab]
                        mgpu.wgmma(accumulator, h_smem.at[slot].at[my_rows], table)

                    def release(j):
                        mgpu.barrier_arrive(emptied.at[lax.rem(turn * steps + j, slots)])

                    multiply(0)
                    if wanted == "race":  # noise is made while the tensor cores are at work
                        words = [row_vector(vectors_gmem.at[1 + i, pl.ds(first_row, m)]) for i in range(len(keys))]
                    for c in range(noises):
                        if 0 < c < steps:
                            multiply(c)
                            mgpu.wgmma_wait(1)
                            release(c - 1)
                        if wanted == "race":
                            gumbels[wg, :, 8 * c:8 * c + 8] = noise_of_groups(words, first_id + 8 * noise.GROUP * c, (m, 8))

                    @pl.when((turn == 0) & (wg == 0))
                    def _():
                        mgpu.barrier_arrive(started)

                    @pl.loop(min(noises, steps), steps)
                    def _(j):
                        multiply(j)
                        mgpu.wgmma_wait(1)
                        release(j - 1)

                    x = accumulator[...]
                    release(steps - 1)
                    x = model_logits(x, options.scale, options.soft_cap)
                    if vocab % cta_n:
                        x = jnp.where(first_id + columns((m, n)) < vocab, x, -jnp.inf)
                    my_t = lax.bitcast_convert_type(row_vector(vectors_gmem.at[0, pl.ds(first_row, m)]), jnp.float32)
                    inverse_t = inverse_temperature(my_t)
                    if wanted == "mass":
                        new = mass_in_registers(x, inverse_t, first_id)
                    else:
                        gumbel = mgpu.load(gumbels.at[wg], layout=mgpu.Layout.WGMMA, optimized=False)
                        new = race_in_registers(mgpu, x, mgpu.layout_cast(gumbel, mgpu.Layout.WGMMA), my_t, inverse_t, first_id,
                                                with_model)
                    old = [*(row_vector(floats.at[wg, i]) for i in range(num_floats)), row_vector(ids.at[wg])]
                    (*values, best), better = merge_rows(old, new, inverse_t)
                    for i, value in enumerate(values):
                        floats[wg, i] = value
                    ids[wg] = best
                    if wanted == "race":
                        spread = over((m, noise.GROUP))
                        group = mgpu.layout_cast(mgpu.load(winners.at[wg], layout=mgpu.Layout.WGMMA, optimized=False),
                                                 mgpu.Layout.WGMMA)
                        for start in range(0, n, noise.GROUP):
                            group = jnp.where(spread(better & (best == first_id + start)), x[:, start:start + noise.GROUP], group)
                        winners[wg] = group

            mgpu.commit_smem()
            piece = walker if tiles.split_rows else 2 * walker + wg
            for i in range(num_floats):
                mgpu.copy_smem_to_gmem(floats.at[wg, i], floats_gmem[i].at[piece, pl.ds(first_row, m)])
            mgpu.copy_smem_to_gmem(ids.at[wg], ids_gmem.at[piece, pl.ds(first_row, m)])
            if wanted == "race":
                mgpu.copy_smem_to_gmem(winners.at[wg], winners_gmem[0].at[piece, pl.ds(first_row, m)])
            mgpu.wait_smem_to_gmem(0)

        lax.cond(wg == 2, fetch, compute)

    pieces = walkers if tiles.split_rows else 2 * walkers
    out_type = [jax.ShapeDtypeStruct((pieces, rows), dtype) for dtype in (jnp.float32,) * num_floats + (jnp.int32,)]
    if wanted == "race":
        out_type.append(jax.ShapeDtypeStruct((pieces, rows, noise.GROUP), jnp.float32))
    return mgpu.kernel(
        kernel, out_type=out_type,
        grid=(walkers * row_tiles // pair,), grid_names=("program",), num_threads=3, thread_name="wg", scratch_types=scratch,
        **({"cluster": (2,), "cluster_names": ("pair",)} if tiles.pair_rows else {}),
        compiler_params=mgpu.CompilerParams(lowering_semantics=mgpu.LoweringSemantics.Warpgroup))(
            h, w, vectors)


def piece(h, w, keys, t, options=Elementwise(), *, mgpu, plt, vocab, sample=0, vocab_axis=0, precision=None,
          with_model=False, tiles=None, num_sms=132) -> Piece:
    """As `xla.piece`. `mgpu` and `plt` are jax's Mosaic GPU and Triton modules: the finish is a Triton kernel."""
    del precision  # products of 16-bit floats are exact in float32
    high, low, top, total, *model, winner, logits = launch(
        h, w, keys, t, options, mgpu=mgpu, wanted="race", vocab=vocab, vocab_axis=vocab_axis, with_model=with_model,
        tiles=tiles, num_sms=num_sms)
    return triton_merge.merge(keys, t, race.Race(high, low, winner, top, total), model[0] if with_model else None, logits,
                              plt=plt, vocab=vocab, sample=sample)


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
