"""Steps of particles: what moves together, when, and what the estimate of Z is worth."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gumbeljax import smc
from tests.statistics import ALPHA, chi_square, frequency_within

SCHEMES = [smc.systematic, smc.stratified, smc.residual, smc.multinomial]
LN6 = float(np.log(6))


def still(particles, keys):
    return particles, None


def nothing(particles, aux):
    return jnp.zeros(jax.tree.leaves(particles)[0].shape)


def test_weights_are_equal_after_a_resampling_and_only_there():
    """CASES H-4, in a batch of two groups of which one is resampled."""
    state = smc.init(jnp.arange(6).reshape(2, 3), jnp.array([[0, 0, LN6], [0.0, 0.1, 0.2]]))
    before = state.log_weights
    state, info = smc.step(state, jax.random.key(0), propose_fn=still, log_weight_fn=nothing, threshold=0.9)
    assert info.resampled.tolist() == [True, False]
    np.testing.assert_array_equal(state.log_weights[0], 0)
    np.testing.assert_array_equal(state.log_weights[1], before[1])
    np.testing.assert_array_equal(info.ancestors[1], [0, 1, 2])
    np.testing.assert_allclose(smc.log_evidence(state), [np.log(8 / 3), np.log(np.mean(np.exp(before[1])))], rtol=1e-6)
    state, _ = smc.step(state, jax.random.key(1), propose_fn=still, log_weight_fn=lambda x, _: jnp.full(x.shape, 0.5),
                        threshold=0.0)
    np.testing.assert_array_equal(state.log_weights[0], 0.5)


@pytest.mark.parametrize("threshold, equal, one_hot, half", [
    (0.0, False, False, False), (0.5, False, True, False), (1.0, False, True, True)])  # fmt: skip
def test_threshold(threshold, equal, one_hot, half):
    """CASES H-8: strictly below; equal weights have an ESS of exactly n, with any key."""
    x = jnp.array([[0.1] * 8, [0.0] + [-jnp.inf] * 7, [0.0] * 4 + [-jnp.inf] * 4])  # ESS 8, 1 and exactly 4
    state = smc.init(jnp.zeros((3, 8)), x)
    for seed in range(3):
        info = smc.resample(state, jax.random.key(seed), threshold=threshold)[1]
        assert info.resampled.tolist() == [equal, one_hot, half]
        np.testing.assert_allclose(info.ess, [8, 1, 4])
    own = smc.resample(state, jax.random.key(0), threshold=jnp.array([1.1, 0.0, 0.6]))[1]
    assert own.resampled.tolist() == [True, False, True]


def test_everything_follows_the_same_ancestors():
    """CASES H-10: tokens, a cache, lengths; a scalar stays; two children of one parent part at the next draw."""
    n = 6
    particles = {"tokens": jnp.arange(n), "cache": jnp.arange(n * 8.0).reshape(n, 2, 4), "length": jnp.arange(n) + 10,
                 "key": jax.random.split(jax.random.key(5), n), "step": jnp.int32(7)}
    state = smc.init(particles, jnp.log(jnp.array([0.0, 0.7, 0.1, 0.1, 0.1, 0.0])), potential_fn=lambda p: p["tokens"] * 0.01)

    def propose_fn(particles, keys):
        return particles | {"drawn": jax.vmap(jax.random.normal)(keys)}, None

    state, info = smc.step(state, jax.random.key(0), propose_fn=propose_fn, log_weight_fn=lambda p, _: jnp.zeros(n))
    ancestors = np.asarray(info.ancestors)
    assert info.resampled and len(set(ancestors.tolist())) < n
    for name in ("tokens", "cache", "length"):
        np.testing.assert_array_equal(state.particles[name], np.asarray(particles[name])[ancestors])
    np.testing.assert_array_equal(state.log_potential, np.float32(ancestors * 0.01))
    assert (state.particles["key"] == particles["key"][ancestors]).all()
    assert state.particles["step"] == 7
    assert len(np.unique(state.particles["drawn"])) == n


def test_groups_do_not_see_each_other():
    log_weights = jnp.linspace(0.2, 2, 6).reshape(2, 3, 1) * jax.random.normal(jax.random.key(0), (2, 3, 8))
    keys = jax.random.split(jax.random.key(1), (2, 3))

    def propose_fn(x, keys):
        noise = jax.vmap(jax.vmap(jax.random.normal))(keys.reshape(-1, 8)).reshape(keys.shape)
        return x + noise, noise

    def one(log_weights, keys):
        state = smc.init(jnp.zeros(log_weights.shape), log_weights)
        return smc.step(state, keys, propose_fn=propose_fn, log_weight_fn=lambda x, noise: -noise, threshold=0.6)

    whole, alone = one(log_weights, keys), one(log_weights[1, 2], keys[1, 2])
    assert 0 < whole[1].resampled.sum() < 6 and whole[1].resampled[1, 2]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a[1, 2], b, rtol=1e-6, atol=1e-6), whole, alone)
    jitted = jax.jit(one)(log_weights, keys)
    np.testing.assert_array_equal(jitted[1].ancestors, whole[1].ancestors)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_groups_with_fewer_particles(scheme):
    """Five of eight live: counts of copies are 5 w on average, none is dead, and the dead stay where they are."""
    n, groups = 8, 40_000
    w = np.array([0.1, 0.3, 0.0, 0.25, 0.0, 0.05, 0.3, 0.0])
    mask = w > 0
    x = np.where(mask, np.log(np.where(mask, w, 1)), 50.0)  # what a dead particle holds is not read
    state = smc.init(jnp.broadcast_to(jnp.arange(n), (groups, n)), jnp.broadcast_to(x, (groups, n)), mask=jnp.asarray(mask))
    state, info = smc.resample(state, jax.random.key(0), resample_fn=scheme, threshold=2.0)
    live = np.asarray(info.ancestors)[:, mask]
    np.testing.assert_array_equal(np.asarray(info.ancestors)[:, ~mask], np.broadcast_to(np.flatnonzero(~mask), (groups, 3)))
    assert mask[live].all() and np.isneginf(np.asarray(state.log_weights)[:, ~mask]).all()
    np.testing.assert_allclose(smc.log_evidence(state), np.log(1 / 5), rtol=1e-5)
    for slot in live.T:  # every slot by itself follows the weights
        assert chi_square(np.bincount(slot, minlength=n), w) > ALPHA


@pytest.mark.parametrize("scheme", SCHEMES)
def test_counts_are_unbiased(scheme):
    w, groups = np.array([0.05, 0.4, 0.25, 0.3]), 50_000
    state = smc.init(jnp.zeros((groups, 4)), jnp.broadcast_to(jnp.log(w), (groups, 4)))
    ancestors = np.asarray(smc.resample(state, jax.random.key(0), resample_fn=scheme, threshold=2.0)[1].ancestors)
    counts = np.stack([(ancestors == i).sum(1) for i in range(4)], 1)
    se = counts.std(0) / np.sqrt(groups)
    assert np.all(np.abs(counts.mean(0) - 4 * w) <= 4.5 * se + 1e-6)


def test_groups_without_a_law():
    x = jnp.array([[-jnp.inf] * 3, [0, jnp.nan, 0], [0, jnp.inf, 0], [0, 0, -jnp.inf], [0.0, 0, 0]])
    mask = jnp.ones((5, 3), bool).at[4].set(False)
    state, info = smc.resample(smc.init(jnp.zeros((5, 3)), x, mask=mask), jax.random.key(0), threshold=1.0)
    assert info.resampled.tolist() == [False, False, False, True, False]
    np.testing.assert_array_equal(np.isnan(info.ess), [True, True, True, False, True])
    np.testing.assert_array_equal(smc.choose(state, jax.random.key(1)) == -1, [True, True, True, False, True])
    z = np.asarray(smc.log_evidence(state))
    assert z[0] == -np.inf and np.isnan(z[[1, 2, 4]]).all() and abs(z[3] - np.log(2 / 3)) < 1e-6
    # The dead are not raised by a later factor, be it +inf.
    state, _ = smc.step(state, jax.random.key(0), propose_fn=still, log_weight_fn=lambda x, _: jnp.full(x.shape, jnp.inf))
    assert np.isneginf(np.asarray(state.log_weights)[0]).all()


def test_one_particle_is_never_resampled():
    state = smc.init(jnp.zeros((4, 1)), jnp.array([[0.0], [-50.0], [50.0], [-jnp.inf]]))
    for threshold in (0.5, 1.0):
        assert not smc.resample(state, jax.random.key(0), threshold=threshold)[1].resampled.any()


def random_walk(potential_fn, runs, n, key, steps=3, threshold=0.5):
    """Fair coins, `steps` of them; particles count heads. The potential says what counts."""
    def propose_fn(heads, keys):
        coins = jax.vmap(lambda k: jax.random.bernoulli(k))(keys.reshape(-1)).reshape(keys.shape)
        return heads + coins, None

    state = smc.init(jnp.zeros((runs, n), jnp.int32), jnp.zeros((runs, n)), potential_fn=potential_fn)
    for i in range(steps):
        state, _ = smc.step(state, jax.random.fold_in(key, i), propose_fn=propose_fn, potential_fn=potential_fn,
                            log_weight_fn=lambda x, _: jnp.zeros(x.shape), threshold=threshold)
    chosen = smc.choose(state, jax.random.fold_in(key, 99))
    return np.asarray(jnp.take_along_axis(state.particles, chosen[:, None], 1)[:, 0]), np.asarray(smc.log_evidence(state))


@pytest.mark.parametrize("potential_fn", [lambda heads: heads * 0.7, lambda heads: jnp.where(heads >= 3, -jnp.inf, 0.0)])
def test_the_law_is_weighted_by_the_last_potential(potential_fn):
    """Rewarded and forbidden counts of heads: with 64 particles the law is that of p(x) G(x), and E[Z] is exact."""
    runs = 20_000
    heads, log_z = random_walk(potential_fn, runs, 64, jax.random.key(0))
    law = np.array([1, 3, 3, 1]) / 8 * np.exp(np.asarray(potential_fn(jnp.arange(4)), np.float64))
    z = np.exp(log_z)
    assert abs(z.mean() - law.sum()) < 4 * z.std() / np.sqrt(runs)
    assert 0.5 * np.abs(np.bincount(heads, minlength=4) / runs - law / law.sum()).sum() < 0.01


@pytest.mark.parametrize("bad, words", [
    (lambda: smc.init(jnp.zeros((3, 2)), jnp.zeros((2, 3))), "leaves that are scalars or begin"),
    (lambda: smc.step(smc.init(jnp.zeros(3), jnp.zeros(3)), jax.random.key(0), propose_fn=still,
                      log_weight_fn=lambda x, _: jnp.zeros((3, 2))), "log_weight_fn must return"),
    (lambda: smc.step(smc.init(jnp.zeros((2, 3)), jnp.zeros((2, 3))), jax.random.split(jax.random.key(0), 3), propose_fn=still,
                      log_weight_fn=nothing), "key must be"),
])  # fmt: skip
def test_errors(bad, words):
    with pytest.raises(ValueError, match=words):
        bad()


def test_frequencies_of_the_chosen_particle():
    w = np.array([0.1, 0.6, 0.3])
    state = smc.init(jnp.zeros((50_000, 3)), jnp.broadcast_to(jnp.log(w) - 1e4, (50_000, 3)))
    chosen = smc.choose(state, jax.random.key(0))
    assert frequency_within(np.bincount(chosen, minlength=3), 50_000, w)
