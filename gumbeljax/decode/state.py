"""What a decode loop carries and returns, and the keys of its rows."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gumbeljax._keys import as_threefry, typed_key
from gumbeljax._typing import Key


class DecodeState(NamedTuple):
    """Where a batch of requests stands; pass it to ``resume`` to go on."""

    tokens: jax.Array  # int32[batch, max_length]: prompt, output, then pad
    lengths: jax.Array  # int32[batch]: how many of them are real
    prompt_lengths: jax.Array  # int32[batch]: how many of those are the prompt
    is_finished: jax.Array  # bool[batch]: the row has ended, but not by its length
    h: jax.Array  # [batch, d_model]: hidden state of the last token, from which the next one is drawn
    cache: Any  # the model's cache; has seen every real token


class Generation(NamedTuple):
    """What ``generate`` and ``resume`` return."""

    tokens: jax.Array  # int32[batch, max_new_tokens]: the new tokens, end token included, then pad
    num_tokens: jax.Array  # int32[batch]: how many of them are real
    state: DecodeState
    draws: Any  # all that sample_fn returned for them, leaves [batch, max_new_tokens, ...]; NaN and pad after the last


def request_keys(key: Key, batch: int) -> jax.Array:
    """One typed threefry key per row: ``key`` itself when it is an array of them, else ``fold_in(key, row)``.

    Keys of other generators become threefry keys as in ``sample``: their own ``fold_in`` may depend on the batch.
    """
    key = as_threefry(typed_key(key))
    if key.shape == (batch,):
        return key
    if key.shape != ():
        raise ValueError(f"key must be one key or {batch} keys, one per row, got shape {key.shape}; split it per row.")
    return jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(batch, dtype=jnp.uint32))


def drawn_tokens(draws: Any) -> Any:
    """The tokens in what a ``sample_fn`` returned: itself, or its field ``token``."""
    return getattr(draws, "token", draws)


def filler(x: Any, pad_token: int) -> Any:
    """What stands where nothing was drawn: NaN, or the pad token where the dtype has no NaN."""
    return jnp.nan if jnp.issubdtype(x.dtype, jnp.floating) else pad_token
