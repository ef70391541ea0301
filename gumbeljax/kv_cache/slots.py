"""One forward pass over a cache: where its tokens are written."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from gumbeljax import _checks
from gumbeljax._call import plain_broadcasting
from gumbeljax.kv_cache.contiguous import ContiguousCache
from gumbeljax.kv_cache.paged import PagedCache


class Slots(NamedTuple):
    """What every layer of one pass needs to know of the cache; from ``locate``."""

    positions: jax.Array  # int32[batch, seq]
    pages: jax.Array  # int32[batch, seq]: page of each token, or past the end to write nothing
    offsets: jax.Array  # int32[batch, seq]: its slot inside the page
    block_tables: jax.Array | None  # int32[batch, max_blocks]; None: row i is page i, as in a contiguous cache
    lengths: jax.Array | None  # int32[batch]: slots from here on do not exist


@plain_broadcasting()
def locate(cache: ContiguousCache | PagedCache, positions: jax.Array) -> Slots:
    """Find the slots of the tokens at ``positions int32[batch, seq]``.

    A token writes nothing if its position is negative or outside the row's slots, or its page has another owner.
    """
    num_pages, page_size = cache.keys[0].shape[:2]
    positions = _checks.as_array(positions, "positions")
    batch = num_pages if isinstance(cache, ContiguousCache) else cache.pages.lengths.shape[0]
    if not _checks.is_integral(positions) or positions.ndim != 2 or positions.shape[0] != batch:
        raise ValueError(f"positions must be integers {[batch, 'seq']}, as many rows as the cache; got {positions.dtype}"
                         f"{list(positions.shape)}: give every token its position.")
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
