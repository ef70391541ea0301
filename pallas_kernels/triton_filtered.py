"""Draws under filters on NVIDIA GPUs: a product leaves the logits, one or two small kernels do the rest, and nothing is sorted.

On Hopper the kernel of `mosaic` makes the logits, and summarises them meanwhile; elsewhere, of few rows, and where options are
arrays, XLA makes them and the first of these kernels follows:

    summarise   a program per block of a row: its mass, the largest logit of every group, one logit of every group as a sample
    settle      a program per row: if the groups with the largest logits hold what is kept, the draw; else it looks further,
                as `triton_further` says, at as many groups as it takes

What is kept is decided by the rules of `kept`; guesses cost time only. Two masses of top_p are float32 sums and not its
integers, that of the whole row and part of that above where a prefix is likely to end: its set is the one of `kept` to 1e-6 of
p.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import mosaic, mosaic_kernel, noise, race
from pallas_kernels import triton_prefix as prefix
from pallas_kernels.finish import Draw
from pallas_kernels.kept import Filters, Kept
from pallas_kernels.logits import Elementwise
from pallas_kernels.mosaic_race import sample_of
from pallas_kernels.tiles import TritonTiles
from pallas_kernels.triton import operands
from pallas_kernels.triton_finish import given, like
from pallas_kernels.triton_rows import block_of, put, row_of, scatter, split, tokens_at, tokens_of
from pallas_kernels.triton_settle import settle
from pallas_kernels.triton_shapes import RANKED, WARPS, Inputs, Memory, Shape, Summary
from pallas_kernels.vectors import pack


def summarise(*refs, shape: Shape, trees):
    """One block: masses, the largest logit of each group, and one of its logits."""
    refs, out = split(refs, trees)
    row, block, groups, is_there = block_of(shape, pl.program_id(0), refs.raw.shape[0])
    own = row_of(shape, refs, row)
    _, model, x = tokens_of(shape, refs, row, groups, is_there)
    group_top = jnp.max(x, axis=1)
    top = jnp.max(group_top)
    own = own._replace(top=top)
    put(shape, (out.top, out.total), (block, row), (top, jnp.sum(prefix.weight_of(x, own))))
    if shape.with_model:
        top = jnp.max(model)
        total = jnp.sum(jnp.exp(model - race.finite_or_zero(top)))
        put(shape, (out.model_top, out.model_total), (block, row), (top, total))
    scatter(shape, out.group_top, row, groups, group_top, is_there)
    if shape.has_prefix:
        ids = noise.GROUP * groups + sample_of(groups)
        sample = tokens_at(shape, refs, row, jnp.minimum(ids, shape.vocab - 1), ids < shape.vocab)[1]
        scatter(shape, out.sample, row, groups, sample, is_there)


def is_by_mosaic(h, w, options, vocab: int, vocab_axis: int) -> bool:
    """Whether the Mosaic kernel makes and summarises the logits. It stores whole tiles of rows: for few, XLA is faster."""
    rows, padded = h.shape[0], (h.shape[0] + 256) * (vocab + 2**16)
    return (w is not None and h.dtype == w.dtype and 32 < rows <= 4096 and padded < 2**31
            and mosaic_kernel.why_not(h, w, options, vocab_axis) is None)


def draw(h, w, keys, t, options: Elementwise, filters: Filters, *, plt, mgpu=None, num_sms=mosaic.NUM_SMS, vocab, vocab_axis=0,
         precision=None, with_log_probs=False, interpret=False) -> tuple[Draw, Kept]:
    """As `filtered.draw` for one token per row; and the last token of the prefix that top_k and top_p keep. Leaves `[rows]`.

    `mgpu`: jax's Mosaic GPU module, where the GPU is one for it.
    """
    rows, made = h.shape[0], None
    if mgpu is not None and is_by_mosaic(h, w, options, vocab, vocab_axis):
        made = mosaic.stage1_logits(h, w, t, options, mgpu=mgpu, vocab=vocab, vocab_axis=vocab_axis, with_model=with_log_probs,
                                    num_sms=num_sms)
        raw = made.raw
    else:
        raw, _ = operands(h, w, TritonTiles(stored=True), vocab=vocab, vocab_axis=vocab_axis, precision=precision)
    on = {name: x for name, x in filters._asdict().items() if x is not None}
    shape = Shape(plt, vocab, options.scale, options.soft_cap, tuple(options.dense()), len(keys), tuple(on), with_log_probs,
                  interpret)
    inputs = Inputs(raw, pack(t, (*keys, *on.values())), tuple(given(options)))
    leaves = jax.tree.leaves(inputs)
    f32, i32 = jnp.float32, jnp.int32

    def of(kind, *size):
        return like(leaves, (rows, *size), kind)

    def launch(kernel, programs, num_warps, arguments, outputs):
        of_call, wanted = jax.tree.leaves(arguments), jax.tree.leaves(outputs)
        body = functools.partial(kernel, shape=shape, trees=tuple(map(jax.tree.structure, (*arguments, *outputs))))
        out = pl.pallas_call(body, grid=(programs,), out_shape=wanted, interpret=interpret,
                             compiler_params=plt.CompilerParams(num_warps=num_warps, num_stages=1),
                             name=f"gumbeljax_{kernel.__name__}")(*of_call)
        return jax.tree.unflatten(jax.tree.structure(outputs), out)

    number, row = of(i32), of(f32)
    if made is None:
        block, group = like(leaves, (shape.num_blocks, rows), f32), of(f32, shape.num_groups)
        model = block if with_log_probs else None
        summary = Summary(block, block, model, model, group, group if shape.has_prefix else None)
        summary, = launch(summarise, rows * shape.num_blocks, 4, (inputs,), (summary,))
    else:
        summary = Summary(made.top, made.total, made.top if with_log_probs else None, made.model_total, made.group_top,
                          made.sample if shape.has_prefix else None)
    bits, in_span = (of(i32, n) if shape.has_prefix else None for n in (shape.num_groups, shape.in_span))
    memory = Memory(of(i32, shape.num_groups), bits, in_span, of(i32, 4 * RANKED))
    token = Draw(number, row, row, row, row)
    end, out, _ = launch(settle, rows, WARPS, (inputs, summary), (Kept(number, number), token, memory))
    return out, end
