"""Key-value caches of decode loops: contiguous (one block of slots per row) and paged (rows own pages of a shared pool).

Slot ``p`` of a row holds the key and the value of the token at absolute position ``p``. Both caches are read and written
through ``locate``, ``write`` and ``attend``, so that a model need not know which one it was given.
"""

from gumbeljax.kv_cache.attention import attend
from gumbeljax.kv_cache.contiguous import ContiguousCache, init_contiguous
from gumbeljax.kv_cache.paged import (
    PagedCache,
    append,
    check_overflow,
    fork,
    has_overflowed,
    init_paged,
    over_paged,
    put_back,
    release,
    select_rows,
    shares_last_page,
    truncate,
)
from gumbeljax.kv_cache.pages import Pages
from gumbeljax.kv_cache.slots import Slots, locate, write

__all__ = [
    "ContiguousCache",
    "PagedCache",
    "Pages",
    "Slots",
    "append",
    "attend",
    "check_overflow",
    "fork",
    "has_overflowed",
    "init_contiguous",
    "init_paged",
    "locate",
    "over_paged",
    "put_back",
    "release",
    "select_rows",
    "shares_last_page",
    "truncate",
    "write",
]
