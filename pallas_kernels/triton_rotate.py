"""Between the projections and attention, in one launch on NVIDIA GPUs: norms of queries and keys, rotary embedding, and the new
keys and values written into the cache in place. XLA takes seven launches for it, of a microsecond of work each.

Source of the embedding: J. Su et al., "RoFormer", 2021; dimension `i` pairs with `i + head_dim / 2`.
"""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.triton_finish import like


def kernel(
    qkv_ref,  # [rows, num_heads + 2 num_kv_heads, head_dim]
    cos_ref,  # f32 [rows, head_dim / 2]
    sin_ref,  # f32 [rows, head_dim / 2]
    pages_ref,  # i32 [rows]: past the end, nothing is written
    offsets_ref,  # i32 [rows]
    *refs,  # with norms: their scales [head_dim] x 2; keys and values [num_pages, page_size, num_kv_heads, head_dim], which are
    # the last two outputs; rotated queries [rows, num_heads, head_dim], keys, values
    plt, has_norms, eps,
):
    """What one program does: one token."""
    *scale_refs, _, _, q_ref, keys_ref, values_ref = refs
    q_scale, k_scale = scale_refs if has_norms else (None, None)
    (num_heads, head_dim), num_kv_heads = q_ref.shape[1:], keys_ref.shape[2]
    row, half = pl.program_id(0), head_dim // 2
    dims = lax.broadcasted_iota(jnp.int32, (1, half), 1)
    cos, sin = (plt.load(ref.at[row, dims]) for ref in (cos_ref, sin_ref))
    page, offset = plt.load(pages_ref.at[row]), plt.load(offsets_ref.at[row])

    def heads(count):
        head = lax.broadcasted_iota(jnp.int32, (pl.next_power_of_2(count), 1), 0)
        return head, jnp.broadcast_to(head < count, (head.shape[0], half))

    def halves(first_head, count):
        head, keep = heads(count)
        return [plt.load(qkv_ref.at[row, first_head + head, dims + start], mask=keep, other=0) for start in (0, half)]

    def rotated(first_head, count, scale_ref):
        first, second = (x.astype(jnp.float32) for x in halves(first_head, count))
        if scale_ref is not None:
            total = jnp.sum(first * first, axis=1) + jnp.sum(second * second, axis=1)
            inverse = lax.rsqrt(total / head_dim + eps)[:, None]
            scales = (plt.load(scale_ref.at[dims + start]).astype(jnp.float32) for start in (0, half))
            first, second = ((x * inverse * scale).astype(qkv_ref.dtype).astype(jnp.float32)  # as rounded by a norm alone
                             for x, scale in zip((first, second), scales, strict=True))
        return [x.astype(qkv_ref.dtype) for x in (first * cos - second * sin, second * cos + first * sin)]

    head, keep = heads(num_heads)
    for start, x in zip((0, half), rotated(0, num_heads, q_scale), strict=True):
        plt.store(q_ref.at[row, head, dims + start], x, mask=keep)
    head, keep = heads(num_kv_heads)
    is_slot, page = keep & (page < keys_ref.shape[0]), jnp.minimum(page, keys_ref.shape[0] - 1)
    k, v = rotated(num_heads, num_kv_heads, k_scale), halves(num_heads + num_kv_heads, num_kv_heads)
    for ref, sides in ((keys_ref, k), (values_ref, v)):
        for start, x in zip((0, half), sides, strict=True):
            plt.store(ref.at[page, offset, head, dims + start], x.astype(ref.dtype), mask=is_slot)


def rotate_and_write(qkv, cos, sin, scales, keys, values, pages, offsets, *, eps, plt, interpret=False):
    """Norms, rotary embedding and the write of one layer.

    Args:
      qkv: `[rows, num_heads + 2 num_kv_heads, head_dim]`, queries, keys and values; head_dim a power of two of at least 16.
      cos, sin: f32 `[rows, head_dim / 2]`.
      scales: those of the norms of q and k, two `[head_dim]`, or None where there are no norms.
      keys, values: `[num_pages, page_size, num_kv_heads, head_dim]`; donated to the results.
      pages, offsets: i32 `[rows]`, where each token goes; a page past the end is nowhere.
      eps: of the norms.
      plt: jax's Triton module.

    Returns:
      (rotated q, keys, values).
    """
    (rows, num_all, head_dim), num_kv_heads = qkv.shape, keys.shape[2]
    arguments = [qkv, cos, sin, pages.astype(jnp.int32), offsets.astype(jnp.int32), *(scales or ()), keys, values]
    shapes = ((rows, num_all - 2 * num_kv_heads, head_dim), qkv.dtype), (keys.shape, keys.dtype), (values.shape, values.dtype)
    out_shape = [like(arguments, *of) for of in shapes]
    count = len(arguments)
    return pl.pallas_call(
        functools.partial(kernel, plt=plt, has_norms=scales is not None, eps=eps), grid=(rows,), out_shape=out_shape,
        input_output_aliases={count - 2: 1, count - 1: 2}, interpret=interpret, name="gumbeljax_rotate",
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=1))(*arguments)


def why_not(head_dim: int) -> str | None:
    """Why the kernel cannot run heads of this size, or None if it can."""
    return None if head_dim >= 16 and head_dim & (head_dim - 1) == 0 else f"head_dim must be a power of two, got {head_dim}"
