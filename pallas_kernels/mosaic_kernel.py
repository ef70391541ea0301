"""Stage 1 on NVIDIA Hopper through Pallas' Mosaic GPU backend: TMA loads, wgmma products, and the race beside them.

Persistent and warp-specialised: one warpgroup fetches, two multiply and race. `h` is the M operand (64 rows a warpgroup)
and `w` the N operand, so a group is 16 neighbouring accumulators of a row and its reduction stays inside a quad of lanes.

bfloat16 and float16 tables whose rows TMA can address, or of 8 bits; the elementwise options that are constants of the model.

A table of 8 bits is the M operand: only that one is read from registers, where 16-bit numbers are made of it without a way
through shared memory, which is what a table of half the bytes leaves no time for. Its logits lie the other way around and are
turned in shared memory once a tile; there the race reads them.
"""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import noise, race
from pallas_kernels.logits import model_logits
from pallas_kernels.mosaic_race import Tile, columns, logits_steps, mass_steps, over, race_steps, row_vector, store
from pallas_kernels.mosaic_tiles import PART, choose_pace, choose_tiles, num_row_tiles
from pallas_kernels.vectors import Vectors, pack, places


def why_not(h, w, options, vocab_axis: int) -> str | None:
    """Why this kernel cannot run a call, or None if it can."""
    if h.dtype.name not in ("bfloat16", "float16") or w.dtype.name not in (h.dtype.name, "int8", "float8_e4m3fn"):
        return f"it multiplies bfloat16 or float16 by the same or by 8 bits, not {h.dtype} by {w.dtype}"
    if w.shape[vocab_axis] % (8, 64)[vocab_axis] or h.shape[1] % 64:
        return (f"its bulk copies need a vocabulary that is a multiple of {(8, 64)[vocab_axis]} and d_model of 64, "
                f"not w {list(w.shape)}")
    if options._replace(weight_scale=None).dense():
        return "it takes neither logit_bias nor mask nor processors"
    if options.valid is not None:
        return "it takes no shard of a padded vocabulary"
    return None


def last(steps: Iterator, value: Any = None) -> Any:
    """The last thing that a generator yields."""
    for value in steps:  # noqa: B007
        pass
    return value


