"""The law of the output, by enumeration, and gates that see every known mistake."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gumbeljax
from gumbeljax._keys import row_keys
from gumbeljax.speculative import Law, leviathan, position_keys, verify
from gumbeljax.speculative.law import prepare_law
from pallas_kernels import noise
from tests.speculative import markov, mutants
from tests.statistics import ALPHA, chi_square, frequency_within, ks_gate, tuple_counts

N = 1_000_000
GRID = [(vocab, draft_len, route) for vocab in (3, 17, 40) for draft_len in (1, 2, 3, 4) for route in ("logits", "hidden")]
QUICK = [(3, 2, "logits"), (17, 1, "hidden")]


@functools.cache
def run(vocab, draft_len, route, n):
    target, draft = markov.tables(vocab)
    key = jax.random.key(vocab + draft_len)
    return tuple(map(np.asarray, markov.speculate(target, draft, key, n=n, draft_len=draft_len, route=route)))


def expected_accepted(p, q, first, draft_len):
    """P(at least i accepted) in a first block, i = 1 .. draft_len: a walk of the mass min(p, q)."""
    both = np.minimum(p, q)
    now, out = both[first], []
    for _ in range(draft_len):
        out.append(now.sum())
        now = now @ both
    return np.array(out)


def passes(tokens, accepted, log_target, log_draft, draft_len):
    """All gates at once: pairs of neighbouring tokens, the first draft_len + 1 tokens' marginals, the acceptance."""
    if tokens.min() < 0:
        return False
    try:
        law_holds = min(markov.pair_p_values(tokens, log_target)) > ALPHA
    except AssertionError:  # a token of probability zero
        return False
    p, q = mutants.softmax(log_target), mutants.softmax(log_draft)
    counts = [(accepted[0] > i).sum() for i in range(draft_len)]
    return law_holds and frequency_within(counts, tokens.shape[0], expected_accepted(p, q, 0, draft_len))


@pytest.mark.parametrize("vocab, draft_len, route", [
    pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow) for case in GRID])  # fmt: skip
def test_two_blocks_follow_the_target(vocab, draft_len, route):
    """Every pair of neighbouring tokens at 10^6 draws, and CASES G-10: how many are accepted."""
    target, draft = markov.tables(vocab)
    assert passes(*run(vocab, draft_len, route, N), target, draft, draft_len)


def test_joint_law_of_all_tokens():
    """V = 3, two blocks of two drafted tokens: all 3^4 prefixes of four tokens."""
    tokens, p = run(3, 2, "logits", N)[0], mutants.softmax(markov.tables(3)[0])
    law = {(a, b, c, d): p[0, a] * p[a, b] * p[b, c] * p[c, d] for a, b, c, d in np.ndindex(3, 3, 3, 3)}
    assert chi_square(*tuple_counts(tokens[:, :4], law)) > ALPHA


def test_temperatures_of_both_sides():
    target, draft = markov.tables(17, seed=2)
    tokens, _ = markov.speculate(target, draft, jax.random.key(1), n=200_000, draft_len=2, route="logits",
                                 temperature=0.7, draft_temperature=1.3)
    assert min(markov.pair_p_values(tokens, np.log(mutants.softmax(target, 0.7) + 1e-300))) > ALPHA


@pytest.mark.slow
def test_routes_draw_the_same_tokens():
    """Exact logits by a product with one-hot vectors: both routes must agree on every token."""
    one, two = (run(40, 3, route, 20_000)[0] for route in ("logits", "hidden"))
    assert (one == two).mean() > 0.9999


def test_kolmogorov_smirnov_gate():
    """10,000 samples at 1%, on the token after a rejection or bonus, for a law over 40 tokens."""
    target, draft = markov.tables(40)
    tokens = run(40, 3, "logits", 20_000)[0]
    p = mutants.softmax(target)
    law = p[0]
    for t in range(4):
        assert ks_gate(tokens[:, t], law)
        law = law @ p
    assert not ks_gate(tokens[:, 0], mutants.softmax(draft)[0])


def test_the_draft_with_the_same_keys_changes_nothing():
    """`markov.speculate` draws drafts with the very keys it verifies with; other keys give the same law, other tokens."""
    target, draft = markov.tables(17)
    n, law = 200_000, mutants.softmax(target)[0]
    keys = jax.random.split(jax.random.key(4), n)
    others = jax.random.split(jax.random.key(5), n)
    first = jnp.zeros(n, jnp.int32)
    seen = []
    for draft_keys in (keys, others):
        drafted = gumbeljax.sample_logits(draft[first], draft_keys)[:, None]
        p, q = Law(target[jnp.stack([first, drafted[:, 0]], 1)]), Law(draft[first][:, None])
        out = verify(p, q, drafted, jnp.stack([keys, others], 1))
        seen.append(np.asarray(out.tokens[:, 0]))
        assert chi_square(np.bincount(seen[-1], minlength=17), law) > ALPHA
        assert frequency_within(out.num_accepted.sum(), n, np.minimum(law, mutants.softmax(draft)[0]).sum())
    assert (seen[0] != seen[1]).any()


@pytest.mark.parametrize("mistake", [None, *mutants.MISTAKES])
def test_gates_see_every_mistake(mistake):
    """The plain NumPy twin passes the gates of the tests above, and fails with any one mistake in it."""
    target, draft = markov.tables(5, seed=3)
    temperature = 0.6
    tokens, accepted = mutants.speculate(target, draft, 200_000, 3, np.random.default_rng(0), temperature, mistake)
    with np.errstate(divide="ignore"):
        laws = [np.log(mutants.softmax(x, temperature)) for x in (target, draft)]
    assert passes(tokens, accepted, *laws, 3) == (mistake is None)


SHARED = {
    None: {},
    "residual with the noise of the drafts": {"FROM_TARGET": 0},
    "coins with the noise of the drafts": {"COIN": noise.DRAW},
}


@pytest.mark.parametrize("shared", SHARED)
def test_gates_see_noise_that_is_shared(shared, monkeypatch):
    """The real code, with two of its streams made one: the law of 400,000 tokens over three groups is wrong."""
    for name, value in SHARED[shared].items():
        monkeypatch.setattr(noise if name == "COIN" else leviathan, name, value)
    n, vocab = 400_000, 40
    rng = np.random.default_rng(0)
    p = rng.dirichlet(np.full(vocab, 0.5))
    q = 0.9 * rng.dirichlet(np.full(vocab, 1.0)) + 0.1 * p
    log_p, log_q = (jnp.asarray(np.log(x), jnp.float32) for x in (p, q))
    unjitted = leviathan.verify_drafts.__wrapped__  # traced here, so that it sees the constants of this test

    @jax.jit
    def run(key):
        keys = position_keys(jax.random.split(key, n), 0, 2)
        drafted = gumbeljax.sample_logits(jnp.broadcast_to(log_q, (n, vocab)), keys[:, 0])
        sides = [prepare_law(Law(jnp.broadcast_to(x, (n, k, vocab))), "law") for x, k in ((log_p, 2), (log_q, 1))]
        words = tuple(x.reshape(n, 2) for x in row_keys(keys, (n, 2)))
        return unjitted(sides[0][0], sides[1][0], drafted[:, None, None], jnp.ones((n, 1), jnp.int32), words,
                        target_config=sides[0][1], draft_config=sides[1][1]).tokens[:, 0]

    p_value = chi_square(np.bincount(run(jax.random.key(0)), minlength=vocab), p)
    assert (p_value > ALPHA) == (shared is None)
