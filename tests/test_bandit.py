"""Bandits: choices against formulas in NumPy, posteriors, every transform, and mistakes that a gate must see."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec
from scipy import optimize, special

from gumbeljax import bandit as bandits
from gumbeljax.bandit import Arms, Means
from gumbeljax.bandit.core import bandit_key
from tests import oracles
from tests import statistics as gates

KEY = jax.random.key(7)
EQUAL = Arms(draft_len=[1, 1, 1])  # one draft token, one cost: the reward is the accepted fraction
TWO = Arms(draft_len=[1, 1])
MIXED = Arms(draft_len=[0, 3, 5, 2], cost=[1.0, 1.5, 2.25, 1.25], draft=[0, 0, 1, 1])
MAKERS = {
    "ucb1": bandits.ucb1,
    "discounted_ucb": lambda arms: bandits.discounted_ucb(arms, discount=0.9),
    "kl_ucb": bandits.kl_ucb,
    "moss": bandits.moss,
    "window per arm": lambda arms: bandits.sliding_window_ucb(arms, window=7),
    "window of rounds": lambda arms: bandits.sliding_window_ucb(arms, window=7, over="rounds"),
    "thompson": bandits.thompson,
    "epsilon_greedy": bandits.epsilon_greedy,
    "fixed": lambda arms: bandits.fixed(arms, 1),
    "oracle": lambda arms: bandits.oracle(arms, np.linspace(0.2, 0.9, len(arms.draft_len))),
}
each_bandit = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


# Formulas in NumPy, from the whole history


def np_reward(arms, arm, num_accepted):
    cost, most = np.asarray(arms.cost) * np.ones(len(arms.draft_len)), np.asarray(arms.draft_len) + 1
    low, high = (1 / cost).min(), (most / cost).max()
    return ((num_accepted + 1) / cost[arm] - low) / (high - low)


def ucb1_scores(counts, means, t):
    return means + np.sqrt(2 * np.log(t) / counts)


def swapped_scores(counts, means, t):
    """A mistake: the roles of t and n exchanged (CASES I-1)."""
    return means + np.sqrt(2 * np.log(counts) / t)


def kl_scores(counts, means, t):
    def bound(n, p):
        def excess(q):
            return n * (special.rel_entr(p, q) + special.rel_entr(1 - p, 1 - q)) - np.log(t)

        return optimize.brentq(excess, p, 1 - 1e-15) if p < 1 and excess(1 - 1e-15) > 0 else 1.0

    return np.array([bound(n, p) for n, p in zip(counts, means, strict=True)])


def moss_scores(counts, means, t):
    return means + np.sqrt(1.175 * np.maximum(np.log(t / (len(counts) * counts)), 0) / counts)


def np_index(arms, history, weight_fn, score_fn=ucb1_scores, rounds=None, lifetime_counts=False):
    """Scores of the next round from a list of (arm, reward); `weight_fn(age in rounds, age among the arm's)`."""
    num_arms = len(arms.draft_len)
    counts, sums, plays, ages = np.zeros(num_arms), np.zeros(num_arms), np.zeros(num_arms), np.zeros(num_arms, int)
    for age, (arm, reward) in enumerate(reversed(history)):
        weight = weight_fn(age, ages[arm])
        counts[arm], sums[arm] = counts[arm] + weight, sums[arm] + weight * reward
        plays[arm], ages[arm] = plays[arm] + 1, ages[arm] + 1
    if (counts == 0).any():
        return np.where(counts == 0, np.inf, 0)
    means = sums / counts
    return score_fn(plays if lifetime_counts else counts, means, counts.sum() if rounds is None else rounds)


HISTORIES = {
    "ucb1": (MAKERS["ucb1"], lambda a, h: np_index(a, h, lambda *_: 1)),
    "discounted_ucb": (MAKERS["discounted_ucb"], lambda a, h: np_index(a, h, lambda age, _: 0.9**age)),
    "kl_ucb": (MAKERS["kl_ucb"], lambda a, h: np_index(a, h, lambda *_: 1, kl_scores)),
    "moss": (MAKERS["moss"], lambda a, h: np_index(a, h, lambda *_: 1, moss_scores)),
    "window per arm": (MAKERS["window per arm"], lambda a, h: np_index(a, h, lambda _, own: own < 7, rounds=len(h))),
    "window of rounds": (MAKERS["window of rounds"], lambda a, h: np_index(a, h, lambda age, _: age < 7)),
}


def disagreements(make, scores_fn, arms, seed=0, rounds=250):
    """Rounds in which the bandit's arm is not the formula's (a tie to 1e-5 is either); a third of the arms are random."""
    bandit, rng = make(arms), np.random.default_rng(seed)
    select, update = jax.jit(bandit.select), jax.jit(bandit.update)
    state, history, wrong = bandit.init(), [], 0
    for _ in range(rounds):
        arm, scores = int(select(state, KEY)), scores_fn(arms, history)
        first = np.argmax(scores)
        wrong += arm != first and not (np.isfinite(scores[first]) and scores[arm] > scores[first] - 1e-5)
        if rng.random() < 1 / 3:
            arm = int(rng.integers(len(arms.draft_len)))
        num_accepted = int(rng.integers(arms.draft_len[arm] + 1))
        history.append((arm, np_reward(arms, arm, num_accepted)))
        state = update(state, jnp.int32(arm), jnp.int32(num_accepted), jnp.int32(arms.draft_len[arm]))
    return wrong


@pytest.mark.parametrize("arms", [EQUAL, MIXED], ids=["equal", "mixed"])
@pytest.mark.parametrize("name", HISTORIES)
def test_choices_are_those_of_the_formula(name, arms):
    assert disagreements(*HISTORIES[name], arms) == 0


def test_mistakes_in_the_formula_are_seen():
    """Exchanged roles of t and n; windowed means with lifetime counts; a window of rounds for a window per arm."""

    def seen(name, wrong_fn):
        return disagreements(HISTORIES[name][0], wrong_fn, MIXED)

    assert seen("ucb1", lambda a, h: np_index(a, h, lambda *_: 1, swapped_scores)) > 10
    own = lambda _, age: age < 7  # noqa: E731
    assert seen("window per arm", lambda a, h: np_index(a, h, own, rounds=len(h), lifetime_counts=True)) > 10
    assert seen("window per arm", HISTORIES["window of rounds"][1]) > 10


def test_ucb1_bonus():
    """CASES I-1."""
    counts, means = np.array([10.0, 5.0, 1.0]), np.array([0.5, 0.6, 0.2])
    assert np.allclose(ucb1_scores(counts, means, 16), [1.245, 1.653, 2.555], atol=5e-4)
    assert np.allclose(swapped_scores(counts, means, 16), [1.037, 1.049, 0.2], atol=5e-4)
    state = Means(jnp.asarray(counts, jnp.float32), jnp.asarray(means, jnp.float32))
    assert int(bandits.ucb1(EQUAL).select(state, None)) == 2
    assert int(bandits.ucb1(EQUAL, c=0).select(state, None)) == 1  # the mean alone


@pytest.mark.parametrize("name", [*HISTORIES, "epsilon_greedy"])
def test_unplayed_arms_first_and_ties_to_the_lowest_index(name):
    bandit = MAKERS[name](EQUAL)
    state, order = bandit.init(), []
    for _ in range(4):
        order.append(int(bandit.select(state, KEY)))
        state = bandit.update(state, order[-1], 1, 1)
    assert order == [0, 1, 2, 0]


def test_rewards():
    assert np.array_equal(bandits.scaled_reward(EQUAL, jnp.array([0, 1]), jnp.array([0, 1])), [0, 1])
    for arm, draft_len in enumerate(MIXED.draft_len):
        accepted = np.arange(draft_len + 1)
        got = np.asarray(bandits.scaled_reward(MIXED, arm, accepted))
        assert np.allclose(got, np_reward(MIXED, arm, accepted), atol=1e-6) and got.min() >= 0 and got.max() <= 1
    assert float(bandits.scaled_reward(Arms([0, 0]), 0, 0)) == 0  # no arm can differ


def test_expected_tokens():
    """(1 - a^(K+1)) / (1 - a), to float32 rounding, a = 0, 1 and the last float below 1 included."""
    rate = np.float32([0, 1e-30, 1e-3, 0.25, 0.5, 0.8, 0.999, 1 - 2.0**-20, 1 - 2.0**-24, 1])[:, None]
    draft_len = np.array([0, 1, 4, 63])
    wanted = np.array([[(float(a) ** np.arange(k + 1)).sum() for k in draft_len] for a in rate[:, 0]])
    assert np.allclose(bandits.expected_tokens(rate, draft_len), wanted, rtol=1e-6)
    assert np.isnan(bandits.expected_tokens(np.nan, 3))


# Thompson


def posterior(update, rounds=((0, 2, 4), (0, 4, 4), (1, 0, 3), (1, 1, 3), (0, 0, 0))):
    state = bandits.thompson(TWO).init()
    for arm, num_accepted, draft_len in rounds:
        state = update(state, arm, num_accepted, draft_len)
    return np.asarray(state).tolist()


def test_thompson_counts_what_was_observed():
    """a += accepted, b += 1 after a rejection: not for a full accept, nor for the tokens behind the rejection."""
    wanted = [[7, 2], [2, 3]]
    assert posterior(bandits.thompson(TWO).update) == wanted

    def unobserved_counted(state, arm, num_accepted, draft_len):
        return state._replace(a=state.a.at[arm].add(num_accepted), b=state.b.at[arm].add(draft_len - num_accepted))

    def b_not_updated(state, arm, num_accepted, draft_len):
        return state._replace(a=state.a.at[arm].add(num_accepted))

    assert posterior(unobserved_counted) != wanted and posterior(b_not_updated) != wanted


def test_thompson_ranks_by_expected_tokens_per_cost():
    """With rates known to be .5 and 1.4 times the cost, 8 tokens (1.996 / 1.4) lose against 2 (1.75); K a + 1 says 5 / 1.4."""
    arms = Arms(draft_len=[8, 2], cost=[1.4, 1.0])
    bandit = bandits.thompson(arms, a=1e6, b=1e6)
    keys = jax.random.split(KEY, 100)
    assert np.all(jax.vmap(bandit.select, (None, 0))(bandit.init(), keys) == 1)
    eager = bandits.thompson(arms, a=1e6, b=1e4)  # rates of .99: 8.65 / 1.4 against 2.97
    assert np.all(jax.vmap(eager.select, (None, 0))(eager.init(), keys) == 0)


@pytest.mark.parametrize("route", ["plain", "vmap", "scan", "shard_map"])
def test_thompson_law_under_transforms(route):
    """CASES I-3: the larger of Beta(2, 1) and Beta(1, 2) is the first with probability 5/6. Same keys, same arms."""
    bandit = bandits.thompson(TWO)
    state = bandit.update(bandit.update(bandit.init(), 0, 1, 1), 1, 0, 1)
    keys = jax.random.split(KEY, 60_000)
    many = jax.jit(jax.vmap(bandit.select, (None, 0)))
    if route == "plain":  # one call for each key; the first 2,000 of them
        select = jax.jit(bandit.select)
        arms = np.array([select(state, key) for key in keys[:2000]])
        assert np.array_equal(arms, many(state, keys)[:2000])
        assert gates.frequency_within((arms == 0).sum(), arms.size, 5 / 6)
        return
    if route == "vmap":
        arms = many(state, keys)
    elif route == "scan":
        arms = jax.jit(lambda keys: jax.lax.scan(lambda s, key: (s, bandit.select(s, key)), state, keys)[1])(keys)
    else:
        mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
        specs = {"in_specs": (PartitionSpec(), PartitionSpec("data")), "out_specs": PartitionSpec("data")}
        arms = jax.jit(jax.shard_map(jax.vmap(bandit.select, (None, 0)), mesh=mesh, **specs))(state, keys)
    assert abs(np.mean(np.asarray(arms) == 0) - 5 / 6) < 0.006
    assert np.array_equal(arms, many(state, keys))


# Noise


def test_choices_have_noise_of_their_own():
    """The key of a choice is Threefry on the bandit's stream: no counter of fold_in, split or a draw of tokens."""
    words = np.asarray(jax.random.key_data(KEY))
    wanted = np.array(oracles.threefry2x32(*words, np.uint32(2**31 + 2**24 * oracles.BANDIT), 0))
    assert np.array_equal(jax.random.key_data(bandit_key(KEY)), wanted)
    assert np.array_equal(jax.random.key_data(bandit_key(jax.random.key_data(KEY))), wanted)  # raw


