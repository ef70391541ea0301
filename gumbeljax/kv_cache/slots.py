"""One forward pass over a cache: where its tokens are written, and attention over what each of them may see."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from gumbeljax.kv_cache.contiguous import ContiguousCache
from gumbeljax.kv_cache.paged import PagedCache


class Slots(NamedTuple):
    """What every layer of one pass needs to know of the cache; from ``locate``."""

    positions: jax.Array  # int32[batch, seq]
    pages: jax.Array  # int32[batch, seq]: page of each token, or past the end to write nothing
    offsets: jax.Array  # int32[batch, seq]: its slot inside the page
    block_tables: jax.Array | None  # int32[batch, max_blocks]; None: row i is page i, as in a contiguous cache
    lengths: jax.Array | None  # int32[batch]: slots from here on do not exist


def locate(cache: ContiguousCache | PagedCache, positions: jax.Array) -> Slots:
    """Find the slots of the tokens at ``positions int32[batch, seq]``.

    A token writes nothing if its position is negative or outside the row's slots, or its page has another owner.
    """
    num_pages, page_size = cache.keys[0].shape[:2]
    if isinstance(cache, ContiguousCache):
        rows = jnp.broadcast_to(jnp.arange(num_pages)[:, None], positions.shape)
        is_slot = (positions >= 0) & (positions < page_size)
        return Slots(positions, jnp.where(is_slot, rows, num_pages), positions, None, None)
    pages = cache.pages
    is_slot = (positions >= 0) & (positions < pages.lengths[:, None])
    found = jnp.take_along_axis(pages.block_tables, jnp.where(is_slot, positions // page_size, 0), axis=1)
    is_slot &= pages.ref_counts[found] == 1
    return Slots(
        positions, jnp.where(is_slot, found, num_pages), positions % page_size, pages.block_tables, pages.lengths
    )


def write(side: jax.Array, new: jax.Array, slots: Slots) -> jax.Array:
    """Store ``new [batch, seq, ...]`` in one layer's keys or values ``[num_pages, page_size, ...]``."""
    return side.at[slots.pages, slots.offsets].set(new.astype(side.dtype), mode="drop")


def visible(slots: Slots, num_slots: int, window: int | None = None) -> jax.Array:
    """Which slots each query sees: ``bool[batch, seq, num_slots]``, those up to its position, or the last ``window``."""
    at, positions = jnp.arange(num_slots), slots.positions[..., None]
    mask = at <= positions
    if slots.lengths is not None:
        mask &= at < slots.lengths[:, None, None]
    return mask if window is None else mask & (at > positions - window)


def attend(q: jax.Array, keys: jax.Array, values: jax.Array, slots: Slots, *, window: int | None = None) -> jax.Array:
    """Causal attention of ``q [batch, seq, num_heads, head_dim]`` over the cache.

    Args:
      q: queries; ``num_heads`` is a multiple of ``num_kv_heads``.
      keys, values: one layer's, ``[num_pages, page_size, num_kv_heads, head_dim]``, the pass's own already written.
      slots: from ``locate``.
      window: see only the last ``window`` positions, the query's own included; None: all.

    Returns:
      ``[batch, seq, num_heads, head_dim]``; 0 for a query that sees nothing. A slot that no query of the row sees has no
      influence, whatever it holds (NaN too, in a paged cache).
    """
    if slots.block_tables is None:
        mask = visible(slots, keys.shape[1], window)
    else:
        # Gathered, not indexed in place: XLA has no paged product. -1 reads some page that the mask hides.
        tables = jnp.maximum(slots.block_tables, 0)
        keys, values = (x[tables].reshape(tables.shape[0], -1, *x.shape[2:]) for x in (keys, values))
        mask = visible(slots, keys.shape[1], window)
        # Another row may have left NaN there, and 0 * NaN is NaN. (Masked keys are harmless: their logits are replaced.)
        values = jnp.where(jnp.any(mask, axis=1)[..., None, None], values, 0)
    return jax.nn.dot_product_attention(q, keys.astype(q.dtype), values.astype(q.dtype), mask=mask[:, None])
