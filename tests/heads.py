"""Inputs of the pathwise tests: heads whose logits are exact in any order of summation, and the oracle's answer."""

import jax
import jax.numpy as jnp
import numpy as np

from tests import oracles


def exact_head(vocab, d_model, rows, dtype=jnp.float32, vocab_axis=0, seed=0):
    """(h, w) with entries in {-1, 0, 1} and a power-of-two scale: every sum is exact, logits have a spread of about 2."""
    scale = 2.0 ** -np.round(np.log2(np.sqrt(d_model * 4 / 9) / 2))
    key_h, key_w = jax.random.split(jax.random.key(seed))
    h = jax.random.randint(key_h, (rows, d_model), -1, 2).astype(dtype)
    w = (jax.random.randint(key_w, (vocab, d_model), -1, 2) * scale).astype(dtype)
    return h, w if vocab_axis == 0 else w.T


def exact_logits(h, w, vocab_axis=0):
    """Their logits, exact in float32."""
    w = w if vocab_axis == 0 else w.T
    return np.asarray(jnp.matmul(h.astype(jnp.float32), w.astype(jnp.float32).T, precision="highest"))


def pinned_head(logits, dtype=jnp.float32, rows=1, d_model=16):
    """(h, w) whose logits are the given ones in every row: h = (1, 0, ...), the first column of w the logits."""
    logits = np.asarray(logits)
    h = jnp.zeros((rows, d_model), dtype).at[:, 0].set(1)
    return h, jnp.zeros((len(logits), d_model), dtype).at[:, 0].set(jnp.asarray(logits, dtype))


def tail_head(dtype, rows, d_model=16):
    """(h, w, mass): 49,152 ids of which one holds all but `mass` = 0.99%. Its logit, 15.408, is a sum of two products, so
    that it is the same in bfloat16."""
    vocab, parts = 49_152, (15.4375, -0.0294189453125)
    h = jnp.zeros((rows, d_model), dtype).at[:, :2].set(1)
    w = jnp.zeros((vocab, d_model), dtype).at[77, :2].set(jnp.asarray(parts, dtype))
    rest = (vocab - 1) * np.exp(-sum(parts))
    return h, w, rest / (1 + rest)


def keys_of(seed, rows):
    """Per-row keys, and their words for the oracle."""
    keys = jax.random.split(jax.random.key(seed), rows)
    return keys, np.asarray(jax.random.key_data(keys))


def assert_pathwise(tokens, logits, words, temperature=1.0, *, gap=1e-5, allowed=0.0, **options):
    """Tokens equal the oracle's. A row may differ only where two scores are closer than `gap` nats, and at most a
    fraction `allowed` of rows (one row when 0: a last-bit tie of an exact input)."""
    draw = oracles.grouped_draw(logits, words, temperature, **options)
    wrong = np.flatnonzero(np.asarray(tokens) != draw.tokens)
    nearest = np.minimum(draw.group_gap, draw.token_gap)
    assert len(wrong) <= max(1, allowed * len(draw.tokens)), f"{len(wrong)} of {len(draw.tokens)} rows differ: {wrong[:9]}"
    assert np.all(nearest[wrong] < gap), f"rows {wrong[:9]} differ with gaps {nearest[wrong][:9]}"
