"""Attention of a few queries per row over a paged cache, on NVIDIA GPUs through Pallas' Triton backend.

A program takes one row of the batch, one key-value head and a part of the row's slots, finds the page of each slot in the
block table, and runs the online softmax over blocks of slots: nothing is gathered into memory, and no slot that none of the
row's queries sees is read. The queries of the heads that share a key-value head are the rows of one product.

Source: T. Dao et al., "FlashAttention", NeurIPS 2022 (online softmax); T. Dao et al., "Flash-Decoding for long-context
inference", 2023 (parts of the slots, merged by log-sum-exp); W. Kwon et al., "Efficient memory management for large language
model serving with PagedAttention", SOSP 2023.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.triton_finish import like

MOST_QUERIES = 64  # rows of a program's product: queries times query heads per key-value head
NOTHING = -1e30  # below every logit, finite so that differences are


class AttentionTiles(NamedTuple):
    """Tunables. slots: of a block, a power of two of at least 16; parts: programs that share a row and head."""

    slots: int = 64
    parts: int = 1
    num_warps: int = 4
    num_stages: int = 2


def default_tiles(q, keys, max_slots: int) -> AttentionTiles:
    """Parts of at least 512 slots, no more of them than fill about 132 multiprocessors twice. Where a multiprocessor has
    one program, nothing hides its latency: it takes as many slots at once as registers hold."""
    (batch, seq, num_heads, head_dim), num_kv_heads = q.shape, keys.shape[2]
    programs = batch * num_kv_heads
    parts = max(min(max_slots // 512, 264 // programs), 1)
    if programs * parts <= 132 and seq * (num_heads // num_kv_heads) <= 16 and head_dim * q.dtype.itemsize <= 256:
        return AttentionTiles(min(max(pl.next_power_of_2(max_slots), 16), 256), parts, num_warps=8, num_stages=1)
    return AttentionTiles(parts=parts)


def kernel(
    q_ref,  # [batch, seq * num_heads, head_dim]
    positions_ref,  # i32 [batch, seq]
    keys_ref,  # [num_pages * page_size, num_kv_heads, head_dim]
    values_ref,  # [num_pages * page_size, num_kv_heads, head_dim]
    tables_ref,  # i32 [batch, max_blocks]
    lengths_ref,  # i32 [batch]
    *out_refs,  # one part: [batch, seq * num_heads, head_dim]; more: f32 [parts, ...], high and total f32 [parts, batch, heads]
    plt, seq, num_heads, page_size, window, scale, tiles, precision,
):
    """What one program does: its queries against its part of the row's slots."""
    row, kv_head, part = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    head_dim, max_blocks = q_ref.shape[-1], tables_ref.shape[1]
    group = num_heads // keys_ref.shape[1]
    height = max(pl.next_power_of_2(seq * group), 16)
    query = lax.broadcasted_iota(jnp.int32, (height,), 0)
    is_query = query < seq * group
    at = lax.div(query, jnp.int32(group)) * num_heads + kv_head * group + lax.rem(query, jnp.int32(group))
    dims = lax.broadcasted_iota(jnp.int32, (1, head_dim), 1)  # arrays only: the interpreter mixes no arrays and slices
    q = plt.load(q_ref.at[row, at[:, None], dims], mask=is_query[:, None], other=0.0)
    position = plt.load(positions_ref.at[row, lax.div(query, jnp.int32(group))], mask=is_query, other=-1)
    length = plt.load(lengths_ref.at[row])
    # Slots that some query sees: [first, last).
    last = jnp.minimum(length, jnp.max(position) + 1)
    first = jnp.int32(0)
    if window is not None:
        first = jnp.maximum(jnp.min(jnp.where(position >= 0, position, jnp.int32(2**30))) - (window - 1), 0)
    blocks = pl.cdiv(jnp.maximum(last - first, 0), tiles.slots)
    share = pl.cdiv(blocks, tiles.parts)
    begin, end = part * share, jnp.minimum((part + 1) * share, blocks)

    def step(block, carry):
        out, high, total = carry
        slot = first + block * tiles.slots + lax.broadcasted_iota(jnp.int32, (tiles.slots,), 0)
        is_slot = slot < last
        page = plt.load(tables_ref.at[row, jnp.minimum(lax.div(slot, jnp.int32(page_size)), max_blocks - 1)], mask=is_slot,
                        other=0)
        where = jnp.maximum(page, 0) * page_size + lax.rem(slot, jnp.int32(page_size))
        k = plt.load(keys_ref.at[where[:, None], kv_head, dims], mask=is_slot[:, None], other=0.0).astype(q.dtype)
        v = plt.load(values_ref.at[where[:, None], kv_head, dims], mask=is_slot[:, None], other=0.0).astype(q.dtype)
        is_seen = (slot[None, :] <= position[:, None]) & is_slot[None, :]
        if window is not None:
            is_seen &= slot[None, :] > position[:, None] - window
        logits = jnp.where(is_seen, plt.dot(q, k.T, precision=precision) * scale, NOTHING)
        higher = jnp.maximum(high, jnp.max(logits, axis=1))
        shrink = jnp.exp(high - higher)
        weights = jnp.where(is_seen, jnp.exp(logits - higher[:, None]), 0.0)
        out = out * shrink[:, None] + plt.dot(weights.astype(v.dtype), v, precision=precision)
        return out, higher, total * shrink + jnp.sum(weights, axis=1)

    start = (jnp.zeros((height, head_dim), jnp.float32), jnp.full((height,), NOTHING, jnp.float32),
             jnp.zeros((height,), jnp.float32))
    out, high, total = lax.fori_loop(begin, end, step, start)
    keep = is_query[:, None]
    if tiles.parts == 1:
        out = out / jnp.where(total > 0, total, 1.0)[:, None]
        plt.store(out_refs[0].at[row, at[:, None], dims], out.astype(out_refs[0].dtype), mask=keep)
        return
    plt.store(out_refs[0].at[part, row, at[:, None], dims], out, mask=keep)
    plt.store(out_refs[1].at[part, row, at], high, mask=is_query)
    plt.store(out_refs[2].at[part, row, at], total, mask=is_query)


