"""Device side of ``serve``: rows change hands inside arrays of fixed shape."""

from functools import partial

import jax
import jax.numpy as jnp

from gumbeljax import kv_cache
from gumbeljax._call import plain_broadcasting
from gumbeljax.decode.prefilling import extend
from gumbeljax.decode.state import DecodeState
from gumbeljax.kv_cache import PagedCache


@plain_broadcasting()
def empty_state(decode_fn, params, cache: PagedCache, pad_token: int) -> DecodeState:
    """No request in any row."""
    batch, max_blocks = cache.pages.block_tables.shape
    one = jax.ShapeDtypeStruct((batch, 1), jnp.int32)
    h = jax.eval_shape(decode_fn, params, one, one, cache)[0]
    return DecodeState(
        jnp.full((batch, max_blocks * cache.page_size), pad_token, jnp.int32),
        jnp.zeros(batch, jnp.int32),
        jnp.zeros(batch, jnp.int32),
        jnp.zeros(batch, bool),
        jnp.zeros((batch, h.shape[-1]), h.dtype),
        cache,
    )


@partial(jax.jit, donate_argnums=0, static_argnames="pad_token")
@plain_broadcasting()
def seat(state: DecodeState, ancestors, num_shared, is_new, *, pad_token) -> DecodeState:
    """Give the rows that are new the first ``num_shared [batch]`` tokens of their ancestors, and share their pages."""
    lengths = jnp.where(is_new, num_shared, state.lengths)
    is_kept = jnp.arange(state.tokens.shape[1]) < lengths[:, None]
    shared = jnp.where(is_kept, state.tokens[jnp.maximum(ancestors, 0)], pad_token)
    cache = kv_cache.fork(state.cache, ancestors)
    return state._replace(
        tokens=jnp.where(is_new[:, None], shared, state.tokens),
        lengths=lengths,
        is_finished=state.is_finished & ~is_new,
        cache=kv_cache.truncate(cache, jnp.where(is_new, num_shared, cache.pages.lengths)),
    )


@partial(jax.jit, static_argnums=0, donate_argnums=2)
@plain_broadcasting()
def prefill_rows(decode_fn, params, state: DecodeState, rows, tokens, starts, counts) -> DecodeState:
    """Run the next ``counts [n]`` prompt tokens ``tokens [n, width]`` of ``rows [n]``, of which -1 are none."""
    last, cache = extend(decode_fn, params, state.cache, tokens, starts, counts, rows)
    batch, max_length = state.tokens.shape
    to = jnp.where((rows >= 0) & (counts > 0), rows, batch)
    at = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    positions = jnp.where(at < counts[:, None], starts[:, None] + at, max_length)
    return DecodeState(
        tokens=state.tokens.at[to[:, None], positions].set(tokens, mode="drop"),
        lengths=state.lengths.at[to].set(starts + counts, mode="drop"),
        prompt_lengths=state.prompt_lengths.at[to].set(starts + counts, mode="drop"),
        is_finished=state.is_finished,
        h=state.h.at[to].set(last, mode="drop"),
        cache=cache,
    )


@partial(jax.jit, donate_argnums=0)
@plain_broadcasting()
def vacate(state: DecodeState, is_vacated) -> DecodeState:
    """Take the pages of rows."""
    return state._replace(cache=kv_cache.release(state.cache, is_vacated))
