"""Several tokens per row, with and without replacement."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gumbeljax
from pallas_kernels import many
from tests import heads, oracles, statistics


def test_samples_equal_the_oracle():
    h, w = heads.exact_head(1003, 64, 16)
    keys, words = heads.keys_of(0, 16)
    t = np.linspace(0, 2, 16)
    logits = heads.exact_logits(h, w)
    got = gumbeljax.sample_with_log_probs(h, w, keys, temperature=t, num_samples=6)
    np.testing.assert_array_equal(got.token, oracles.grouped_tokens(logits, words, t, num_samples=6))
    np.testing.assert_array_equal(got.token[:, 0], gumbeljax.sample(h, w, keys, temperature=t))
    picked = np.take_along_axis(oracles.log_softmax(logits, t), np.asarray(got.token), -1)
    np.testing.assert_allclose(got.tempered_log_prob, picked, atol=2e-5, rtol=2e-5)
    picked = np.take_along_axis(oracles.log_softmax(logits), np.asarray(got.token), -1)
    np.testing.assert_allclose(got.model_log_prob, picked, atol=2e-5)


@pytest.mark.parametrize("vocab, k", [(1003, 6), (1003, 70), (40, 40), (16, 16), (17, 17), (1, 1)])
def test_without_replacement_equals_the_oracle(vocab, k):
    h, w = heads.exact_head(vocab, 64, 16)
    keys, words = heads.keys_of(1, 16)
    t = np.array([0.0, 1e-3, 0.5, 1, 2, 7, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1])
    logits = heads.exact_logits(h, w)
    got = gumbeljax.sample_with_log_probs(h, w, keys, temperature=t, num_samples=k, replace=False)
    tokens = np.asarray(got.token)
    want = oracles.grouped_without_replacement(logits, words, k, t)
    assert np.mean(tokens != want) < 5e-3
    assert all(len(set(row)) == k for row in tokens.tolist()) and tokens.min() >= 0
    np.testing.assert_array_equal(tokens[:, 0], gumbeljax.sample(h, w, keys, temperature=t))
    picked = np.take_along_axis(oracles.log_softmax(logits, t), tokens, -1)
    np.testing.assert_allclose(got.tempered_log_prob[1:], picked[1:], atol=3e-5, rtol=3e-5)
    np.testing.assert_array_equal(got.tempered_log_prob[0], np.where(np.arange(k) == 0, 0.0, -np.inf))


@pytest.mark.parametrize("vocab, k", [(5, 2), (20, 2), (4, 3)])
def test_without_replacement_is_plackett_luce(vocab, k):
    """Ordered tuples by enumeration; 20 ids cross a group border."""
    rows = 200_000
    logits = np.random.default_rng(vocab).normal(size=vocab)
    h, w = heads.pinned_head(logits, rows=rows)
    draws = np.asarray(gumbeljax.sample(h, w, jax.random.key(0), num_samples=k, replace=False))
    law = statistics.plackett_luce(np.exp(oracles.log_softmax(np.asarray(w[:, 0])[None]))[0], k)
    assert statistics.chi_square(*statistics.tuple_counts(draws, law)) > statistics.ALPHA


def test_a_peaked_row_still_gives_every_token():
    logits = np.zeros(48)
    logits[7] = 500.0
    h, w = heads.pinned_head(logits)
    draws = gumbeljax.sample(h, w, jax.random.key(0), num_samples=48, replace=False)[0].tolist()
    assert sorted(draws) == list(range(48)) and draws[0] == 7


def test_surplus_is_marked():
    mask = jnp.arange(100) < 3
    h, w = heads.exact_head(100, 16, 2)
    out = gumbeljax.sample_with_log_probs(h, w, jax.random.key(0), mask=mask, num_samples=5, replace=False)
    assert sorted(out.token[0, :3].tolist()) == [0, 1, 2] and out.token[:, 3:].tolist() == [[-1, -1]] * 2
    assert np.isnan(out.tempered_log_prob[:, 3:]).all() and np.isfinite(out.tempered_log_prob[:, :3]).all()


def test_conditioned_scores_neither_overflow_nor_cancel():
    x = np.array([3.0, -200.0, -np.inf, 2.0, -40.0] + [0.0] * 11, np.float32)[:, None]
    for best in (-2.5, 0.0, 3.0, 40.0):
        added, is_best = (np.asarray(a)[:, 0] for a in many.conditioning(jnp.asarray(x), jnp.float32(best)))
        got = np.where(is_best, best, x[:, 0] + added)
        z = x[:, 0].astype(np.float64)
        with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
            want = z - np.log(np.exp(z - best) - np.expm1(z - z.max()))
        want = np.where(z == z.max(), best, want)
        keep = np.isfinite(z)
        np.testing.assert_allclose(got[keep], want[keep], rtol=2e-6, atol=2e-6)


def test_many_draws_of_one_row_need_little_memory():
    """100,000 draws from 20,000 tokens: the noise of all at once would be 500 MB."""
    h, w = jax.ShapeDtypeStruct((16,), jnp.float32), jax.ShapeDtypeStruct((20_000, 16), jnp.float32)
    key = jax.eval_shape(lambda: jax.random.key(0))
    draw = jax.jit(lambda h, w, key: gumbeljax.sample(h, w, key, num_samples=100_000))
    assert draw.lower(h, w, key).compile().memory_analysis().temp_size_in_bytes < 200e6
