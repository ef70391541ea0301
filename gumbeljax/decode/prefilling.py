"""Prompts through the model, whole or in chunks of fixed width, a prefix that all of them share once."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gumbeljax import _checks, kv_cache
from gumbeljax._call import plain_broadcasting
from gumbeljax._checks import is_concrete
from gumbeljax._typing import ArrayLike
from gumbeljax.decode.requests import check_ids, check_pad, whole_numbers
from gumbeljax.decode.state import DecodeState
from gumbeljax.kv_cache import ContiguousCache, PagedCache


@partial(jax.jit, static_argnums=0, donate_argnames="cache")
@plain_broadcasting()
def extend(decode_fn, params, cache, tokens, starts, counts, rows=None):
    """Run ``counts [n]`` more tokens of rows that hold ``starts [n]`` of them; ``tokens int32[n, width]``, then pads.

    With ``rows int32[n]`` the pass is over these rows of a ``PagedCache`` alone (-1: over none).

    Returns the hidden state of each row's last token, ``[n, d_model]``, and the cache.
    """
    at = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    # Pads sit at the positions that follow: nothing real looks at them, and the real tokens of those positions
    # overwrite them. In a paged cache those positions do not exist yet, and nothing is written.
    tokens, positions = jnp.where(at < counts[:, None], tokens, 0), starts[:, None] + at
    append = partial(kv_cache.append, copies_shared=False)  # prompts share full pages alone
    if rows is None:
        cache = kv_cache.over_paged(lambda cache: append(cache, counts), cache)
        h, cache = decode_fn(params, tokens, positions, cache)
    else:
        batch = cache.pages.lengths.shape[0]
        grown = jnp.zeros(batch, jnp.int32).at[jnp.where(rows < 0, batch, rows)].add(counts, mode="drop")
        cache = append(cache, grown)
        h, part = decode_fn(params, tokens, positions, kv_cache.select_rows(cache, rows))
        cache = kv_cache.put_back(cache, part)
    last = jnp.take_along_axis(h, jnp.maximum(counts - 1, 0)[:, None, None], axis=1)[:, 0]
    return last, cache


@partial(jax.jit, static_argnames=("max_length", "pad_token"))
@plain_broadcasting()
def _start(prompts, lengths, *, max_length, pad_token):
    batch, width = prompts.shape
    tokens = jnp.full((batch, max_length), pad_token, jnp.int32)
    return tokens.at[:, :width].set(jnp.where(jnp.arange(width) < lengths[:, None], prompts, pad_token))


def _check_cache(cache: Any, batch: int, max_length: int) -> None:
    """A write past the end is dropped silently: refuse a cache that is too short while its size is known."""
    kinds = (ContiguousCache, PagedCache)
    for part in jax.tree.leaves(cache, is_leaf=lambda x: isinstance(x, kinds)):
        if not isinstance(part, kinds):
            continue
        rows, slots = part.keys[0].shape[:2]
        if isinstance(part, PagedCache):
            rows, max_blocks = part.pages.block_tables.shape
            slots *= max_blocks
        if rows != batch or slots < max_length:
            raise ValueError(
                f"cache must have {batch} rows of at least {max_length} slots, got {(rows, slots)}; "
                "make it with model.init_cache(batch, width + max_new_tokens)."
            )


def _checked_lengths(lengths: ArrayLike | None, batch: int, width: int) -> Any:
    """A host array of int32, or what is being traced."""
    if lengths is not None and not is_concrete(lengths):
        return lengths
    lengths = np.full(batch, width) if lengths is None else whole_numbers(lengths, "lengths")
    if lengths.shape != (batch,) or not np.all((lengths >= 1) & (lengths <= width)):
        raise ValueError(f"lengths must be {batch} numbers from 1 to {width}, got {lengths.tolist()}; fix the prompts.")
    return lengths.astype(np.int32)


def common_prefix(prompts: np.ndarray, lengths: np.ndarray) -> int:
    """How many tokens all prompts ``[batch, width]`` share, the last of the shortest one left out.

    >>> common_prefix(np.array([[5, 6, 7], [5, 6, 0]]), np.array([3, 2]))
    1
    """
    width = int(lengths.min()) - 1
    differs = np.flatnonzero(np.any(prompts[:, :width] != prompts[:1, :width], axis=0))
    return int(differs[0]) if differs.size else width


@plain_broadcasting()
def prefill(
    decode_fn: Callable,
    params: Any,
    prompts: ArrayLike,
    cache: Any,
    *,
    max_length: int,
    lengths: ArrayLike | None = None,
    pad_token: int = 0,
    prefill_size: int | None = None,
    shares_prefix: bool = True,
    vocab: int | None = None,
) -> DecodeState:
    """Run the prompts through the model.

    Args:
      decode_fn: the model; hashable.
      params: its parameters.
      prompts: ``int32[batch, width]``, shorter ones padded at the right with anything.
      cache: an empty cache with at least ``max_length`` slots per row; consumed.
      max_length: prompt plus output that a row may reach, at least ``width``.
      lengths: ``int32[batch]``, real tokens of each prompt, at least 1; default ``width`` for all.
      pad_token: what ``state.tokens`` holds after the real tokens.
      prefill_size: tokens per pass; default: all at once. Smaller passes need less memory for a long prompt.
      shares_prefix: with a ``PagedCache``, run full pages that begin all prompts once and let the rows share them (if
        the prompts are not traced).
      vocab: how many token ids the model has, to refuse others (if the prompts are not traced); default: not known.

    Returns:
      The ``DecodeState`` before the first draw.
    """
    prompts = whole_numbers(prompts, "prompts") if is_concrete(prompts) else jnp.asarray(prompts, jnp.int32)
    if prompts.ndim != 2 or prompts.shape[1] < 1:
        raise ValueError(f"prompts must have shape [batch, width] with width >= 1, got {prompts.shape}; add an axis.")
    batch, width = prompts.shape
    if max_length < width:
        raise ValueError(f"max_length must be at least the prompts' width {width}, got {max_length}; raise it.")
    check_pad(pad_token)
    if prefill_size is not None:
        _checks.count(prefill_size, "prefill_size", "leave it out for one pass")
    _check_cache(cache, batch, max_length)
    real = _checked_lengths(lengths, batch, width)
    num_shared = 0
    is_known = isinstance(prompts, np.ndarray) and isinstance(real, np.ndarray)
    if is_known:
        check_ids(prompts[np.arange(width) < real[:, None]], vocab, "prompts")
    if shares_prefix and batch > 1 and isinstance(cache, PagedCache) and is_known:
        num_shared = common_prefix(prompts, real) // cache.page_size * cache.page_size
    size = prefill_size or width
    for start in range(0, num_shared, size):
        count = min(size, num_shared - start)
        one, starts, counts, rows = _columns(prompts[:1], start, count, size), [start], [count], [0]
        _, cache = extend(decode_fn, params, cache, one, *(jnp.array(x, jnp.int32) for x in (starts, counts, rows)))
    if num_shared:
        cache = _fork(cache, jnp.zeros(batch, jnp.int32))
    h = jnp.zeros(())  # the first pass makes one for every row: no prompt ends before it
    size = prefill_size or width - num_shared
    for start in range(num_shared, width, size):
        starts, counts = jnp.minimum(real, start), jnp.clip(real - start, 0, size)
        last, cache = extend(decode_fn, params, cache, _columns(prompts, start, size, size), starts, counts)
        h = last if start == num_shared else jnp.where(counts[:, None] > 0, last, h)
    tokens = _start(prompts, real, max_length=max_length, pad_token=pad_token)
    # Two arrays: the next chunk donates both.
    now, at_start = (jnp.array(real, jnp.int32) for _ in range(2))
    return DecodeState(tokens, now, at_start, jnp.zeros(batch, bool), h, cache)


_fork = jax.jit(kv_cache.fork, donate_argnums=0)


def _columns(prompts, start: int, count: int, width: int):
    """``count`` columns from ``start`` on, padded to ``width``."""
    columns = prompts[:, start : start + count]
    return jnp.pad(jnp.asarray(columns), ((0, 0), (0, width - columns.shape[1])))
