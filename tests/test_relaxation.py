"""Gumbel-softmax: finite, normalised, the draw of Gumbel-max under the same key, and gradients that mean something."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from gumbeljax.reference import gumbel_max
from gumbeljax.relaxation import gumbel_softmax
from tests import oracles
from tests import statistics as gates

# Jitted: eager calls compile every operation for every new shape.
relaxed = jax.jit(gumbel_softmax, static_argnames=("hard", "axis"))
DTYPES = [jnp.float16, jnp.bfloat16, jnp.float32]


def _f32(x):
    return np.asarray(x.astype(jnp.float32))


def _check_relaxed(logits, key, tau, tolerance):
    """Finite, normalised, hard rows exact one-hots at the soft maximum, finite gradient of a weighted sum."""
    weights = jnp.arange(logits.shape[-1], dtype=jnp.float32) / logits.shape[-1]

    @jax.jit
    def summary(logits, key):
        def weighted(logits, hard):
            out = gumbel_softmax(logits, key, temperature=tau, hard=hard)
            return jnp.sum(weights * out.astype(jnp.float32)), out

        (_, soft), grad = jax.value_and_grad(weighted, has_aux=True)(logits, False)
        (_, hard), hard_grad = jax.value_and_grad(weighted, has_aux=True)(logits, True)
        return {
            "finite": jnp.isfinite(soft).all() & jnp.isfinite(grad).all() & jnp.isfinite(hard_grad).all(),
            "error of the sums": jnp.abs(soft.astype(jnp.float32).sum(-1) - 1).max(),
            "one-hot": ((hard == 1).sum(-1) == 1).all() & ((hard == 0).sum(-1) == logits.shape[-1] - 1).all(),
            "same draw": (soft.argmax(-1) == hard.argmax(-1)).all(),
            "mean": soft.astype(jnp.float32).mean(),
        }

    got = summary(logits, key)
    assert got["finite"] and got["one-hot"] and got["same draw"], got
    assert got["error of the sums"] <= tolerance, got
    return float(got["mean"])


def test_many_draws_are_finite_and_normalised():
    """CASES A-7, first half (100 of its 5,000 draws; the others add time only)."""
    logits = jax.random.normal(jax.random.key(0), (1000, 64))
    _check_relaxed(jnp.tile(logits, (100, 1)), jax.random.key(1), 1.0, 1e-5)


def test_wide_logits_are_finite_and_normalised():
    """CASES A-7, second half."""
    logits = jax.random.uniform(jax.random.key(2), (4096, 8192), minval=-255, maxval=255)
    _check_relaxed(logits, jax.random.key(3), 1.0, 1e-5)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize("tau", [1.0, 0.1])
def test_half_precision_over_many_classes(dtype, tau):
    """CASES F-6."""
    logits = jax.random.normal(jax.random.key(4), (128, 30152)).astype(dtype)
    mean = _check_relaxed(logits, jax.random.key(5), tau, 1e-2)
    assert abs(mean * 30152 - 1) < 0.05


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tau", [1e-30, 1e-3, 0.5, 1.0, 30.0, 1e4, 1e30])
def test_the_drawn_entry_is_the_largest_at_any_temperature(dtype, tau):
    """At a high temperature nearly all entries round to the same value; the draw must not fall to the lowest id."""
    logits = jax.random.normal(jax.random.key(6), (500, 300)).astype(dtype)
    key = jax.random.key(7)
    soft, token = relaxed(logits, key, temperature=tau), jax.jit(gumbel_max)(logits, key)
    assert soft.dtype == dtype
    np.testing.assert_array_equal(soft.argmax(-1), token)
    np.testing.assert_array_equal(
        relaxed(logits, key, temperature=tau, hard=True), jax.nn.one_hot(token, 300, dtype=dtype)
    )
    assert np.abs(_f32(soft).sum(-1) - 1).max() < 1e-2


def test_values_are_those_of_float64():
    logits = np.random.default_rng(8).normal(size=(50, 40)).astype(np.float32)
    keys = oracles.row_keys_of(jax.random.key_data(jax.random.key(8)), 50)
    stream = oracles.stream(oracles.DRAW, 0, oracles.TOKEN_LEVEL)
    noise = oracles.gumbel(keys[:, :1], keys[:, 1:], stream, np.arange(40))
    want = np.exp(oracles.log_softmax(logits + noise, 0.3))
    np.testing.assert_allclose(relaxed(logits, jax.random.key(8), temperature=0.3), want, rtol=2e-5, atol=1e-7)


@pytest.mark.parametrize("tau", [0.2, 1.0, 5.0])
def test_hard_draws_have_the_law_of_the_logits_at_every_temperature(tau):
    logits = jnp.array([0.0, 1.0, -1.0, 2.0, 0.5])
    draws = relaxed(jnp.tile(logits, (100_000, 1)), jax.random.key(9), temperature=tau, hard=True)
    assert gates.chi_square(np.asarray(draws.sum(0)), np.exp(oracles.log_softmax(logits[None])[0])) > gates.ALPHA


def test_the_soft_draw_is_the_concrete_distribution():
    """For two choices the log-odds are (l1 - l2 + logistic) / tau."""
    logits = jnp.tile(jnp.array([0.7, -0.4]), (100_000, 1))
    y = np.asarray(relaxed(logits, jax.random.key(10), temperature=2.0), np.float64)
    odds = 2.0 * np.log(y[:, 0] / y[:, 1]) - 1.1
    assert gates.stats.ks_1samp(odds, gates.stats.logistic.cdf).pvalue > gates.ALPHA


# Gradients


@pytest.mark.parametrize("tau", [0.5, 2.0])
def test_gradient_is_the_derivative(tau):
    logits, weights = jax.random.normal(jax.random.key(11), (2, 6)), jnp.arange(6.0)

    def f(logits, tau):
        return jnp.sum(weights * relaxed(logits, jax.random.key(12), temperature=tau) ** 2)

    check_grads(f, (logits, tau), order=1, modes=("fwd", "rev"), atol=1e-2, rtol=1e-2, eps=1e-2)


def test_straight_through_passes_the_soft_gradient_of_the_hard_value():
    """d/dl of sum(w y) is the soft draw's; d/dl of f(y) takes f' at the hard draw."""
    logits, key, weights = jax.random.normal(jax.random.key(13), (5, 6)), jax.random.key(14), jnp.arange(6.0)

    def soft(logits):
        return relaxed(logits, key, temperature=0.7)

    def hard(logits):
        return relaxed(logits, key, temperature=0.7, hard=True)

    want = jax.grad(lambda x: jnp.sum(weights * soft(x)))(logits)
    np.testing.assert_array_equal(jax.grad(lambda x: jnp.sum(weights * hard(x)))(logits), want)
    assert jnp.abs(want).max() > 1e-3
    slope = 2 * weights * hard(logits)
    want = jax.vjp(soft, logits)[1](slope)[0]
    np.testing.assert_allclose(jax.grad(lambda x: jnp.sum(weights * hard(x) ** 2))(logits), want, rtol=1e-6)


@pytest.mark.parametrize("hard", [False, True])
@pytest.mark.parametrize("tau", [1e-15, 1.0, 1e30])
def test_forbidden_entries_are_zero_and_harmless(hard, tau):
    logits = jnp.array([[0.0, -jnp.inf, 1.0], [-jnp.inf, -jnp.inf, 2.0]])

    def f(logits, tau):
        out = relaxed(logits, jax.random.key(15), temperature=tau, hard=hard)
        return jnp.sum(jnp.arange(6.0).reshape(2, 3) * out), out

    ((_, out), grads) = jax.value_and_grad(f, argnums=(0, 1), has_aux=True)(logits, tau)
    assert (out[logits == -jnp.inf] == 0).all()
    np.testing.assert_allclose(out.sum(-1), 1, rtol=1e-6)
    assert (grads[0][logits == -jnp.inf] == 0).all()
    assert jnp.isfinite(grads[0]).all() and jnp.isfinite(grads[1])


def test_gradient_estimate_approaches_the_exact_one():
    """Mean soft gradient of E[f(token)] against the gradient by enumeration: bias falls as the temperature does."""
    logits, reward = jnp.array([0.2, -0.5, 0.9, 0.0]), jnp.array([1.0, 3.0, -2.0, 0.5])
    probs = jax.nn.softmax(logits)
    exact = probs * (reward - probs @ reward)
    keys = jax.random.split(jax.random.key(16), 40_000)

    def mean_gradient(tau):
        grads = jax.vmap(jax.grad(lambda x, k: reward @ relaxed(x, k, temperature=tau)), (None, 0))(logits, keys)
        return grads.mean(0), grads.std(0) / np.sqrt(len(keys))

    bias, noise = {}, {}
    for tau in (0.1, 1.0, 4.0):
        mean, se = mean_gradient(tau)
        bias[tau], noise[tau] = float(jnp.abs(mean - exact).max()), float(se.max())
    assert bias[0.1] < 4.5 * noise[0.1] < bias[1.0] < bias[4.0]
    assert noise[0.1] > noise[1.0] > noise[4.0]


# Transforms, degenerate rows, errors


def test_jit_vmap_axis_and_keys():
    logits, key = jax.random.normal(jax.random.key(17), (3, 4, 5)), jax.random.key(18)
    out = relaxed(logits, key, temperature=0.5)
    eager = gumbel_softmax(logits, key, temperature=0.5)
    np.testing.assert_allclose(eager, out, rtol=1e-6)
    moved = relaxed(jnp.moveaxis(logits, -1, 1), key, temperature=0.5, axis=1)
    np.testing.assert_array_equal(jnp.moveaxis(moved, 1, -1), out)
    keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(12)).reshape(3, 4)
    np.testing.assert_array_equal(relaxed(logits, keys, temperature=0.5), out)
    mapped = jax.vmap(jax.vmap(lambda x, k: relaxed(x, k, temperature=0.5)))(logits, keys)
    np.testing.assert_allclose(mapped, out, rtol=1e-6)
    by_tau = jax.vmap(lambda tau: relaxed(logits, key, temperature=tau))(jnp.array([0.5, 1.0]))
    np.testing.assert_allclose(by_tau[0], out, rtol=1e-6)
    assert relaxed(logits[:0], key).shape == (0, 4, 5)


@pytest.mark.parametrize("hard", [False, True])
def test_rows_without_a_law_are_nan_and_leave_others_alone(hard):
    nan, inf = jnp.nan, jnp.inf
    rows = jnp.array([[0.0, 1, 2], [-inf, -inf, -inf], [0, nan, 1], [inf, 0, 0]])
    out = relaxed(rows, jax.random.key(19), hard=hard)
    assert jnp.isfinite(out[0]).all()
    assert jnp.isnan(out[1:]).all()
    grad = jax.grad(lambda x: relaxed(x, jax.random.key(19), hard=hard)[0, 1])(rows)
    assert jnp.isfinite(grad[0]).all()


@pytest.mark.parametrize("tau", [0.0, -1.0, float("inf"), float("nan")])
def test_temperatures_that_are_no_temperature(tau):
    with pytest.raises(ValueError, match="temperature must be positive and finite; got"):
        gumbel_softmax(jnp.zeros(3), jax.random.key(0), temperature=tau)
    traced = jax.jit(lambda tau: gumbel_softmax(jnp.zeros(3), jax.random.key(0), temperature=tau))(tau)
    assert jnp.isnan(traced).all()


def test_errors():
    key = jax.random.key(0)
    with pytest.raises(ValueError, match=r"temperature must be a scalar; got shape \[2\]"):
        gumbel_softmax(jnp.zeros((2, 3)), key, temperature=jnp.ones(2))
    with pytest.raises(TypeError, match="logits must be floating point; got int32"):
        gumbel_softmax(jnp.zeros(3, jnp.int32), key)
    with pytest.raises(ValueError, match=r"axis must name an axis of logits; got axis 2 for shape \[2, 3\]"):
        gumbel_softmax(jnp.zeros((2, 3)), key, axis=2)
    with pytest.raises(ValueError, match="key must be one key or an array of keys"):
        gumbel_softmax(jnp.zeros((2, 3)), jax.random.split(key, 3))