def launch(h, w, keys, t, options, *, mgpu, wanted, vocab, vocab_axis, with_model, tiles, num_sms, sample=0,
           with_scores=False, with_logits=True, vectors=None, column=0):
    """Runs the kernel; the leaves of a race (high, low, top, total[, model total], winner), of a mass (top, total, argmax), or
    of logits (top, total[, model total]), each `[pieces of the vocabulary, rows and padding]`. After a race, unless
    `with_logits` is false, the model logits of each winning group `[pieces, rows, 16]`, and `with_scores` also
    `race.Scores.told`, a tile being the `tiles.vocab` ids of a warpgroup. After logits, the raw ones
    `[rows and padding, ids and padding]`, and of each group the largest processed one and that of `sample_of`,
    `[rows and padding, groups and padding]`.

    `vectors`: what is to be read of these rows, from `column` on where it was made for more than them.

    A program keeps one tile of rows and walks over every n-th tile of the vocabulary. Its third warpgroup fetches ahead, over
    the ends of tiles too; the other two draw from the logits of one tile while the tensor cores make those of the next.
    """
    if reason := why_not(h, w, options, vocab_axis):
        raise NotImplementedError(f"implementation='mosaic' cannot run this call: {reason}; leave implementation out.")
    num_rows, d_model = h.shape
    tiles = tiles or choose_tiles(num_rows, vocab, vocab_axis, num_sms, w.dtype.itemsize, d_model)
    if d_model % tiles.d_model:
        raise ValueError(f"tiles.d_model must divide d_model, {d_model}; got {tiles.d_model}: choose tiles for this head.")
    if w.dtype.itemsize == 1 and tiles.vocab % (least := 128 if tiles.split_rows else 64):
        raise ValueError(f"tiles.vocab must be a multiple of {least} for w of 8 bits; got {tiles.vocab}: choose others.")
    if vocab_axis == 1 and tiles.vocab % 64:
        raise ValueError(f"tiles.vocab must be a multiple of 64 for w [d_model, vocab]; got {tiles.vocab}: choose others.")
    pair = 1 + tiles.pair_rows  # programs of one cluster
    quantized = w.dtype.itemsize == 1
    m, n, k, slots = 64, tiles.vocab, tiles.d_model, tiles.steps
    wgs = tiles.warpgroups  # that multiply; one more fetches
    pace = choose_pace(tiles, wanted, w.dtype.itemsize)
    # Products read registers until they are done, so that of two neighbours each needs its own: steps of a loop go by twos.
    together = 2 if quantized and k == PART else 1
    cta_m, cta_n = (wgs * m, n) if tiles.split_rows else (m, wgs * n)
    row_tiles, vocab_tiles, steps = num_row_tiles(num_rows, tiles), pl.cdiv(vocab, cta_n), d_model // k
    words = keys if wanted == "race" else ()
    vectors = Vectors(pack(t, words)) if vectors is None else vectors
    if row_tiles > num_sms:
        if wanted == "logits":
            raise ValueError(f"h must have at most {num_sms * cta_m} rows where logits are stored; got {num_rows}.")
        whole = row_tiles // pair // 2 * pair * cta_m
        parts = [launch(h[part], w, keys and tuple(x[part] for x in keys), t[part], options, mgpu=mgpu, wanted=wanted,
                        vocab=vocab, vocab_axis=vocab_axis, with_model=with_model, tiles=tiles,
                        num_sms=min(num_sms, num_row_tiles(part.stop - part.start, tiles)),  # as many pieces from each
                        sample=sample, with_scores=with_scores, with_logits=with_logits, vectors=vectors,
                        column=column + part.start)
                 for part in (slice(0, whole), slice(whole, num_rows))]
        return [jnp.concatenate(part, 1) for part in zip(*parts, strict=True)]
    walkers = min(num_sms // row_tiles, vocab_tiles)  # programs that share the vocabulary of a tile of rows
    twins = 2 if tiles.pair_vocab and walkers > 1 else 1
    walkers = walkers // twins * twins
    cluster = {"pair": 2} if pair > 1 else {"twin": 2} if twins > 1 else {}
    # Only rows that exist are copied, counted in eights for each program that reads some: what lies outside an array is slow to
    # fill, and rows of the tile that hold nothing multiply to nothing that is read. Up to 8 rows no kernel is spent on padding.
    if num_rows > 8 or twins > 1:
        h = jnp.pad(h, ((0, -num_rows % (8 * twins)), (0, 0)))
    h_rows = min(cta_m, pl.cdiv(num_rows, 8 * twins) * 8 * twins)
    kept = m if tiles.split_rows else h_rows  # rows of a warpgroup whose results are stored: of few, those lie close together
    rows = row_tiles * (wgs * m if tiles.split_rows else kept)
    num_floats = {"race": 4 + with_model, "mass": 2, "logits": 2 + with_model}[wanted]

    def buffer(shape, dtype=h.dtype, slots=slots):
        swizzle = mgpu.find_swizzle(shape[1] * jnp.dtype(dtype).itemsize * 8)
        transforms = mgpu.TilingTransform((8, swizzle // jnp.dtype(dtype).itemsize)), mgpu.SwizzleTransform(swizzle)
        return mgpu.SMEM((slots, *shape), dtype, transforms=transforms)

    of_vectors = jax.tree.structure(vectors)
    barrier = functools.partial(mgpu.ClusterBarrier, collective_axes=tuple(cluster)) if cluster else mgpu.Barrier
    scratch = {"h_smem": buffer((h_rows if quantized else cta_m, k)),
               "w_smem": buffer((cta_n, k) if vocab_axis == 0 else (k, cta_n), w.dtype),
               "filled": mgpu.Barrier(num_arrivals=2, num_barriers=slots),
               "emptied": barrier(num_arrivals=wgs, num_barriers=slots)}
    scales = []
    if quantized:
        scratch["logits"] = mgpu.SMEM((cta_m, cta_n), jnp.float32,  # tiles as wide as a group
                                      transforms=(mgpu.TilingTransform((8, noise.GROUP)), mgpu.SwizzleTransform(64)))
        scratch["exchange"] = mgpu.Barrier(num_arrivals=wgs, num_barriers=2)
        scales = [jnp.pad(options.weight_scale, (0, (vocab_tiles + twins - 1) * cta_n - vocab))]
    out_type = [jax.ShapeDtypeStruct((walkers if tiles.split_rows else 2 * walkers, rows), jnp.float32)] * num_floats
    if wanted != "logits":
        out_type.append(jax.ShapeDtypeStruct(out_type[0].shape, jnp.int32))
    if wanted == "race" and with_logits:
        out_type.append(jax.ShapeDtypeStruct((*out_type[0].shape, noise.GROUP), jnp.float32))
    if not tiles.split_rows:  # of few rows not all that were multiplied are stored
        scratch["results"] = [mgpu.SMEM((wgs, m, *x.shape[2:]), x.dtype) for x in out_type]
    num_merged = len(out_type)  # of each walker; what follows is of each tile
    all_rows, all_ids = row_tiles * cta_m, pl.cdiv(vocab_tiles, walkers) * walkers * cta_n
    if with_scores:
        out_type.append(jax.ShapeDtypeStruct((all_ids // n, rows), jnp.int32))
        if not tiles.split_rows:
            scratch["told"] = mgpu.SMEM((wgs, m), jnp.int32)
    if wanted == "logits":
        out_type += [jax.ShapeDtypeStruct((all_rows, all_ids // size), jnp.float32) for size in (1, noise.GROUP, noise.GROUP)]

    def kernel(h_gmem, w_gmem, *out_gmem, h_smem, w_smem, filled, emptied, results=(), logits: Any = None,
               exchange: Any = None, told: Any = None):
        vectors_gmem = jax.tree.unflatten(of_vectors, out_gmem[:of_vectors.num_leaves])
        out_gmem = out_gmem[of_vectors.num_leaves:]
        scale_gmem: Any = out_gmem[0]  # of 8 bits
        out_gmem = out_gmem[1:] if quantized else out_gmem
        out_gmem, of_tiles_gmem = out_gmem[:num_merged], out_gmem[num_merged:]
        wg, program = lax.axis_index("wg"), lax.axis_index("program")
        row_tile = lax.rem(program, row_tiles // pair) * pair + (lax.axis_index("pair") if pair > 1 else 0)
        first_walker = lax.div(program, row_tiles // pair) * twins
        walker = first_walker + (lax.axis_index("twin") if twins > 1 else 0)
        # Twins take as many turns as each other; the second may find nothing in its last one.
        num_tiles = lax.div(vocab_tiles - first_walker + walkers - 1, walkers)

        def fetch():
            mgpu.set_max_registers(24, action="decrease")

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
                                           filled.at[slot], collective_axes="twin" if twins > 1 else None)
                    mgpu.copy_gmem_to_smem(w_gmem.at[(vocab_slice, d_slice)[::1 - 2 * vocab_axis]], w_smem.at[slot],
                                           filled.at[slot], collective_axes="pair" if pair > 1 else None)

            @pl.loop(jnp.maximum(num_tiles * steps - slots, 0), num_tiles * steps)
            def _(step):  # a program must not end before its partner has read what both were sent
                mgpu.barrier_wait(emptied.at[lax.rem(step, slots)])

        def later(slot):
            """The slot of the next fetch. One comes from the other: a remainder takes twenty instructions, and the compiler
            keeps the addresses of slots that it knows until registers spill."""
            return jnp.where(slot == slots - 1, 0, slot + 1)

        def compute():
            mgpu.set_max_registers(240 if wgs == 2 else 160, action="increase")
            first_row = row_tile * cta_m + (wg * m if tiles.split_rows else 0)
            my_rows = pl.ds(wg * m, m) if tiles.split_rows else slice(None)
            my_vocab = slice(None) if tiles.split_rows else pl.ds(wg * n, n)
            row_layout = mgpu.Layout.WGMMA.reduce(1)

            def place_of(turn):
                """The number of a tile. The one before the first is empty: what it leaves is overwritten by the first."""
                return (walker + jnp.maximum(turn, 0) * walkers) * (cta_n // n) + (0 if tiles.split_rows else wg)

            def keep_scores(turn, scores):
                told_gmem, = of_tiles_gmem
                if kept == m:
                    told_gmem[place_of(turn), pl.ds(first_row, m)] = scores
                    return
                mgpu.wait_smem_to_gmem(0)  # of the tile before, long done
                told[wg] = scores
                mgpu.commit_smem()
                mgpu.copy_smem_to_gmem(told.at[wg, pl.ds(0, kept)], told_gmem.at[place_of(turn), pl.ds(first_row, kept)])

            def raw_group(x, g):
                """The logits of a group: those of x or, of 8 bits, those in shared memory."""
                if not quantized:
                    return x[:, g * noise.GROUP:(g + 1) * noise.GROUP]
                first_column = (0 if tiles.split_rows else wg * n) + g * noise.GROUP
                return mgpu.load(logits.at[my_rows, pl.ds(first_column, noise.GROUP)], layout=mgpu.Layout.WGMMA)

            def keep_logits(x, turn, g, *of_group):
                group, size = place_of(turn) * (n // noise.GROUP) + g, noise.GROUP
                raw_gmem, *groups_gmem = of_tiles_gmem
                store(mgpu, raw_gmem.at[pl.ds(first_row, m), pl.ds(group * size, size)], raw_group(x, g))
                for ref, value in zip(groups_gmem, of_group, strict=True):
                    store(mgpu, ref.at[pl.ds(first_row, m), group], value)

            ids_each = cta_n // wgs  # that a warpgroup multiplies, of 8 bits
            my_ids = pl.ds(wg * ids_each, ids_each)

            def convert(x):
                """The 16-bit numbers of a part of a fetched tile of 8 bits, as products read them."""
                x = mgpu.layout_cast(x, mgpu.Layout.WGMMA)
                if w.dtype.name == "float8_e4m3fn":
                    x = x.astype(jnp.float16)
                    x = x if h.dtype == jnp.float16 else x.astype(jnp.float32)
                return x.astype(h.dtype)

            def exchange_logits(x, scale):
                """Scales and turns the logits `[ids, rows]` of a tile, and gives them to whoever draws from them."""
                mgpu.barrier_wait(exchange.at[0])  # until both have drawn from those of the tile before
                target = logits.at[0:h_rows, my_ids].transpose((1, 0))
                target[...] = mgpu.layout_cast(x * over(x.shape)(scale), mgpu.Layout.WGMMA_TRANSPOSED)
                mgpu.barrier_arrive(exchange.at[1])
                mgpu.barrier_wait(exchange.at[1])

            def draw_steps(x, turn, best):
                """The steps of drawing from the logits of a tile: x `[m, n]`, or None where they lie in shared memory."""
                first_id = (walker + turn * walkers) * cta_n + (0 if tiles.split_rows else wg * n)

                def group(g):
                    part = model_logits(raw_group(x, g), options.scale, options.soft_cap)
                    ids = first_id + g * noise.GROUP + columns(part.shape)
                    if vocab % cta_n:
                        part = jnp.where(ids < vocab, part, -jnp.inf)
                    if quantized or options.scale is not None or options.soft_cap is not None:
                        # The tile before the first is empty still.
                        part = jnp.where(ids >= 0, part, -jnp.inf)
                    return part

                tile = Tile(group, n // noise.GROUP, first_id)
                here = places(vectors_gmem, pl.ds(column + first_row, m), len(words))
                my_t, scale, *my_words = (row_vector(mgpu, ref, at, m) for ref, at in here)
                if vectors.packed is not None:
                    my_t, scale = (lax.bitcast_convert_type(v, jnp.float32) for v in (my_t, scale))
                if wanted == "mass":
                    steps_of_tile = mass_steps(tile, scale, best)
                elif wanted == "logits":
                    steps_of_tile = logits_steps(tile, scale, best, functools.partial(keep_logits, x, turn))
                else:
                    keep = functools.partial(keep_scores, turn) if with_scores else None
                    steps_of_tile = race_steps(mgpu, tile, my_t, scale, my_words, sample, best, keep)
                if twins == 1 or vocab % cta_n or vocab_tiles % 2 == 0:
                    return steps_of_tile
                # A tile behind the vocabulary says nothing; where the last tile is not whole, the ids above say it.
                is_real = functools.partial(jnp.broadcast_to, first_id < vocab)
                return (new and tuple(jnp.where(is_real(a.shape), a, b) for a, b in zip(new, best, strict=True))
                        for new in steps_of_tile)

            def multiply_tile(turn, carry):
                """The raw logits of a tile; meanwhile, the draw from those of the tile before."""
                first, x, best_before = carry
                drawing = draw_steps(x, turn - 1, best_before)
                if quantized:
                    first_id = (walker + turn * walkers) * cta_n + wg * ids_each
                    weight_scale = row_vector(mgpu, scale_gmem, (pl.ds(first_id, ids_each),), ids_each)

                def multiply(accumulator):
                    def issue(slot):
                        mgpu.barrier_wait(filled.at[slot])
                        if quantized:
                            issue_parts(slot)
                            return
                        table = w_smem.at[slot]
                        table = table.at[my_vocab].transpose((1, 0)) if vocab_axis == 0 else table.at[:, my_vocab]
                        mgpu.wgmma(accumulator, h_smem.at[slot].at[my_rows], table)

                    def issue_parts(slot):
                        fetched = mgpu.load(w_smem.at[slot, my_ids], layout=mgpu.Layout.WGMMA_UPCAST_2X)
                        for first in range(0, k, PART):
                            if first:
                                mgpu.wgmma_wait(1)  # for those that read the registers which this part is converted to
                            part = slice(first, first + PART)
                            mgpu.wgmma(accumulator, convert(fetched[:, part]), h_smem.at[slot].at[:, part].transpose((1, 0)))

                    def release(slot):
                        mgpu.barrier_arrive(emptied.at[slot])

                    def next_step(before):
                        issue(slot := later(before))
                        mgpu.wgmma_wait(1)  # for all products but these
                        release(before)
                        return slot

                    def next_steps(_, slot):
                        for _ in range(together):
                            slot = next_step(slot)
                        return slot

                    unrolled = min(steps, pace * ((2 if wanted == "logits" else 1) * n // noise.GROUP + 4))
                    unrolled += (steps - unrolled) % together
                    best: Any = ()
                    issue(slot := first)
                    best: Any = next(drawing, ())
                    for j in range(1, unrolled):
                        slot = next_step(slot)  # before the drawing: where memory is waited for, it must not stand still
                        if j % pace == 0:
                            best = next(drawing, best)
                    best = last(drawing, best)
                    if quantized:
                        mgpu.barrier_arrive(exchange.at[0])
                    slot = lax.fori_loop(0, (steps - unrolled) // together, next_steps, slot)
                    x = accumulator[...]
                    release(slot)
                    if quantized:
                        x = exchange_logits(x, weight_scale)
                    return later(slot), x, best

                return pl.run_scoped(multiply, mgpu.ACC((ids_each, h_rows) if quantized else (m, n), jnp.float32))

            vector = lambda value, dtype: mgpu.layout_cast(jnp.full((m,), value, dtype), row_layout)  # noqa: E731
            matrix = lambda value, width: mgpu.layout_cast(jnp.full((m, width), value), mgpu.Layout.WGMMA)  # noqa: E731
            floats_of_nothing = (-jnp.inf, 0.0, -jnp.inf, 0.0, 0.0) if wanted == "race" else (-jnp.inf, 0.0, 0.0)
            nothing = tuple(vector(v, jnp.float32) for v in floats_of_nothing[:num_floats])
            if wanted != "logits":
                nothing = *nothing, vector(race.NO_ID, jnp.int32)
            if wanted == "race":
                nothing = *nothing, matrix(0.0, noise.GROUP)
            x = None if quantized else matrix(-jnp.inf, n)
            _, x, best = lax.fori_loop(0, num_tiles, multiply_tile, (jnp.int32(0), x, nothing))
            best = last(draw_steps(x, num_tiles - 1, best))
            best = best[:len(out_gmem)]  # without logits that nobody wants
            piece = walker if tiles.split_rows else 2 * walker + wg
            if tiles.split_rows:
                for ref, value in zip(out_gmem, best, strict=True):
                    ref[piece, pl.ds(first_row, m)] = value
                return
            for ref, value in zip(results, best, strict=True):
                ref[wg] = value
            mgpu.commit_smem()
            for ref, out in zip(results, out_gmem, strict=True):
                mgpu.copy_smem_to_gmem(ref.at[wg, pl.ds(0, kept)], out.at[piece, pl.ds(first_row, kept)])
            mgpu.wait_smem_to_gmem(0)

        lax.cond(wg == wgs, fetch, compute)

    run = mgpu.kernel(
        kernel, out_type=out_type, scratch_types=scratch, grid=(walkers * row_tiles // (twins * pair),),
        grid_names=("program",), num_threads=wgs + 1, thread_name="wg", cluster=tuple(cluster.values()),
        cluster_names=tuple(cluster),
        # Fast exp2 and log, good to 2^-22; the noise's inner logarithm is its own, and a soft cap needs a better tanh. Barriers
        # that the compiler adds around stores would halt a warpgroup several times a tile: what threads write here only copies
        # and products read, behind a commit, which has a barrier of its own.
        compiler_params=mgpu.CompilerParams(lowering_semantics=mgpu.LoweringSemantics.Warpgroup,
                                            approx_math=options.soft_cap is None, unsafe_no_auto_barriers=True))
    with jax.enable_x64(False):  # indices are 32-bit numbers, in 64-bit mode too
        return run(h, w, *jax.tree.leaves(vectors), *scales)
