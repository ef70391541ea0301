"""Which row of a batch owns which pages: tables, lengths, reference counts and a free list, all arrays of fixed shape.

Nothing here touches keys and values. Invariant: ``ref_counts[page]`` is the number of entries of ``block_tables`` that
name the page, and the pages with count 0 are exactly ``free_pages[:num_free]``.

Source: W. Kwon et al., "Efficient memory management for large language model serving with PagedAttention", SOSP 2023.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Pages(NamedTuple):
    """Bookkeeping of a paged cache."""

    block_tables: jax.Array  # int32[batch, max_blocks]: page of each block of a row; -1 where it has none
    lengths: jax.Array  # int32[batch]: slots in use
    ref_counts: jax.Array  # int32[num_pages]
    free_pages: jax.Array  # int32[num_pages]: a stack; the first num_free are free
    num_free: jax.Array  # int32
    has_overflowed: jax.Array  # bool[batch]: a growth of the row was refused; stays until the row is released


class Copies(NamedTuple):
    """Pages to copy before anything is written."""

    sources: jax.Array  # int32[batch]
    targets: jax.Array  # int32[batch]; num_pages where there is nothing to copy


def init(batch: int, max_blocks: int, num_pages: int) -> Pages:
    """All pages free, all rows empty."""
    return Pages(
        jnp.full((batch, max_blocks), -1, jnp.int32),
        jnp.zeros(batch, jnp.int32),
        jnp.zeros(num_pages, jnp.int32),
        jnp.arange(num_pages, dtype=jnp.int32)[::-1],
        jnp.array(num_pages, jnp.int32),
        jnp.zeros(batch, bool),
    )


def append(pages: Pages, counts: jax.Array, page_size: int, copies_shared: bool = True) -> tuple[Pages, Copies]:
    """Grow each row by ``counts [batch]`` slots, rows in order; what does not fit is refused and flagged.

    A row whose last page is partly filled and shared would write into it, so it gets a page of its own to copy that one
    to. If all who share a page write now, the last of them keeps it. Without ``copies_shared`` it is refused instead.
    """
    tables, old = pages.block_tables, pages.lengths
    (batch, max_blocks), num_pages = tables.shape, pages.ref_counts.shape[0]
    rows, blocks = jnp.arange(batch), jnp.arange(max_blocks)
    # A refused row has a gap: it may not grow again.
    counts = jnp.where(pages.has_overflowed, 0, jnp.clip(counts, 0, max_blocks * page_size + 1)).astype(jnp.int32)
    new = old + counts
    held, needed = -(-old // page_size), -(-new // page_size)

    last = tables[rows, jnp.maximum(held - 1, 0)]
    num_owners = pages.ref_counts[last]
    is_sharing = (counts > 0) & (old % page_size > 0) & (num_owners > 1)
    at = jnp.where(is_sharing, last, num_pages)
    num_writers = jnp.zeros_like(pages.ref_counts).at[at].add(1, mode="drop")[last]
    last_writer = jnp.full_like(pages.ref_counts, -1).at[at].max(rows.astype(jnp.int32), mode="drop")[last]
    keeps = is_sharing & (num_writers == num_owners) & (last_writer == rows)
    copies = is_sharing & ~keeps

    is_short = needed <= max_blocks
    num_taken = jnp.where(is_short, needed - held + copies, 0)
    fits = is_short & ((num_taken == 0) | (jnp.cumsum(num_taken, dtype=jnp.int32) <= pages.num_free))
    if not copies_shared:
        fits &= ~copies
    # Who keeps a page may write only when the others have left it.
    stays = jnp.zeros_like(pages.ref_counts).at[jnp.where(copies & ~fits, last, num_pages)].set(1, mode="drop")[last]
    fits &= ~(keeps & (stays > 0))
    num_taken, copies = jnp.where(fits, num_taken, 0), copies & fits

    is_copy = copies[:, None] & (blocks == held[:, None] - 1)
    is_taken = is_copy | (fits[:, None] & (blocks >= held[:, None]) & (blocks < needed[:, None]))
    place = jnp.where(is_copy, 0, blocks - held[:, None] + copies[:, None])
    place += (jnp.cumsum(num_taken, dtype=jnp.int32) - num_taken)[:, None]
    taken = pages.free_pages[jnp.clip(pages.num_free - 1 - place, 0)]
    nothing = jnp.int32(num_pages)  # writes nothing under mode="drop"
    ref_counts = pages.ref_counts.at[jnp.where(is_taken, taken, nothing)].set(1, mode="drop")
    ref_counts = ref_counts.at[jnp.where(copies, last, nothing)].add(-1, mode="drop")
    targets = jnp.where(copies, jnp.max(jnp.where(is_copy, taken, 0), axis=1), nothing)
    pages = Pages(
        jnp.where(is_taken, taken, tables),
        jnp.where(fits, new, old),
        ref_counts,
        pages.free_pages,
        pages.num_free - jnp.sum(num_taken, dtype=jnp.int32),
        pages.has_overflowed | ~fits,
    )
    return pages, Copies(jnp.where(copies, last, 0), targets)


def replace(pages: Pages, block_tables: jax.Array, lengths: jax.Array, has_overflowed: jax.Array) -> Pages:
    """Other tables over the same pages: counts them again and frees the pages that nobody names any more."""
    num_pages = pages.ref_counts.shape[0]
    named = jnp.where(block_tables < 0, num_pages, block_tables)
    ref_counts = jnp.zeros_like(pages.ref_counts).at[named].add(1, mode="drop")
    is_freed = (pages.ref_counts > 0) & (ref_counts == 0)
    end = pages.num_free + jnp.cumsum(is_freed, dtype=jnp.int32)
    free_pages = pages.free_pages.at[jnp.where(is_freed, end - 1, num_pages)].set(
        jnp.arange(num_pages, dtype=jnp.int32), mode="drop"
    )
    return Pages(block_tables, lengths, ref_counts, free_pages, end[-1], has_overflowed)


def truncate(pages: Pages, lengths: jax.Array, page_size: int) -> Pages:
    """Cut each row to at most ``lengths [batch]`` slots."""
    lengths = jnp.clip(lengths, 0, pages.lengths).astype(jnp.int32)
    is_kept = jnp.arange(pages.block_tables.shape[1]) < -(-lengths // page_size)[:, None]
    return replace(pages, jnp.where(is_kept, pages.block_tables, -1), lengths, pages.has_overflowed)


def fork(pages: Pages, ancestors: jax.Array) -> Pages:
    """Row ``i`` becomes a copy of row ``ancestors[i]``, sharing all its pages; -1 makes it empty."""
    is_row = (ancestors >= 0) & (ancestors < pages.lengths.shape[0])
    ancestors = jnp.where(is_row, ancestors, 0)
    return replace(
        pages,
        jnp.where(is_row[:, None], pages.block_tables[ancestors], -1),
        jnp.where(is_row, pages.lengths[ancestors], 0),
        is_row & pages.has_overflowed[ancestors],
    )


def release(pages: Pages, is_released: jax.Array) -> Pages:
    """Empty the rows where ``is_released [batch]``; an empty row stays as it is."""
    return replace(
        pages,
        jnp.where(is_released[:, None], -1, pages.block_tables),
        jnp.where(is_released, 0, pages.lengths),
        pages.has_overflowed & ~is_released,
    )
