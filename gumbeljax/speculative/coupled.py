"""Verification by a shared noise field: draw from the target as always, and see how far the draft agrees."""

import functools

import jax
import jax.numpy as jnp

from gumbeljax._call import Config, Operands
from gumbeljax._typing import Array
from gumbeljax.speculative import cut


@functools.partial(jax.jit, static_argnames="config")
def verify_drafts(target: Operands, tokens: Array, lens: Array, keys, *, config: Config):
    """(tokens, num_accepted, log_probs) of drafts `[requests, draft_len]`; keys are two words `[requests * positions]`."""
    requests, draft_len = tokens.shape
    drawn = cut.draw(target, config, keys, sample=0)
    token, log_prob = (x.reshape(requests, draft_len + 1) for x in (drawn.token, drawn.processed_log_prob))
    agree = (tokens == token[:, :-1]) & (tokens >= 0) & (jnp.arange(draft_len) < lens[:, None])
    num_accepted = jnp.sum(jnp.cumprod(agree, axis=1, dtype=jnp.int32), axis=1, dtype=jnp.int32)
    is_out = jnp.arange(draft_len + 1) <= num_accepted[:, None]
    return jnp.where(is_out, token, -1), num_accepted, jnp.where(is_out, log_prob, 0.0)