def test_epsilon_greedy_law():
    """The best arm with probability 1 - epsilon + epsilon / 3, each other with epsilon / 3."""
    bandit = bandits.epsilon_greedy(EQUAL, epsilon=0.3)
    state = Means(jnp.array([5.0, 5.0, 5.0]), jnp.array([0.2, 0.9, 0.4]))
    arms = jax.jit(jax.vmap(bandit.select, (None, 0)))(state, jax.random.split(KEY, 20_000))
    assert gates.chi_square(np.bincount(arms, minlength=3), [0.1, 0.8, 0.1]) > gates.ALPHA


# State and transforms


@each_bandit
def test_state_is_a_carry_that_can_be_saved(make, tmp_path):
    """One state through while_loop, jitted calls and a file: the same arms; shapes and dtypes never change."""
    bandit = make(MIXED)
    draft_len = jnp.asarray(MIXED.draft_len)
    traces = []

    @jax.jit
    def step(state, number):
        traces.append(None)
        arm = bandit.select(state, jax.random.fold_in(KEY, number))
        num_accepted = jnp.minimum(number % 4, draft_len[arm]).astype(jnp.int32)
        return bandit.update(state, arm, num_accepted, draft_len[arm]), arm

    state, arms = bandit.init(), []
    for number in range(20):
        if number == 10:  # saved and restored half way
            leaves, tree = jax.tree.flatten(state)
            np.savez(tmp_path / "state.npz", *leaves)
            with np.load(tmp_path / "state.npz") as saved:
                state = jax.tree.unflatten(tree, [jnp.asarray(saved[f"arr_{i}"]) for i in range(len(leaves))])
        state, arm = step(state, jnp.uint32(number))
        arms.append(int(arm))
        assert arm.dtype == jnp.int32 and arm.shape == ()
    assert len(traces) == 1  # init, update and a restored state have one type
    assert jax.tree.map(jnp.shape, state) == jax.tree.map(jnp.shape, bandit.init())

    def body(carry):
        number, state, arms = carry
        state, arm = step(state, number)
        return number + 1, state, arms.at[number].set(arm)

    start = jnp.uint32(0), bandit.init(), jnp.zeros(20, jnp.int32)
    looped = jax.jit(lambda c: jax.lax.while_loop(lambda c: c[0] < 20, body, c))(start)
    assert looped[2].tolist() == arms


