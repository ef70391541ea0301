"""ESS, normalised weights and mean weight against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gumbeljax.smc import ess, log_ess, log_mean_weight, normalize
from tests.smc import oracle


@pytest.mark.parametrize("shift, dtype", [(0, "float32"), (1e6, "float32"), (0, "bfloat16")])
def test_very_negative_log_weights(shift, dtype):
    """CASES H-6. bfloat16 holds -1000 and -1004, not -1001."""
    x = jnp.array([-1000.0, -1001.0 if dtype == "float32" else -1004.0]).astype(dtype) + jnp.asarray(shift, dtype)
    want = np.asarray(x, np.float64)
    for more in ([], [-np.inf]):  # an entry of -inf drops out
        y = jnp.concatenate([x, jnp.array(more, dtype)])
        np.testing.assert_allclose(ess(y), oracle.ess(want), rtol=2e-6)
        np.testing.assert_allclose(np.exp(log_ess(y)), oracle.ess(want), rtol=2e-6)
        np.testing.assert_allclose(normalize(y)[:2], oracle.weights(want), rtol=2e-6)
        mean = oracle.log_mean_weight(want) + np.log(2 / len(y))
        np.testing.assert_allclose(log_mean_weight(y), mean, rtol=1e-7, atol=1e-4)
    if dtype == "float32":
        assert round(float(ess(x)), 3) == 1.648
        assert abs(float(log_mean_weight(x)) - shift + 1000.3799) < (0.04 if shift else 1e-4)


def test_far_below_in_half_precision():
    """CASES H-6: -3e4 in bfloat16 (where the neighbours are 128 apart) and in float16."""
    x = jnp.full(8, -3e4)
    for dtype in (jnp.bfloat16, jnp.float16, jnp.float32):
        assert float(ess(x.astype(dtype))) == 8.0
    two = jnp.array([-3e4, -3e4 + 128]).astype(jnp.bfloat16)
    np.testing.assert_array_equal(normalize(two), [0.0, 1.0])


@pytest.mark.parametrize("n", [1, 8, 1000, 30_000, 1_000_000])
def test_equal_weights_have_an_ess_of_exactly_n(n):
    """CASES H-8, the part of ESS: a threshold at n must not flicker."""
    for level in (0.0, -1234.567, 0.1):
        assert float(ess(jnp.full(n, level))) == n


def test_one_particle_with_all_the_weight():
    assert float(ess(jnp.array([0.0] + [-jnp.inf] * 7))) == 1.0
    assert float(ess(jnp.array([0.0] + [-200.0] * 7))) == 1.0


def test_a_million_particles_against_float64():
    x = np.random.default_rng(0).normal(size=1_000_000).astype(np.float32) * 2
    np.testing.assert_allclose(ess(x), oracle.ess(x), rtol=3e-6)
    np.testing.assert_allclose(log_mean_weight(x), oracle.log_mean_weight(x), atol=3e-6)
    np.testing.assert_allclose(np.asarray(normalize(x), np.float64).sum(), 1, rtol=1e-6)


def test_no_law():
    x = jnp.array([[-jnp.inf] * 3, [0, jnp.nan, 0], [0, jnp.inf, 0], [0, 0, 0]])
    for f in (ess, log_ess):
        np.testing.assert_array_equal(np.isnan(f(x)), [True, True, True, False])
    np.testing.assert_array_equal(np.isnan(normalize(x)).all(-1), [True, True, True, False])
    np.testing.assert_array_equal(log_mean_weight(x), [-np.inf, np.nan, np.nan, 0.0])


def test_dead_particles_do_not_count():
    x, mask = jnp.array([0.0, jnp.nan, 1.0, jnp.inf]), jnp.array([True, False, True, False])
    live = np.array([0.0, 1.0])
    np.testing.assert_allclose(ess(x, mask=mask), oracle.ess(live), rtol=1e-6)
    np.testing.assert_allclose(log_mean_weight(x, mask=mask), oracle.log_mean_weight(live), rtol=1e-6)
    assert np.isnan(log_mean_weight(x, mask=jnp.zeros(4, bool))) and np.isnan(ess(x, mask=jnp.zeros(4, bool)))


def test_gradient_is_finite():
    grad = jax.jit(jax.grad(lambda x: log_ess(x) + ess(x) + log_mean_weight(x)))(jnp.array([0.0, -1000.0, -jnp.inf]))
    assert np.isfinite(grad).all()


@pytest.mark.parametrize("bad, error, words", [
    (jnp.zeros(3, jnp.int32), TypeError, "log_weights must be"),
    (jnp.zeros(()), ValueError, "at least one particle"),
    (jnp.zeros((2, 0)), ValueError, "at least one particle"),
])  # fmt: skip
def test_errors(bad, error, words):
    for f in (ess, log_ess, normalize, log_mean_weight):
        with pytest.raises(error, match=words):
            f(bad)
    with pytest.raises(TypeError, match="mask must be boolean"):
        ess(jnp.zeros(3), mask=jnp.ones(3))
    with pytest.raises(ValueError, match="mask must have the shape"):
        ess(jnp.zeros((2, 3)), mask=jnp.ones(2, bool))
