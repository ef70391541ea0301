"""`method="categorical"` is `jax.random.categorical`, token for token."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gumbeljax
from tests import heads, oracles


@pytest.mark.parametrize("mode", ["low", "high"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("vocab_axis", [0, 1])
def test_one_key_and_per_row_keys(mode, dtype, vocab_axis):
    h, w = heads.exact_head(1009, 64, 24, dtype, vocab_axis)
    logits = jnp.asarray(heads.exact_logits(h, w, vocab_axis))
    key, keys = jax.random.key(0), jax.random.split(jax.random.key(1), 24)
    options = {"method": "categorical", "mode": mode, "vocab_axis": vocab_axis}
    np.testing.assert_array_equal(gumbeljax.sample(h, w, key, **options), jax.random.categorical(key, logits, mode=mode))
    want = jax.vmap(lambda k, l: jax.random.categorical(k, l, mode=mode))(keys, logits)
    np.testing.assert_array_equal(gumbeljax.sample(h, w, keys, **options), want)
    np.testing.assert_array_equal(gumbeljax.sample_logits(logits, key, method="categorical", mode=mode),
                                  jax.random.categorical(key, logits, mode=mode))


def test_real_inputs_in_the_users_own_expression():
    rng = np.random.default_rng(0)
    h, w = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in [(8, 96), (2003, 96)])
    for seed in range(20):
        key = jax.random.key(seed)
        want = jax.jit(lambda h, w, key: jax.random.categorical(key, h @ w.T))(h, w, key)
        np.testing.assert_array_equal(gumbeljax.sample(h, w, key, method="categorical"), want)


def test_batch_shapes_temperature_samples_and_replacement():
    h, w = heads.exact_head(300, 64, 6)
    h3, key = h.reshape(2, 3, 64), jax.random.key(2)
    logits = jnp.asarray(heads.exact_logits(h, w)).reshape(2, 3, 300)
    draw = lambda **k: gumbeljax.sample(h3, w, key, method="categorical", **k)  # noqa: E731
    np.testing.assert_array_equal(draw(), jax.random.categorical(key, logits))
    t = jnp.array([[0.0, 0.5, 1.0], [2.0, 0.0, 1.0]])
    tempered = jax.random.categorical(key, logits / jnp.where(t == 0, 1, t)[..., None])
    np.testing.assert_array_equal(draw(temperature=t), jnp.where(t == 0, logits.argmax(-1), tempered))
    many = jax.random.categorical(key, logits, shape=(5, 2, 3))
    np.testing.assert_array_equal(draw(num_samples=5), jnp.moveaxis(many, 0, -1))
    distinct = jax.random.categorical(key, logits, shape=(5, 2, 3), replace=False)
    np.testing.assert_array_equal(draw(num_samples=5, replace=False), jnp.moveaxis(distinct, 0, -1))


def test_oracle_and_log_probs():
    h, w = heads.exact_head(500, 64, 32)
    logits = heads.exact_logits(h, w)
    key = jax.random.key(3)
    out = gumbeljax.sample_with_log_probs(h, w, key, method="categorical", temperature=0.7)
    tempered = np.asarray(logits / np.float32(0.7), np.float32)
    assert np.mean(np.asarray(out.token) != oracles.categorical_low(tempered, jax.random.key_data(key))) < 0.05
    i = np.arange(32)
    np.testing.assert_allclose(out.tempered_log_prob, oracles.log_softmax(logits, 0.7)[i, out.token], atol=2e-5)
    np.testing.assert_allclose(out.model_log_prob, oracles.log_softmax(logits)[i, out.token], atol=2e-5)


def test_marker():
    logits = jnp.array([[0.0, jnp.nan], [0.0, jnp.inf], [-jnp.inf, -jnp.inf], [0.0, 1.0]])
    for t in (0.0, 1.0):
        tokens = gumbeljax.sample_logits(logits, jax.random.key(0), method="categorical", temperature=t)
        assert tokens[:3].tolist() == [-1, -1, -1] and tokens[3] >= 0