@each_bandit
def test_many_requests_and_shards(make):
    """vmap and shard_map over requests play each of them as it plays alone; a carry inside shard_map is cast first."""
    bandit, rates = make(MIXED), jnp.tile(jnp.linspace(0.9, 0.3, 4), (30, 1))
    keys = jax.random.split(KEY, 8)

    def play(key):
        return bandits.simulate(bandit, MIXED, rates, key).arm

    def shard(keys):
        start = jax.lax.pcast(bandit.init(), "data", to="varying")
        _, arms = jax.lax.scan(lambda s, key: (bandit.update(s, a := bandit.select(s, key), 0, 2), a), start, keys)
        return jax.vmap(play)(keys), arms

    alone = np.stack([jax.jit(play)(key) for key in keys])
    assert np.array_equal(jax.jit(jax.vmap(play))(keys), alone)
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    spec = PartitionSpec("data")
    assert np.array_equal(jax.jit(jax.shard_map(shard, mesh=mesh, in_specs=spec, out_specs=spec))(keys)[0], alone)


@each_bandit
def test_odd_input_and_settings(make):
    """An arm that does not exist changes nothing; 64-bit types, forbidden rank promotion and NaN checks are no matter."""
    bandit = make(MIXED)
    state = bandit.update(bandit.init(), 1, 2, 3)
    for arm in (-1, 4):
        assert jax.tree.all(jax.tree.map(np.array_equal, state, bandit.update(state, arm, 2, 3)))
    with jax.enable_x64(True), jax.numpy_rank_promotion("raise"), jax.debug_nans(True):
        wide = make(MIXED)
        new = wide.update(wide.init(), jnp.int64(1), jnp.int64(2), jnp.int64(3))
        assert wide.select(new, KEY).dtype == jnp.int32
        assert jax.tree.all(jax.tree.map(lambda x, y: x.dtype == y.dtype and np.array_equal(x, y), state, new))


