"""Reference samplers: the right law, the oracle's tokens, impossible outcomes never, degenerate rows marked."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gumbeljax import reference
from gumbeljax.reference import grouped_gumbel_max, gumbel_max, inverse_cdf
from tests import oracles
from tests import statistics as gates

# Jitted: eager calls compile every operation for every new shape.
SAMPLERS = [jax.jit(sampler) for sampler in (inverse_cdf, gumbel_max, grouped_gumbel_max)]
GUMBELS = SAMPLERS[1:]
GROUPED = SAMPLERS[2]
VOCABS = [1, 15, 16, 17, 31, 33, 101, 1009]


def _key_data(seed):
    return np.asarray(jax.random.key_data(jax.random.key(seed)))


def _normal(seed, shape, scale=1.5):
    return (np.random.default_rng(seed).normal(size=shape) * scale).astype(np.float32)


@pytest.mark.parametrize("sampler", SAMPLERS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("vocab", [2, 17, 101])
def test_law(sampler, vocab):
    logits, n = _normal(vocab, vocab), 100_000
    probs = np.exp(oracles.log_softmax(logits[None])[0])
    tokens = np.asarray(sampler(np.tile(logits, (n, 1)), jax.random.key(vocab)))
    assert tokens.dtype == np.int32
    counts = np.bincount(tokens, minlength=vocab)
    assert gates.chi_square(counts, probs) > gates.ALPHA
    assert gates.g_test(counts, probs) > gates.ALPHA
    assert gates.ks_gate(tokens, probs)


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("rows", [1, 65])
def test_grouped_tokens_are_the_oracles(vocab, rows):
    """Small integers over 8: logits are exact, so nothing but a tie in the last bits of a score may differ."""
    rng = np.random.default_rng(rows * vocab)
    logits = rng.integers(-24, 24, (rows, vocab)).astype(np.float32) / 8
    temperature = rng.choice(np.float32([0, 0.5, 1, 2]), rows)
    draw = oracles.grouped_draw(logits, oracles.row_keys_of(_key_data(7), rows), temperature)
    tokens = np.asarray(GROUPED(logits, jax.random.key(7), temperature=temperature))
    differs = tokens != draw.tokens
    assert draw.near_tie(1e-5)[differs].all()
    assert not differs[temperature == 0].any()
    assert differs.mean() <= 1e-3


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_grouped_tokens_of_real_logits_differ_only_at_near_ties(dtype):
    logits = jnp.asarray(_normal(1, (20_000, 100))).astype(dtype)
    draw = oracles.grouped_draw(logits, oracles.row_keys_of(_key_data(1), 20_000), 0.7)
    tokens = GROUPED(logits, jax.random.key(1), temperature=0.7)
    differs = np.asarray(tokens) != draw.tokens
    assert draw.near_tie(1e-4)[differs].all()
    assert differs.mean() < 1e-4


@pytest.mark.parametrize("sampler", SAMPLERS, ids=lambda f: f.__name__)
def test_one_key_is_a_key_for_every_row(sampler):
    """CASES C-1, C-2, D-3: a row is its key and its logits; neighbours, slot, batch shape and vmap do not matter."""
    logits, key = _normal(2, (4, 8, 50)), jax.random.key(2)
    keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(32)).reshape(4, 8)
    tokens = sampler(logits, keys)
    assert tokens.shape == (4, 8)
    np.testing.assert_array_equal(tokens, sampler(logits, key))
    np.testing.assert_array_equal(tokens, sampler(logits, jax.random.key_data(keys)))
    np.testing.assert_array_equal(tokens, jax.vmap(jax.vmap(sampler))(logits, keys))
    np.testing.assert_array_equal(tokens[::-1], sampler(logits[::-1], keys[::-1]))
    assert int(sampler(logits[1, 2], keys[1, 2])) == int(tokens[1, 2])


@pytest.mark.parametrize("sampler", SAMPLERS, ids=lambda f: f.__name__)
def test_zero_weight_is_never_drawn(sampler):
    """CASES A-2; the grouped law pads four tokens to sixteen, so it draws a fifth as often."""
    draws = sampler(np.tile(np.float32([-np.inf, 0]), (100_000, 1)), jax.random.key(0))
    assert (np.asarray(draws) == 1).all()
    probs, counts = np.array([0.33, 0.34, 0, 0.33]), np.zeros(4, int)
    with np.errstate(divide="ignore"):
        logits = jnp.tile(jnp.log(jnp.float32(probs)), (1_000_000, 1))
    draw = jax.jit(lambda logits, key: jnp.bincount(sampler(logits, key), length=4))
    calls = 2 if sampler is GROUPED else 10
    for i in range(calls):
        counts += np.asarray(draw(logits, jax.random.key(i)))
    assert counts.sum() == calls * 1_000_000
    assert counts[2] == 0
    assert gates.chi_square(counts, probs) > gates.ALPHA


def test_inverse_cdf_never_lands_between_masses():
    """Long rows, nine in ten tokens forbidden, the ends too: a parallel running sum wobbles, the draw must not."""
    rng = np.random.default_rng(3)
    logits = rng.normal(size=(64, 20_000)).astype(np.float32) * 3
    logits[:, rng.random(20_000) < 0.9] = -np.inf
    logits[:, :5] = logits[:, -5:] = -np.inf
    for seed in range(20):
        tokens = np.asarray(SAMPLERS[0](logits, jax.random.key(seed)))
        assert np.isfinite(logits[np.arange(64), tokens]).all()


def test_inverse_cdf_at_the_ends_of_the_uniform(monkeypatch):
    """The smallest and the largest number it can meet give the first and the last token with mass."""
    logits = jnp.log(jnp.array([[0.0, 0.3, 0.0, 0.3, 0.4, 0.0]]))
    for u, token in ((2.0**-65, 1), (1 - 2.0**-24, 4), (1.0, 4)):
        monkeypatch.setattr(reference.noise, "uniform", lambda w0, w1, u=u: jnp.full(w0.shape, u, jnp.float32))
        assert int(inverse_cdf(logits, jax.random.key(0))[0]) == token


@pytest.mark.parametrize("sampler", GUMBELS, ids=lambda f: f.__name__)
def test_bfloat16_logits_do_not_mean_bfloat16_noise(sampler):
    """CASES A-4."""
    tokens = np.asarray(sampler(jnp.ones((20_000, 1000), jnp.bfloat16), jax.random.key(4)))
    assert abs((tokens < 500).mean() - 0.5) < 0.015
    assert gates.chi_square(np.bincount(tokens, minlength=1000), np.full(1000, 1e-3)) > gates.ALPHA


@pytest.mark.parametrize("sampler", SAMPLERS, ids=lambda f: f.__name__)
def test_rows_without_a_law_are_marked_and_leave_others_alone(sampler):
    nan, inf = np.nan, np.inf
    rows = np.float32([[0, 1, 2], [-inf] * 3, [0, nan, 1], [inf, 0, 0], [inf, inf, 0], [nan] * 3, [-inf, 0, -inf]])
    tokens = np.asarray(sampler(rows, jax.random.key(5)))
    assert tokens[0] == int(sampler(rows[:1], jax.random.key(5))[0]) >= 0
    np.testing.assert_array_equal(tokens[1:], [-1, -1, -1, -1, -1, 1])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("temperature", [1e-3, 1e-6, 1e-12, 1e-30, 1e-45, 0])
def test_small_temperatures_are_greedy(dtype, temperature):
    """CASES A-5."""
    rows = jnp.tile(jnp.array([2.875, 2.955, 11.0625], dtype), (1000, 1))
    assert (GROUPED(rows, jax.random.key(6), temperature=temperature) == 2).all()


def test_greedy_ties_and_bad_temperatures():
    """CASES A-9: the lowest id, across groups and signs of zero."""
    row = np.zeros(200_000, np.float32)
    row[[5, 70_000, 199_999]] = 3
    assert int(GROUPED(row, jax.random.key(0), temperature=0)) == 5
    zeros = np.full(20, -1, np.float32)
    zeros[[2, 4, 9]] = -0.0, 0.0, -0.0
    assert int(GROUPED(zeros, jax.random.key(0), temperature=0.0)) == 2
    got = GROUPED(np.zeros((3, 4), np.float32), jax.random.key(0), temperature=jnp.array([-1, np.nan, np.inf]))
    np.testing.assert_array_equal(got, [-1, -1, -1])


@pytest.mark.parametrize("sampler", SAMPLERS, ids=lambda f: f.__name__)
def test_odd_shapes(sampler):
    assert sampler(np.zeros((0, 7), np.float32), jax.random.key(0)).shape == (0,)
    assert int(sampler(np.zeros(1, np.float32), jax.random.key(0))) == 0
    assert sampler(np.zeros((2, 3, 1), np.float16), jax.random.key(0)).tolist() == [[0] * 3] * 2


@pytest.mark.parametrize("sampler", SAMPLERS, ids=lambda f: f.__name__)
def test_errors(sampler):
    key = jax.random.key(0)
    with pytest.raises(TypeError, match="logits must be floating point; got int32"):
        sampler(jnp.zeros((2, 3), jnp.int32), key)
    with pytest.raises(ValueError, match=r"logits must be \[\*batch, vocab\].*got shape \[2, 0\]"):
        sampler(jnp.zeros((2, 0)), key)
    with pytest.raises(ValueError, match=r"key must be one key or an array of keys of the batch's shape \[2\]"):
        sampler(jnp.zeros((2, 3)), jax.random.split(key, 3))
    with pytest.raises(TypeError, match="key must be a JAX random key; got int"):
        sampler.__wrapped__(jnp.zeros((2, 3)), 0)  # jit would make an array of it first


def test_temperature_of_another_shape():
    with pytest.raises(
        ValueError, match=r"temperature must be a scalar or have the batch's shape \[2\]; got \[3\]"
    ):
        GROUPED(jnp.zeros((2, 3)), jax.random.key(0), temperature=jnp.ones(3))
