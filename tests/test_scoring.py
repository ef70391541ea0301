"""`log_prob` and its gradients against dense float64 and dense autodiff."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gumbeljax
from tests import heads, oracles

VOCAB, ROWS = 9001, 12  # two blocks and a tail


def dense(h, w, tokens, t=1.0, bias=None, mask=None, scale=1.0, soft_cap=None):
    x = scale * jnp.matmul(h, w.T, precision="highest")
    x = x if soft_cap is None else soft_cap * jnp.tanh(x / soft_cap)
    x = x if bias is None else x + bias
    x = x if mask is None else jnp.where(mask, x, -1e9)  # -inf would make the temperature's dense gradient NaN
    return jnp.take_along_axis(jax.nn.log_softmax(x / jnp.reshape(t, (-1, 1))), tokens[:, None], 1)[:, 0]


def problem(dtype=jnp.float32):
    rng = np.random.default_rng(0)
    h = jnp.asarray(rng.normal(size=(ROWS, 24)), dtype)
    w = jnp.asarray(rng.normal(size=(VOCAB, 24)) * 0.4, dtype)
    tokens = jnp.asarray(rng.integers(0, VOCAB, ROWS))
    options = {"logit_bias": jnp.asarray(rng.normal(size=VOCAB), jnp.float32), "temperature": jnp.linspace(0.5, 2, ROWS),
               "mask": jnp.asarray(rng.random((ROWS, VOCAB)) < 0.8).at[jnp.arange(ROWS), tokens].set(True)}
    return h, w, tokens, options


@pytest.mark.parametrize("vocab_axis", [0, 1])
def test_values(vocab_axis):
    h, w, tokens, options = problem()
    table = w if vocab_axis == 0 else w.T
    got = gumbeljax.log_prob(h, table, tokens, vocab_axis=vocab_axis, scale=0.7, soft_cap=5.0, **options)
    logits = np.asarray(h, np.float64) @ np.asarray(w, np.float64).T
    laws = oracles.processed_logits(logits, scale=0.7, soft_cap=5.0, logit_bias=options["logit_bias"], mask=options["mask"])
    want = oracles.log_softmax(laws.processed, options["temperature"])[np.arange(ROWS), tokens]
    np.testing.assert_allclose(got, want, atol=1e-5)


def test_agrees_with_the_drawn_tokens():
    h, w, _, options = problem()
    out = gumbeljax.sample_with_log_probs(h, w, jax.random.key(0), **options)
    np.testing.assert_allclose(gumbeljax.log_prob(h, w, out.token, **options), out.tempered_log_prob, atol=1e-5)
    np.testing.assert_allclose(gumbeljax.log_prob(h, w, out.token), out.model_log_prob, atol=1e-5)


@pytest.mark.parametrize("vocab_axis", [0, 1])
def test_gradients_of_every_argument(vocab_axis):
    h, w, tokens, options = problem()
    weights = jnp.linspace(-1, 2, ROWS)

    def ours(h, w, t, bias):
        w = w if vocab_axis == 0 else w.T
        out = gumbeljax.log_prob(h, w, tokens, temperature=t, logit_bias=bias, mask=options["mask"], scale=0.7, soft_cap=5.0,
                                 vocab_axis=vocab_axis)
        return jnp.sum(weights * out)

    def theirs(h, w, t, bias):
        return jnp.sum(weights * dense(h, w, tokens, t, bias, options["mask"], 0.7, 5.0))

    arguments = (h, w, options["temperature"], options["logit_bias"])
    for got, want in zip(jax.grad(ours, (0, 1, 2, 3))(*arguments), jax.grad(theirs, (0, 1, 2, 3))(*arguments), strict=True):
        np.testing.assert_allclose(got, want, atol=3e-5)
        assert np.abs(want).max() > 1e-3


def test_gradients_keep_dtypes_and_are_close_in_bfloat16():
    h, w, tokens, _ = problem(jnp.bfloat16)
    got = jax.grad(lambda h, w: gumbeljax.log_prob(h, w, tokens).sum(), (0, 1))(h, w)
    want = jax.grad(lambda h, w: dense(h, w, tokens).sum(), (0, 1))(h.astype(jnp.float32), w.astype(jnp.float32))
    for g, x in zip(got, want, strict=True):
        assert g.dtype == jnp.bfloat16
        np.testing.assert_allclose(g.astype(jnp.float32), x, atol=0.02)


def test_backward_pass_stores_no_logits():
    rows, vocab, d_model = 64, 65_536, 16
    h, w = jax.ShapeDtypeStruct((rows, d_model), jnp.float32), jax.ShapeDtypeStruct((vocab, d_model), jnp.float32)
    tokens = jax.ShapeDtypeStruct((rows,), jnp.int32)
    grad = jax.jit(jax.grad(lambda h, w, tokens: gumbeljax.log_prob(h, w, tokens).sum(), (0, 1)))
    assert grad.lower(h, w, tokens).compile().memory_analysis().temp_size_in_bytes < 0.7 * rows * vocab * 4


def test_edges():
    h, w, tokens, _ = problem()
    mask = jnp.ones(VOCAB, bool).at[int(tokens[0])].set(False)
    assert gumbeljax.log_prob(h, w, tokens, mask=mask)[0] == -jnp.inf
    outside = gumbeljax.log_prob(h, w, jnp.full(ROWS, VOCAB))
    assert np.isnan(outside).all() and np.isnan(gumbeljax.log_prob(h, w, -jnp.ones(ROWS, jnp.int32))).all()
    best = gumbeljax.greedy(h, w)
    at_zero = gumbeljax.log_prob(h, w, jnp.where(jnp.arange(ROWS) < 6, best, best + 1), temperature=0.0)
    np.testing.assert_array_equal(at_zero, np.where(np.arange(ROWS) < 6, 0.0, -np.inf))
    nan_row = gumbeljax.log_prob(h.at[3].set(jnp.nan), w, tokens)
    assert np.isnan(nan_row[3]) and np.isfinite(np.delete(nan_row, 3)).all()


def test_gradient_is_finite_beside_masked_and_greedy_and_lawless_rows():
    h, w, _, _ = problem()
    mask = jnp.ones((ROWS, VOCAB), bool).at[2].set(False)
    t = jnp.ones(ROWS).at[1].set(0.0)

    def value(h, w):
        out = gumbeljax.log_prob(h, w, gumbeljax.greedy(h, w), mask=mask, temperature=t)
        return jnp.where(jnp.arange(ROWS) == 2, 0.0, out).sum()

    for g in jax.grad(value, (0, 1))(h, w):
        chex.assert_tree_all_finite(g)


def test_zero_probability_token():
    """CASES N-4: log-probs of [-inf, 0, 1] are -inf, -1.3133, -0.3133, with a finite gradient, 0 for the masked id."""
    h, w = heads.pinned_head([5.0, 0.0, 1.0])
    mask = jnp.array([False, True, True])
    got = [float(gumbeljax.log_prob(h, w, jnp.array([i]), mask=mask)[0]) for i in range(3)]
    np.testing.assert_allclose(got, [-np.inf, -1.3132617, -0.3132617], atol=1e-6)
    grad = jax.grad(lambda w: gumbeljax.log_prob(h, w, jnp.array([1]), mask=mask)[0])(w)
    chex.assert_tree_all_finite(grad)
    assert np.all(grad[0] == 0)