def test_parameters_may_be_traced():
    """One compiled function for all widths and costs."""
    state = Means(jnp.array([10.0, 5.0, 1.0]), jnp.array([0.5, 0.6, 0.2]))
    select = jax.jit(lambda c, cost: bandits.ucb1(Arms([1, 1, 1], cost), c=c).select(state, None))
    assert [int(select(c, jnp.ones(3))) for c in (0.0, 1.0)] == [1, 2]
    best = jax.jit(lambda cost: bandits.oracle(Arms([4, 4], cost), [0.5, 0.5]).select((), None))
    assert [int(best(jnp.array(cost))) for cost in ([1.0, 2.0], [2.0, 1.0])] == [0, 1]


# Errors

ERRORS = [
    (lambda: bandits.ucb1([1, 2]), TypeError, "arms must be gumbeljax.bandit.Arms; got list"),
    (lambda: bandits.ucb1(Arms([])), ValueError, "arms.draft_len must be [arms] with at least one arm; got shape [0]"),
    (lambda: bandits.ucb1(Arms(3)), ValueError, "arms.draft_len must be [arms] with at least one arm; got shape []"),
    (lambda: bandits.moss(Arms([1.5, 2])), TypeError, "arms.draft_len must be integers; got dtype float64"),
    (lambda: bandits.kl_ucb(Arms([1, -1])), ValueError, "arms.draft_len must be between 0 and 2**20; got -1"),
    (lambda: jax.jit(lambda k: bandits.ucb1(Arms(k)).init())(jnp.ones(2, int)), TypeError, "arms.draft_len must be known"),
    (lambda: bandits.thompson(Arms([1, 2], [1.0])), ValueError, "arms.cost must be real, one number or of the shape of"),
    (lambda: bandits.thompson(Arms([1, 2], [1, 0])), ValueError, "arms.cost must lie between 1e-30 and 1e30; got 0"),
    (lambda: bandits.thompson(Arms([1], np.nan)), ValueError, "arms.cost must lie between 1e-30 and 1e30; got nan"),
    (lambda: bandits.thompson(TWO, a=0.0), ValueError, "a must lie between 0.001 and 1e+06; got 0"),
    (lambda: bandits.ucb1(TWO, c=-1), ValueError, "c must lie between 0 and 1e+06; got -1"),
    (lambda: bandits.ucb1(TWO, c=[1, 2]), ValueError, "c must be a real scalar; got int32[2]"),
    (lambda: bandits.discounted_ucb(TWO, discount=1.5), ValueError, "discount must lie between 1e-06 and 1; got 1.5"),
    (lambda: bandits.epsilon_greedy(TWO, epsilon=2), ValueError, "epsilon must lie between 0 and 1; got 2"),
    (lambda: bandits.sliding_window_ucb(TWO, window=0), ValueError, "window must be between 1 and 2**24; got 0"),
    (lambda: bandits.sliding_window_ucb(TWO, window=1.5), TypeError, "window must be a Python int"),
    (lambda: bandits.sliding_window_ucb(TWO, window=9, over="x"), ValueError, "over must be one of 'arm', 'rounds'; got 'x'"),
    (lambda: bandits.fixed(TWO, 2), ValueError, "arm must be in [0, 2); got 2"),
    (lambda: bandits.fixed(TWO, 0.5), TypeError, "arm must be an integer scalar; got float32[]"),
    (lambda: bandits.oracle(TWO, [0.5]), ValueError, "rates must be real, one for each arm, [2]; got float32[1]"),
    (lambda: bandits.oracle(TWO, [0.5, 1.5]), ValueError, "rates must lie in [0, 1]; got 1.5"),
    (lambda: bandits.thompson(TWO).select(bandits.thompson(TWO).init(), 3), TypeError, "key must be a JAX random key"),
    (
        lambda: bandits.thompson(TWO).select(bandits.thompson(TWO).init(), jax.random.split(KEY)),
        ValueError,
        "key must be one key; got keys of shape [2]",
    ),
    (
        lambda: bandits.simulate(bandits.ucb1(TWO), TWO, jnp.ones(2), KEY),
        ValueError,
        "rates must be real, [rounds, 2], one for each round and arm; got float32[2]",
    ),
]


@pytest.mark.parametrize("call, error, message", ERRORS, ids=[message for _, _, message in ERRORS])
def test_errors(call, error, message):
    with pytest.raises(error, match=re.escape(message)) as caught:
        call()
    assert str(caught.value).endswith(".") and "\n" not in str(caught.value) and ": " in str(caught.value)
