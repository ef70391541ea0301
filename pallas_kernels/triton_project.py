"""Products of a few rows with weight matrices, and what stands before and after them, in one launch on NVIDIA GPUs.

A decode step of a few rows reads weights and little else: a launch of XLA's for a norm, a sum of parts or a gate takes a tenth
of the time of its product. Here a program makes some columns of the result from all of `d_in`: it norms the rows itself, which
costs it one look at them, and adds or gates what it has in registers.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.triton_finish import like

MOST_ROWS = 64
MOST_NORMED_ROWS = 4  # a program norms every row


class ProjectTiles(NamedTuple):
    """Tunables, powers of two. columns: of a program's result (gated: of each of its two products); d_in: of a step."""

    columns: int = 16
    d_in: int = 128
    num_warps: int = 4
    num_stages: int = 4


def kernel(
    x_ref,  # [rows, d_in]
    *refs,  # with a norm: its scale [d_in]; weights [d_in, columns] of each; residual [rows, columns]; out [rows, columns]
    plt, has_norm, num_weights, is_gated, has_residual, eps, tiles,
):
    """What one program does: some columns of one product, or of both of a gate."""
    refs = list(refs)
    scale_refs = [refs.pop(0) for _ in range(has_norm)]
    w_refs, (*residual_refs, out_ref) = refs[:num_weights], refs[num_weights:]
    num_rows, d_in = x_ref.shape
    height = max(pl.next_power_of_2(num_rows), 16)  # tensor cores take no fewer
    row = lax.broadcasted_iota(jnp.int32, (height,), 0)
    is_row = row < num_rows
    inverse = jnp.zeros((height,), jnp.float32)
    if has_norm:
        for i in range(num_rows):
            at = lax.broadcasted_iota(jnp.int32, (pl.next_power_of_2(d_in),), 0)
            x = plt.load(x_ref.at[i, at], mask=at < d_in, other=0).astype(jnp.float32)
            inverse = jnp.where(row == i, lax.rsqrt(jnp.sum(x * x) / d_in + eps), inverse)

    def products(first, *w_refs):
        """Columns from `first` on of the products with each of the weights, f32."""
        column = first + lax.broadcasted_iota(jnp.int32, (tiles.columns,), 0)

        def step(i, sums):
            at = i * tiles.d_in + lax.broadcasted_iota(jnp.int32, (tiles.d_in,), 0)
            is_x = jnp.broadcast_to(is_row[:, None], (height, tiles.d_in))
            x = plt.load(x_ref.at[row[:, None], at[None, :]], mask=is_x, other=0)
            for scale_ref in scale_refs:
                scale = plt.load(scale_ref.at[at]).astype(jnp.float32)
                x = (x.astype(jnp.float32) * inverse[:, None] * scale[None, :]).astype(x.dtype)
            return tuple(out + plt.dot(x, plt.load(ref.at[at[:, None], column[None, :]]))
                         for out, ref in zip(sums, w_refs, strict=True))

        start = tuple(jnp.zeros((height, tiles.columns), jnp.float32) for _ in w_refs)
        return column, lax.fori_loop(0, d_in // tiles.d_in, step, start)

    keep = jnp.broadcast_to(is_row[:, None], (height, tiles.columns))
    dtype = out_ref.dtype

    def store(column, out):
        plt.store(out_ref.at[row[:, None], column[None, :]], out, mask=keep)

    own = pl.program_id(0) * tiles.columns
    if is_gated:
        column, sums = products(own, *w_refs)
        gate, up = (x.astype(dtype).astype(jnp.float32) for x in sums)  # as rounded by products alone
        store(column, ((gate / (1 + jnp.exp(-gate))).astype(dtype).astype(jnp.float32) * up).astype(dtype))
        return
    first = 0  # of the program's weights, among all columns
    for ref in w_refs:
        size = ref.shape[1]

        @pl.when((own >= first) & (own < first + size))
        def _(ref=ref, first=first):
            column, (out,) = products(own - first, ref)
            out = out.astype(dtype)
            if has_residual:
                out = plt.load(residual_refs[0].at[row[:, None], column[None, :]], mask=keep, other=0) + out
            store(first + column, out)

        first += size


def default_tiles(rows: int, d_in: int, columns: Sequence[int], is_gated: bool = False) -> ProjectTiles:
    """Narrow ones: a product has few columns for about 132 multiprocessors, which take all programs at once. Where each gets
    but one, more of the weights are under way to it."""
    programs = sum(columns) // (32 if is_gated else 16)
    most = 64 if rows > 16 else 128 if is_gated else 256
    width = next(size for size in (256, 128, 64, 32, 16, 1) if d_in % size == 0 and size <= most)
    return ProjectTiles(columns=16, d_in=width, num_stages=4 if programs >= 200 else 6)


def why_not(x, weights: Sequence[jax.Array], *, has_norm: bool = False, tiles: ProjectTiles | None = None) -> str | None:
    """Why the kernel cannot run x `[rows, d_in]` and weights `[d_in, columns]`, or None if it can."""
    rows, d_in = x.shape
    columns = [w.shape[1] for w in weights]
    tiles = tiles or default_tiles(rows, d_in, columns)
    if rows > (most := MOST_NORMED_ROWS if has_norm else MOST_ROWS):
        return f"x may have {most} rows, got {rows}"
    if x.dtype not in (jnp.bfloat16, jnp.float16) or any(w.dtype != x.dtype for w in weights):
        return f"x and the weights must be bfloat16 or float16, got {x.dtype} and {[str(w.dtype) for w in weights]}"
    if tiles.d_in < 16 or d_in % tiles.d_in or any(size % tiles.columns for size in columns):
        return f"tiles of {tiles.d_in} x {tiles.columns} must cut the weights evenly, got {[w.shape for w in weights]}"
    return None


def project(x, weights, scale=None, residual=None, *, eps=0.0, is_gated=False, plt, tiles=None, interpret=False) -> jax.Array:
    """`norm(x) @ weights` side by side; `silu` of the first times the second where gated; plus the residual.

    Args:
      x: `[rows, d_in]`, as `why_not` allows.
      weights: matrices `[d_in, columns]` of one dtype, read in place; two of one shape where gated.
      scale: `[d_in]` of an RMS norm of x before the product; None: no norm.
      residual: `[rows, columns]`, added to the product.
      eps: of the norm.
      plt: jax's Triton module.

    Returns:
      `[rows, sum of columns]`, or `[rows, columns]` where gated, of x's dtype, rounded where separate operations would round.
    """
    num_columns = weights[0].shape[1] if is_gated else sum(w.shape[1] for w in weights)
    tiles = tiles or default_tiles(x.shape[0], x.shape[1], [w.shape[1] for w in weights], is_gated)
    arguments = [x, *([] if scale is None else [scale]), *weights, *([] if residual is None else [residual])]
    body = functools.partial(
        kernel, plt=plt, has_norm=scale is not None, num_weights=len(weights), is_gated=is_gated,
        has_residual=residual is not None, eps=eps, tiles=tiles)
    return pl.pallas_call(
        body, grid=(num_columns // tiles.columns,), out_shape=like(arguments, (x.shape[0], num_columns), x.dtype),
        interpret=interpret, name="gumbeljax_project" + "_normed" * (scale is not None) + "_added" * (residual is not None),
        compiler_params=plt.CompilerParams(num_warps=tiles.num_warps, num_stages=tiles.num_stages))(*arguments)
