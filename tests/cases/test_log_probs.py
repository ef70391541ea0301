"""Area N, the part without penalties: what a log-probability is the logarithm of."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gumbeljax
from tests import heads, oracles
from tests.cases import routes

# N-1: log_softmax(logits / T), not log_softmax(logits) / T

TEMPERED, MODEL = [-0.1429, -2.1429, -4.1429], [-0.4076, -1.4076, -2.4076]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])
def test_temperature_comes_before_the_softmax(dtype):
    h, w = heads.pinned_head([2.0, 1.0, 0.0], dtype, rows=3)
    ids = jnp.arange(3)
    np.testing.assert_allclose(gumbeljax.log_prob(h, w, ids, temperature=0.5), TEMPERED, atol=1e-4)
    np.testing.assert_allclose(gumbeljax.log_prob(h, w, ids), MODEL, atol=1e-4)
    np.testing.assert_allclose(gumbeljax.log_prob(h, w, ids, temperature=jnp.full(3, 0.5)), TEMPERED, atol=1e-4)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_samples": 40},
        {"method": "categorical"},
        {"method": "categorical", "num_samples": 40},
        {"num_samples": 3, "replace": False},
    ],
    ids=str,
)
def test_both_log_probs_of_a_draw(options):
    h, w = heads.pinned_head([2.0, 1.0, 0.0], rows=800)
    out = gumbeljax.sample_with_log_probs(h, w, jax.random.key(0), temperature=0.5, **options)
    assert set(np.asarray(out.token).ravel()) == {0, 1, 2}
    np.testing.assert_allclose(out.tempered_log_prob, np.array(TEMPERED)[out.token], atol=1e-4)
    np.testing.assert_allclose(out.model_log_prob, np.array(MODEL)[out.token], atol=1e-4)
    np.testing.assert_allclose(out.log_normalizer, 0.5 * np.log(np.exp(4.0) + np.exp(2.0) + 1), atol=1e-4)


@routes.needs_triton
def test_both_log_probs_of_a_kernels_draw():
    h, w = heads.pinned_head([2.0, 1.0, 0.0], rows=20)
    out = jax.jit(lambda h, w: routes.triton_draw(h, w, jax.random.key(0), temperature=0.5))(h, w)
    np.testing.assert_allclose(out.tempered_log_prob, np.array(TEMPERED)[out.token], atol=1e-4)
    np.testing.assert_allclose(out.model_log_prob, np.array(MODEL)[out.token], atol=1e-4)


def test_the_model_law_knows_neither_bias_nor_mask_nor_temperature():
    h, w = heads.pinned_head([2.0, 1.0, 0.0, 9.0], rows=30)
    out = gumbeljax.sample_with_log_probs(
        h,
        w,
        jax.random.key(0),
        temperature=0.5,
        logit_bias=jnp.array([-2.0, 0, 2, 0]),
        mask=jnp.array([True, True, True, False]),
    )
    np.testing.assert_allclose(out.model_log_prob, oracles.log_softmax([[2.0, 1.0, 0.0, 9.0]])[0][out.token], atol=1e-5)
    np.testing.assert_allclose(out.tempered_log_prob, oracles.log_softmax([[0.0, 1.0, 2.0]], 0.5)[0][out.token], atol=1e-5)


# N-4: beside tokens of probability zero


@pytest.mark.parametrize("way", ["mask", "bias", "w"])
def test_beside_a_token_of_probability_zero(way):
    """Log-probs, entropy, sum of p log p, and every gradient are finite where they should be."""
    h, w = heads.pinned_head([5.0, 0.0, 1.0])
    options = {"mask": {"mask": jnp.array([False, True, True])}, "bias": {"logit_bias": jnp.array([-jnp.inf, 0, 0])}, "w": {}}[
        way
    ]
    if way == "w":  # -inf in the table itself; h is one coordinate wide so that no 0 meets it
        h, w = jnp.ones((1, 1)), w[:, :1].at[0].set(-jnp.inf)

    def law(w):
        return jnp.stack([gumbeljax.log_prob(h, w, jnp.array([i]), **options)[0] for i in range(3)])

    log_probs = np.asarray(law(w))
    np.testing.assert_allclose(log_probs, [-np.inf, -1.3132617, -0.3132617], atol=1e-6)
    p = np.exp(log_probs)
    assert abs(-np.sum(p[1:] * log_probs[1:]) - 0.5822) < 1e-4 and abs(p.sum() - 1) < 1e-6
    grad = jax.grad(lambda w: law(w)[1])(w)
    if way != "w":
        assert np.isfinite(grad).all() and (grad[0] == 0).all()
    out = gumbeljax.sample_with_log_probs(jnp.repeat(h, 200, 0), w, jax.random.key(0), **options)
    assert (out.token > 0).all()
    np.testing.assert_allclose(out.tempered_log_prob, log_probs[out.token], atol=1e-6)


def test_a_drawn_token_never_has_log_prob_minus_infinity_nor_above_zero():
    """Over many temperatures and spreads, with 90% forbidden."""
    rng = np.random.default_rng(0)
    rows = 4000
    logits = (rng.normal(size=(rows, 83)) * np.exp(rng.uniform(-3, 6, (rows, 1)))).astype(np.float32)
    mask = rng.random((rows, 83)) < 0.1
    mask[np.arange(rows), rng.integers(0, 83, rows)] = True
    t = jnp.asarray(np.exp(rng.uniform(-20, 20, rows)), jnp.float32).at[::10].set(0.0)
    for route in (routes.by_head, routes.by_categorical):
        token, log_prob = route(logits, routes.keys_of(0, rows), t, mask=mask)
        assert mask[np.arange(rows), token].all()
        assert np.isfinite(log_prob).all() and np.max(log_prob) < 1e-5
    # the last bits of the tempered law, near the drawn token
    want = oracles.log_softmax(np.where(mask, logits, -np.inf), np.asarray(t))
    token, log_prob = routes.by_head(logits, routes.keys_of(0, rows), t, mask=mask)
    np.testing.assert_allclose(log_prob, want[np.arange(rows), token], rtol=1e-4, atol=1e-4)


def test_scores_agree_with_draws_on_real_inputs_at_low_temperatures():
    """The logits of a drawn token are summed twice, in two orders: their difference over T must not be its log-prob."""
    rng = np.random.default_rng(1)
    h, w = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in [(32, 512), (3000, 512)])
    best = gumbeljax.greedy(h, w)
    for temperature in (1e-3, 1e-6, 1e-12, 1e-29):
        score = gumbeljax.log_prob(h, w, best, temperature=temperature)
        np.testing.assert_allclose(score, 0.0, atol=1e-5)
        out = gumbeljax.sample_with_log_probs(h, w, jax.random.key(0), temperature=temperature)
        np.testing.assert_array_equal(out.token, best)
        np.testing.assert_allclose(out.tempered_log_prob, 0.0, atol=1e-5)