def why_not(q, keys) -> str | None:
    """Why the kernel cannot run q `[batch, seq, num_heads, head_dim]` over keys `[..., num_kv_heads, head_dim]`, or None."""
    _, seq, num_heads, head_dim = q.shape
    if head_dim not in (16, 32, 64, 128, 256):
        return f"head_dim must be a power of two from 16 to 256, got {head_dim}"
    if (queries := seq * (num_heads // keys.shape[-2])) > MOST_QUERIES:
        return f"a row may have {MOST_QUERIES} queries per key-value head, got {queries}"
    if q.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f"q must be bfloat16, float16 or float32, got {q.dtype}"
    return None


def attend(q, keys, values, positions, block_tables, lengths, *, plt, window=None, tiles=None, interpret=False):
    """Causal attention over pages; exact up to the order of float32 sums.

    Args:
      q: `[batch, seq, num_heads, head_dim]`, as `why_not` allows.
      keys, values: `[num_pages, page_size, num_kv_heads, head_dim]`.
      positions: i32 `[batch, seq]`; a query sees the slots up to its position, or the last `window` of them.
      block_tables: i32 `[batch, max_blocks]`, the page of each block; -1 where none, which no query may see.
      lengths: i32 `[batch]`, slots that exist.
      plt: jax's Triton module.

    Returns:
      `[batch, seq, num_heads, head_dim]` of q's dtype; 0 for a query that sees nothing.
    """
    batch, seq, num_heads, head_dim = q.shape
    page_size, num_kv_heads = keys.shape[1:3]
    tiles = tiles or default_tiles(q, keys, block_tables.shape[1] * page_size)
    f32 = jnp.float32
    arguments = [q.reshape(batch, seq * num_heads, head_dim), positions.astype(jnp.int32),
                 *(x.reshape(-1, num_kv_heads, head_dim) for x in (keys, values)), block_tables, lengths.astype(jnp.int32)]
    shape = (batch, seq * num_heads, head_dim)
    if tiles.parts == 1:
        out_shape = [like(arguments, shape, q.dtype)]
    else:
        out_shape = [like(arguments, (tiles.parts, *of), f32) for of in (shape, shape[:-1], shape[:-1])]
    body = functools.partial(
        kernel, plt=plt, seq=seq, num_heads=num_heads, page_size=page_size, window=window, scale=head_dim**-0.5, tiles=tiles,
        precision=lax.Precision.HIGHEST if q.dtype == f32 else None)
    out = pl.pallas_call(
        body, grid=(batch, num_kv_heads, tiles.parts), out_shape=out_shape, interpret=interpret, name="gumbeljax_attention",
        compiler_params=plt.CompilerParams(num_warps=tiles.num_warps, num_stages=tiles.num_stages))(*arguments)
    return (out[0] if tiles.parts == 1 else merge(*out).astype(q.dtype)).reshape(q.shape)


def merge(out, high, total) -> jax.Array:
    """The parts as one: `[*shape, head_dim]` from `[parts, *shape, head_dim]` and the highest logit and mass of each part."""
    weights = jnp.exp(high - jnp.max(high, axis=0))
    total = jnp.sum(weights * total, axis=0)
    return jnp.sum(weights[..., None] * out, axis=0) / jnp.where(total > 0, total, 1.0)[..., None]
