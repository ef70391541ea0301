"""Simulations of bandits: regret where the literature has figures, and the world that is simulated."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gumbeljax import bandit as bandits
from tests import statistics as gates
from tests.test_bandit import EQUAL, KEY, MAKERS, MIXED, TWO, np_reward


def final_regrets(bandit, arms, rates, seeds=1000):
    """Regret after the last round, for many seeds, in one compiled call. A hundred at a time: of wider loops XLA cuts every
    operation for the threads that NPROC promises, which takes five times as long as the work."""
    run = jax.jit(lambda keys: jax.lax.map(lambda key: bandits.simulate(bandit, arms, rates, key).regret[-1], keys,
                                           batch_size=100))
    return np.asarray(run(jax.random.split(jax.random.key(0), seeds)), np.float64)


STATIONARY = np.tile(np.float32([0.3, 0.7, 0.5]), (10_000, 1))
SWAPPED = np.repeat(np.float32([[0.9, 0.2], [0.2, 0.9]]), 5_000, axis=0)


def published(regrets, mean, sd):
    """Within 4 standard errors of a published population mean, with a spread that is no other than the published one."""
    return abs(regrets.mean() - mean) < 4 * sd / np.sqrt(len(regrets)) and 0.5 < regrets.std() / sd < 2


def swapped_ucb1(arms):
    bandit = bandits.ucb1(arms)

    def select(state, key=None):
        bonus = jnp.sqrt(2 * jnp.log(jnp.maximum(state.counts, 1)) / jnp.maximum(state.counts.sum(), 1))
        return jnp.argmax(jnp.where(state.counts > 0, state.means + bonus, jnp.inf)).astype(jnp.int32)

    return bandit._replace(select=select)


def thompson_without_b(arms):
    bandit = bandits.thompson(arms)
    return bandit._replace(update=lambda state, arm, num_accepted, draft_len: bandit.update(state, arm, num_accepted, 0))


def test_ucb1_regret():
    assert published(final_regrets(bandits.ucb1(EQUAL), EQUAL, STATIONARY), 99.44, 17.0)


@pytest.mark.slow
def test_thompson_regret():
    assert published(final_regrets(bandits.thompson(EQUAL), EQUAL, STATIONARY), 18.3, 7.0)


@pytest.mark.parametrize("mistake", [swapped_ucb1, thompson_without_b])
def test_regret_sees_mistakes(mistake):
    """Both lock on to a bad arm sometimes, and pay for it in every round."""
    regrets = final_regrets(mistake(EQUAL), EQUAL, STATIONARY, seeds=50)
    assert not published(regrets, 99.44, 17.0) and not published(regrets, 18.3, 7.0)


def test_regret_of_the_others():
    """KL-UCB and MOSS beat UCB1 on the stationary problem, as their tighter bounds say."""
    means = {name: final_regrets(MAKERS[name](EQUAL), EQUAL, STATIONARY, 100).mean() for name in ("ucb1", "kl_ucb", "moss")}
    assert means["kl_ucb"] < means["moss"] < means["ucb1"] / 2, means


def test_regret_after_a_switch():
    """Windows per arm of 100: at most 40; UCB1 about 90; a window over all rounds pays for exploring for ever."""
    windows = {over: final_regrets(bandits.sliding_window_ucb(TWO, window=100, over=over), TWO, SWAPPED, 200)
               for over in ("arm", "rounds")}  # fmt: skip
    plain = final_regrets(bandits.ucb1(TWO), TWO, SWAPPED, 100)
    assert windows["arm"].mean() <= 40 < plain.mean() < 104 < windows["rounds"].mean()


def test_simulation_is_the_world_it_says():
    """Accepted tokens follow the truncated geometric law; an oracle has no regret; a fixed arm's is gap times rounds."""
    rates = jnp.tile(jnp.array([0.5, 0.8, 0.7, 0.6]), (20_000, 1))
    mean = [np_reward(MIXED, i, float(bandits.expected_tokens(a, MIXED.draft_len[i])) - 1) for i, a in enumerate(rates[0])]
    run = jax.jit(lambda bandit_arm, key: bandits.simulate(bandits.fixed(MIXED, bandit_arm), MIXED, rates, key))
    for arm, draft_len in enumerate(MIXED.draft_len):
        out, a = run(arm, KEY), float(rates[0, arm])
        law = [a**k * (1 - a) for k in range(draft_len)] + [a**draft_len]
        law = np.array(law) / np.sum(law)
        assert gates.chi_square(np.bincount(out.num_accepted, minlength=draft_len + 1), law) > gates.ALPHA or draft_len == 0
        assert out.num_accepted.max() == draft_len
        assert np.isclose(out.regret[-1], 20_000 * (max(mean) - mean[arm]), rtol=1e-5)
    best = bandits.oracle(MIXED, rates[0])
    assert float(bandits.simulate(best, MIXED, rates[:50], KEY).regret[-1]) == 0
