"""The paged cache: rows own pages of a pool that all of them share; pure functions from one cache to the next.

``append`` before a forward pass makes room for its tokens, ``truncate`` after it takes back what was not used, ``fork``
lets rows share pages (a system prompt, the particles of a filter), ``release`` empties rows. Shapes never change, so none
of them retraces; donate the cache and nothing but single shared pages is copied.

A page with several owners is read-only: ``append`` gives a row a copy of its last page before it writes there, and
``locate`` writes to pages with one owner alone.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gumbeljax import _checks
from gumbeljax._call import plain_broadcasting
from gumbeljax.kv_cache import pages as tables
from gumbeljax.kv_cache.contiguous import zeros
from gumbeljax.kv_cache.pages import Pages


class PagedCache(NamedTuple):
    """Keys and values of every layer, one array per layer, and who owns their pages."""

    keys: tuple[jax.Array, ...]  # num_layers x [num_pages, page_size, num_kv_heads, head_dim]
    values: tuple[jax.Array, ...]  # num_layers x [num_pages, page_size, num_kv_heads, head_dim]
    pages: Pages

    @property
    def page_size(self) -> int:
        return self.keys[0].shape[1]


def init_paged(
    num_layers: int,
    batch: int,
    max_length: int,
    num_kv_heads: int,
    head_dim: int,
    dtype=jnp.float32,
    *,
    page_size: int = 16,
    num_pages: int | None = None,
) -> PagedCache:
    """An empty paged cache.

    Args:
      num_layers: layers of the model.
      batch: rows.
      max_length: most slots that one row may reach; rounded up to whole pages.
      num_kv_heads: key-value heads per layer.
      head_dim: size of one head.
      dtype: dtype of keys and values.
      page_size: slots per page.
      num_pages: pages that the rows share; default: enough for ``batch`` rows of ``max_length``.

    Returns:
      A ``PagedCache``; its memory is that of ``num_pages * page_size`` slots.

    >>> cache = init_paged(2, 3, 16, 1, 4, page_size=8, num_pages=5)
    >>> cache.keys[0].shape, cache.pages.block_tables.shape
    ((5, 8, 1, 4), (3, 2))
    >>> cache = append(cache, jnp.array([9, 0, 16]))
    >>> cache.pages.lengths.tolist(), int(cache.pages.num_free)
    ([9, 0, 16], 1)
    """
    for name, value in (
        ("num_layers", num_layers), ("batch", batch), ("max_length", max_length), ("num_kv_heads", num_kv_heads),
        ("head_dim", head_dim), ("page_size", page_size),
    ):  # fmt: skip
        _checks.count(value, name, "raise it")
    max_blocks = -(-max_length // page_size)
    if num_pages is None:
        num_pages = batch * max_blocks
    _checks.count(num_pages, "num_pages", "leave it out for pages for every row")
    keys, values = zeros((num_pages, page_size, num_kv_heads, head_dim), num_layers, dtype)
    return PagedCache(keys, values, tables.init(batch, max_blocks, num_pages))


def _of_rows(cache: PagedCache, x, name: str, kind: Any = jnp.integer) -> jax.Array:
    """Checked ``[batch]``, one number for each row; one alone is that of all."""
    x, batch = _checks.as_array(_checks.in_32_bits(x), name), cache.pages.lengths.shape[0]
    if not jnp.issubdtype(x.dtype, kind):
        wanted = "boolean" if kind is jnp.bool_ else "integers"
        raise TypeError(f"{name} must be {wanted}; got dtype {x.dtype}: cast it.")
    if x.shape not in ((), (batch,)):
        raise ValueError(f"{name} must have one number for each of the {batch} rows; got shape {list(x.shape)}: select_rows "
                         "gives a part of them.")  # fmt: skip
    return jnp.broadcast_to(x if kind is jnp.bool_ else _checks.as_ids(x), (batch,))


@plain_broadcasting()
def append(cache: PagedCache, counts: jax.Array, *, copies_shared: bool = True) -> PagedCache:
    """Make room for ``counts int32[batch]`` more tokens per row, in row order.

    A row that does not fit (no free page, or longer than ``max_length``) keeps its length and is flagged in
    ``cache.pages.has_overflowed``; a flagged row grows no more until it is released. Nothing is overwritten.

    ``copies_shared``: False where no row has a partly filled last page in common with another, as between two ``fork``:
    then no code that copies pages runs, which costs memory traffic even where it copies none. A row that needs a copy after
    all is refused like one that does not fit.
    """
    pages, copies = tables.append(cache.pages, _of_rows(cache, counts, "counts"), cache.page_size, copies_shared)
    if not copies_shared:
        return cache._replace(pages=pages)

    def copied(slots):
        return slots.at[copies.targets].set(slots[copies.sources], mode="drop")

    return PagedCache(tuple(map(copied, cache.keys)), tuple(map(copied, cache.values)), pages)


@plain_broadcasting()
def truncate(cache: PagedCache, lengths: jax.Array) -> PagedCache:
    """Cut each row to at most ``lengths int32[batch]`` tokens; pages that nobody uses any more are free again."""
    return cache._replace(pages=tables.truncate(cache.pages, _of_rows(cache, lengths, "lengths"), cache.page_size))


@plain_broadcasting()
def fork(cache: PagedCache, ancestors: jax.Array) -> PagedCache:
    """Row ``i`` becomes row ``ancestors[i]``, ``int32[batch]``; -1 makes it empty.

    Copies rows of the block table, no keys and values: the next ``append`` copies the last page of a row if it is partly
    filled and still shared.
    """
    return cache._replace(pages=tables.fork(cache.pages, _of_rows(cache, ancestors, "ancestors")))


@plain_broadcasting()
def release(cache: PagedCache, is_released: jax.Array) -> PagedCache:
    """Empty the rows where ``is_released bool[batch]`` and take their overflow flag away; releasing twice does nothing."""
    return cache._replace(pages=tables.release(cache.pages, _of_rows(cache, is_released, "is_released", jnp.bool_)))


@plain_broadcasting()
def select_rows(cache: PagedCache, rows: jax.Array) -> PagedCache:
    """The same pool seen by the rows ``int32[n]`` alone, for a forward pass over a part of the batch; -1: an empty row.

    Its tables are for ``locate`` only: after the pass give the pool back with ``put_back``.
    """
    pages, given = cache.pages, _checks.listed(rows, "rows")
    if not _checks.is_integral(given) or given.ndim != 1:
        raise ValueError(f"rows must be integers [n]; got {given.dtype}{list(given.shape)}: pass numbers of rows, -1 for none.")
    rows = _checks.as_ids(given)
    is_row = (rows >= 0) & (rows < pages.lengths.shape[0])  # as in `fork`: any other is an empty row
    safe = jnp.where(is_row, rows, 0)
    return cache._replace(
        pages=pages._replace(
            block_tables=jnp.where(is_row[:, None], pages.block_tables[safe], -1),
            lengths=jnp.where(is_row, pages.lengths[safe], 0),
            has_overflowed=is_row & pages.has_overflowed[safe],
        )
    )


def put_back(cache: PagedCache, selected: PagedCache) -> PagedCache:
    """``cache`` with the keys and values that a pass over ``selected`` rows has written."""
    return selected._replace(pages=cache.pages)


def _is_paged(x: Any) -> bool:
    return isinstance(x, PagedCache)


def over_paged(fn: Callable[[PagedCache], PagedCache], cache: Any) -> Any:
    """Apply ``fn`` to every ``PagedCache`` in a pytree, and to nothing else."""
    return jax.tree.map(lambda x: fn(x) if _is_paged(x) else x, cache, is_leaf=_is_paged)


def shares_last_page(cache: Any) -> bool:
    """Whether some row's last page is partly filled and has another owner, so that the next ``append`` copies it. Reads the
    device: for the host, before a loop."""
    for part in filter(_is_paged, jax.tree.leaves(cache, is_leaf=_is_paged)):
        block_tables, lengths, ref_counts = map(np.asarray, jax.device_get(part.pages[:3]))
        last = np.take_along_axis(block_tables, np.maximum(-(-lengths // part.page_size) - 1, 0)[:, None], axis=1)[:, 0]
        if np.any((lengths % part.page_size > 0) & (ref_counts[last] > 1)):
            return True
    return False


def has_overflowed(cache: Any) -> jax.Array | bool:
    """``bool[batch]``: a growth of the row was refused in some ``PagedCache`` of the pytree; False without any."""
    found = False
    for part in filter(_is_paged, jax.tree.leaves(cache, is_leaf=_is_paged)):
        found = found | part.pages.has_overflowed
    return found


def check_overflow(cache: Any) -> None:
    """Raise ``ValueError`` if a growth of any row was refused. Reads the device: for the host, between chunks."""
    for part in filter(_is_paged, jax.tree.leaves(cache, is_leaf=_is_paged)):
        if (rows := np.flatnonzero(np.asarray(part.pages.has_overflowed))).size:
            num_pages, max_blocks = part.pages.ref_counts.shape[0], part.pages.block_tables.shape[1]
            raise ValueError(
                f"cache must have room for every token, got {num_pages} pages of {part.page_size} slots, at most {max_blocks} "
                f"a row, which rows {rows.tolist()} outgrew; raise num_pages or max_length, or run fewer rows."
            )
