"""The algebra of speculative decoding by particles, and the law of its toy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gumbeljax
from gumbeljax import smc
from tests.smc import toy
from tests.smc.test_core import SCHEMES


def close(z_hat, z, num_se=4.0):
    return abs(z_hat.mean() - z) < num_se * z_hat.std() / np.sqrt(len(z_hat))


@pytest.mark.parametrize("n, variation, runs, tolerance", [
    (1, 0.573, 40_000, 0.01), (4, 0.148, 40_000, 0.02),  # fewer runs have a higher floor
    pytest.param(1, 0.573, 400_000, 0.01, marks=pytest.mark.slow),
    pytest.param(2, 0.374, 400_000, 0.01, marks=pytest.mark.slow),
    pytest.param(4, 0.148, 400_000, 0.01, marks=pytest.mark.slow),
    pytest.param(8, 0.069, 200_000, 0.01, marks=pytest.mark.slow),
])  # fmt: skip
def test_joint_law(n, variation, runs, tolerance):
    """All 3^7 sequences; the published distances to the target. E[Z] = 1 at every number of particles."""
    law, z = toy.target_law()
    sequences, log_z, resampled = toy.many(jax.random.key(0), n=n, runs=runs)
    assert z == pytest.approx(1)
    assert abs(toy.total_variation(sequences, law) - variation) < tolerance
    assert close(np.exp(log_z), 1.0)
    assert (resampled.mean() > 0.1) == (n > 1) or n == 2


@pytest.mark.slow
def test_error_falls_like_one_over_n():
    law, _ = toy.target_law()
    sizes = [1, 2, 4, 8]
    errors = [toy.total_variation(toy.many(jax.random.key(1), n=n, runs=400_000 if n < 8 else 200_000)[0], law) for n in sizes]
    slope = np.polyfit(np.log(sizes), np.log(errors), 1)[0]
    assert -1.3 < slope < -0.8


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("alpha", [1.0, 2.0])
def test_evidence_is_unbiased(scheme, alpha):
    z = toy.target_law(alpha)[1]
    _, log_z, resampled = toy.many(jax.random.key(2), n=4, runs=20_000, alpha=alpha, scheme=scheme)
    assert resampled.mean() > 0.1 and close(np.exp(log_z), z)


def test_first_token_must_not_be_shared_at_alpha_2():
    """Shared, its error is that of p^2 normalised, at any number of particles; drawn by each particle it vanishes."""
    law, _ = toy.target_law(2.0)
    first = toy.chains()[0] ** 2
    for_ever = 0.5 * np.abs(first / first.sum() - law.reshape(3, -1).sum(1)).sum()
    assert abs(for_ever - 0.0457) < 2e-4 and round(1 / first.sum(), 2) == 2.17  # what forgetting its weight does to Z
    shared, own = (toy.many(jax.random.key(3), n=64, runs=40_000, chunk=10_000, alpha=2.0, shared_first=x)[0]
                   for x in (True, False))
    assert abs(toy.first_token_error(shared, law) - for_ever) < 0.008
    assert toy.first_token_error(own, law) < 0.006


def test_keys_of_the_first_token():
    keys = jax.random.split(jax.random.key(0), (2, 3))
    alpha = jnp.array([[1.0, 2.0, 1.0], [0.5, 1.0, 1.0]])
    got = smc.first_token_keys(keys, 4, alpha=alpha)
    assert ((got == got[..., :1]).all(-1) == (alpha == 1)).all()
    assert (smc.first_token_keys(keys, 4, alpha=2.0)[..., 1:] != got[..., :1]).all()


def test_bonus_by_log_probabilities_is_the_ratio_of_normalisers():
    """Any bonus token gives LSE(alpha l / T) - alpha LSE(l / T), from what `sample_with_log_probs` returns."""
    h, w = jax.random.normal(jax.random.key(0), (64, 16)), jax.random.normal(jax.random.key(1), (40, 16))
    temperature = jnp.linspace(0.5, 2, 64)
    logits = np.asarray(h, np.float64) @ np.asarray(w, np.float64).T
    lse = lambda x: np.log(np.exp(x).sum(-1))  # noqa: E731
    for alpha in (1.0, 2.0, 0.5):
        bonus = gumbeljax.sample_with_log_probs(h, w, jax.random.key(2), temperature=smc.bonus_temperature(temperature, alpha))
        p = gumbeljax.log_prob(h, w, bonus.token, temperature=temperature)
        got = smc.log_weight(p[:, None], bonus.tempered_log_prob[:, None], alpha=alpha)
        scaled = logits / np.asarray(temperature)[:, None]
        np.testing.assert_allclose(got, lse(alpha * scaled) - alpha * lse(scaled), atol=2e-4)


def test_equal_laws_and_temperatures_weigh_nothing():
    h, w = jax.random.normal(jax.random.key(0), (8, 4, 16)), jax.random.normal(jax.random.key(1), (40, 16))
    tokens = gumbeljax.sample(h, w, jax.random.key(2), temperature=0.7)
    log_probs = gumbeljax.log_prob(h, w, tokens, temperature=0.7)
    np.testing.assert_array_equal(smc.log_weight(log_probs, log_probs), 0)
    assert (smc.log_weight(log_probs, log_probs, alpha=2.0) < 0).all()


def test_forbidden_tokens_and_tokens_that_are_not_kept():
    p = jnp.array([[-1.0, -jnp.inf], [-jnp.inf, -jnp.inf], [-1.0, jnp.nan]])
    q = jnp.array([[-2.0, -1.0], [-jnp.inf, -1.0], [-2.0, jnp.nan]])
    np.testing.assert_array_equal(smc.log_weight(p[:2], q[:2]), [-jnp.inf, -jnp.inf])
    np.testing.assert_array_equal(smc.log_weight(p, q, kept=jnp.array([True, False])), [1.0, -jnp.inf, 1.0])
    np.testing.assert_array_equal(smc.log_weight(p, q, alpha=jnp.array([1.0, 2.0, 3.0]), kept=jnp.array([True, False])),
                                  [1.0, -jnp.inf, -1.0])


@pytest.mark.parametrize("tokens, done, remaining, kept, over", [
    ([1, 2, 3, 4], False, 9, 4, False),  # goes on
    ([1, 2, 3, 4], False, 4, 4, True),  # the cap, exactly
    ([1, 2, 3, 4], False, 2, 2, True),  # cut by the cap: only what is kept is weighed
    ([1, 0, 3, 0], False, 9, 2, True),  # end of sequence, itself included, once
    ([1, 0, 3, 4], False, 2, 2, True),  # both at once: nothing after the end
    ([1, 2, 0, 4], False, 2, 2, True),  # the end lies beyond the cap
    ([0, 0, 0, 0], True, 9, 0, True),  # absorbing
    ([1, 2, 3, 4], False, 0, 0, True),
])  # fmt: skip
def test_cut_tokens(tokens, done, remaining, kept, over):
    got = smc.cut_tokens(jnp.array([tokens]), jnp.array([done]), remaining, eos=0)
    several = smc.cut_tokens(jnp.array([tokens]), jnp.array([done]), remaining, eos=[0, 77])
    jax.tree.map(np.testing.assert_array_equal, got, several)
    assert got.kept[0].tolist() == [i < kept for i in range(4)] and bool(got.is_done[0]) == over
    p = jnp.log(jnp.array([[0.5, 0.4, 0.3, 0.2]]))
    want = float(jnp.sum(p[0, :kept] + 1))
    np.testing.assert_allclose(smc.log_weight(p, jnp.full((1, 4), -1.0), kept=got.kept), [want], rtol=1e-6)


def test_no_end_of_sequence():
    assert smc.cut_tokens(jnp.zeros((2, 3), jnp.int32), jnp.zeros(2, bool), 9).kept.all()


def test_errors():
    with pytest.raises(ValueError, match="proposal_log_probs must have the shape"):
        smc.log_weight(jnp.zeros((2, 3)), jnp.zeros((2, 4)))
    with pytest.raises(ValueError, match="tokens must be"):
        smc.cut_tokens(jnp.zeros((2, 3), jnp.int32), jnp.zeros(3, bool), 9)
