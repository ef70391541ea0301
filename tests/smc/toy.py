"""Speculative decoding by particles on three tokens, and the law it aims at by enumeration.

A first token, then two cycles of two drafted tokens and a bonus: seven tokens of a Markov chain.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gumbeljax import smc

LENGTH, DRAFT_LEN, CYCLES = 7, 2, 2


def chains():
    """(first law, target's transitions, draft's transitions)."""
    rng = np.random.default_rng(0)
    target = rng.dirichlet(np.full(3, 0.5), 3)
    return np.array([0.6, 0.3, 0.1]), target, 0.5 * rng.dirichlet(np.ones(3), 3) + 0.5 * target


def target_law(alpha=1.0):
    """(law over all 3^7 sequences, Z): the product of all probabilities to the power alpha, normalised."""
    first, target, _ = chains()
    law = first
    for _ in range(LENGTH - 1):
        law = law[..., None] * target
    law = law.reshape(-1) ** alpha
    return law / law.sum(), law.sum()


class Path(NamedTuple):
    tokens: jax.Array  # int32 [groups, n, 7]
    length: jax.Array  # scalar


def invert(law, keys):
    """A token of `law [..., 3]`, each with its key."""
    u = jax.vmap(jax.random.uniform)(keys.reshape(-1)).reshape(keys.shape)
    return jnp.minimum(jnp.sum(jnp.cumsum(law, -1) <= u[..., None], -1), 2)


def fold(keys, i):
    return jax.vmap(lambda k: jax.random.fold_in(k, i))(keys.reshape(-1)).reshape(keys.shape)


@functools.partial(jax.jit, static_argnames=("n", "runs", "alpha", "scheme", "shared_first", "threshold"))
def run(key, tables, *, n, runs, alpha=1.0, scheme=smc.systematic, shared_first=None, threshold=0.5):
    """(chosen sequences as numbers below 3^7, log of the estimate of Z, number of resamplings), each `[runs]`."""
    first, target, draft = tables
    bonus = target**alpha / jnp.sum(target**alpha, -1, keepdims=True)
    keys = jax.random.split(key, (4, runs))
    shared = alpha == 1.0 if shared_first is None else shared_first
    law = first**alpha / jnp.sum(first**alpha)
    token = invert(jnp.broadcast_to(law, (runs, n, 3)), smc.first_token_keys(keys[0], n, alpha=1.0 if shared else 2.0))
    tokens = jnp.zeros((runs, n, LENGTH), jnp.int32).at[..., 0].set(token)
    log_weights = smc.log_weight(jnp.log(first)[token][..., None], jnp.log(law)[token][..., None], alpha=alpha)

    def propose_fn(path, keys):
        tokens, length = path
        last = jnp.take_along_axis(tokens, jnp.broadcast_to(length - 1, (*tokens.shape[:2], 1)), -1)[..., 0]
        log_p, log_q = [], []
        for j in range(DRAFT_LEN + 1):
            table = draft if j < DRAFT_LEN else bonus
            token = invert(table[last], fold(keys, j))
            log_p.append(jnp.log(target)[last, token])
            log_q.append(jnp.log(table)[last, token])
            tokens = jax.lax.dynamic_update_index_in_dim(tokens, token, length + j, -1)
            last = token
        return Path(tokens, length + DRAFT_LEN + 1), (jnp.stack(log_p, -1), jnp.stack(log_q, -1))

    def log_weight_fn(path, log_probs):
        return smc.log_weight(*log_probs, alpha=alpha)

    state, resampled = smc.init(Path(tokens, jnp.int32(1)), log_weights), jnp.zeros(runs, jnp.int32)
    for cycle in range(CYCLES):
        state, info = smc.step(state, keys[1 + cycle], propose_fn=propose_fn, log_weight_fn=log_weight_fn, resample_fn=scheme,
                               threshold=threshold)
        resampled = resampled + info.resampled
    chosen = jnp.take_along_axis(state.particles.tokens, smc.choose(state, keys[3])[:, None, None], 1)[:, 0]
    return jnp.sum(chosen * 3 ** jnp.arange(LENGTH)[::-1], -1), smc.log_evidence(state), resampled


def many(key, *, n, runs, chunk=20_000, **options):
    tables = tuple(jnp.asarray(x, jnp.float32) for x in chains())
    keys = [jax.random.fold_in(key, i) for i in range(max(1, runs // chunk))]
    parts = [run(key, tables, n=n, runs=min(chunk, runs), **options) for key in keys]
    return tuple(np.concatenate([np.asarray(x) for x in column]) for column in zip(*parts, strict=True))


def total_variation(sequences, law):
    return 0.5 * np.abs(np.bincount(sequences, minlength=len(law)) / len(sequences) - law).sum()


def first_token_error(sequences, law):
    """Total variation of the first token."""
    counts = np.bincount(sequences // 3 ** (LENGTH - 1), minlength=3) / len(sequences)
    return 0.5 * np.abs(counts - law.reshape(3, -1).sum(1)).sum()
