"""Coupled verification: the tokens of plain decoding, and how often a draft meets them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gumbeljax
from gumbeljax.speculative import Law, acceptance, coupled_acceptance, position_keys, verify_coupled
from tests.speculative import coupling, markov
from tests.statistics import frequency_within

PAIRS = list(coupling.pairs(100, 64))


def plain_decoding(target, key, n, length):
    """Every token by `sample_logits` with the key of its position."""
    requests = jax.random.split(key, n)
    last, out = jnp.zeros(n, jnp.int32), []
    draw = jax.jit(lambda last, t: gumbeljax.sample_logits(target[last], position_keys(requests, t, 1)[:, 0]))
    for t in range(length):
        last = draw(last, t)
        out.append(last)
    return np.stack(out, 1)


@pytest.mark.parametrize("route", [pytest.param("logits", marks=pytest.mark.slow), "hidden"])
def test_tokens_are_those_of_plain_decoding(route):
    """Whatever drafts: every token of every request, over several blocks of several lengths."""
    target, draft = map(jnp.asarray, markov.tables(40))
    key = jax.random.key(7)
    want = None
    for table, draft_len, blocks in ((draft, 2, 4), (draft[::-1], 5, 2)) if route == "logits" else ((draft, 3, 3),):
        got, accepted = markov.speculate(target, table, key, n=500, draft_len=draft_len, route=route, coupled=True,
                                         blocks=blocks)
        inner = jax.random.split(key, 1)[0]  # `speculate` works in chunks
        want = plain_decoding(target, inner, 500, got.shape[1]) if want is None else want
        np.testing.assert_array_equal(got, want[:, : got.shape[1]])
        assert accepted.sum() > 0


def test_noise_one_position_off_is_seen():
    """The draft still draws with its own keys, but the target's keys are shifted by one: tokens change."""
    logits = jax.random.normal(jax.random.key(0), (200, 4, 40))
    requests = jax.random.split(jax.random.key(1), 200)
    keys, off = position_keys(requests, 5, 4), position_keys(requests, 6, 4)
    drafted = gumbeljax.sample_logits(logits, keys)[:, :-1]
    right, wrong = (verify_coupled(Law(logits), drafted, k) for k in (keys, off))
    want = gumbeljax.sample_logits(logits, keys)
    np.testing.assert_array_equal(right.tokens, want)
    assert (right.num_accepted == 3).all()
    first = np.asarray(wrong.tokens[:, 0] == want[:, 0]).mean()
    assert first < 0.5 and float(wrong.num_accepted.mean()) < 1


def test_ragged_drafts_greedy_rows_and_log_probs():
    h, w = jax.random.normal(jax.random.key(0), (4, 3, 16)), jax.random.normal(jax.random.key(1), (40, 16))
    temperature = jnp.array([0.0, 1.0, 0.5, 1.0])
    spread = jnp.broadcast_to(temperature[:, None], (4, 3))
    want = gumbeljax.sample_with_log_probs(h, w, jax.random.key(2), temperature=spread)
    drafted = want.token[:, :2].at[3, 1].add(1)
    out = verify_coupled(Law(h, w, temperature=temperature), drafted, jax.random.key(2), draft_lens=jnp.array([2, 1, 0, 2]))
    np.testing.assert_array_equal(out.num_accepted, [2, 1, 0, 1])
    is_out = np.arange(3) <= np.asarray(out.num_accepted)[:, None]
    np.testing.assert_array_equal(out.tokens, np.where(is_out, want.token, -1))
    np.testing.assert_allclose(np.asarray(out.log_probs)[is_out], np.asarray(want.tempered_log_prob)[is_out], rtol=1e-6)
    assert (np.asarray(out.log_probs)[~is_out] == 0).all()


def test_rows_without_a_law_and_no_rows():
    out = verify_coupled(Law(jnp.full((2, 3, 5), -jnp.inf)), jnp.full((2, 2), -1), jax.random.key(0))
    assert (out.tokens == -1).all() and not out.num_accepted.any() and jnp.isnan(out.log_probs[:, 0]).all()
    assert verify_coupled(Law(jnp.zeros((0, 3, 5))), jnp.zeros((0, 2), jnp.int32), jax.random.key(0)).tokens.shape == (0, 3)


def test_acceptance_equals_the_enumerated_one():
    """100 pairs of laws over four groups, 40,000 draws each."""
    n = 40_000

    @jax.jit
    def agreements(log_p, log_q, key):
        keys = position_keys(jax.random.split(key, n), 0, 2)
        drafted = gumbeljax.sample_logits(jnp.broadcast_to(log_q, (n, 64)), keys[:, 0])[:, None]
        return verify_coupled(Law(jnp.broadcast_to(log_p, (n, 2, 64))), drafted, keys).num_accepted.sum()

    counts, exact = [], []
    for i, (p, q) in enumerate(PAIRS):
        log_p, log_q = (jnp.asarray(np.log(x), jnp.float32) for x in (p, q))
        counts.append(int(agreements(log_p, log_q, jax.random.key(i))))
        exact.append(coupling.two_levels(p, q))
    assert frequency_within(counts, n, exact, 4.0)
    assert not frequency_within(counts, n, [coupling.one_level(p, q) for p, q in PAIRS], 4.0)


def test_enumeration():
    """Ours against float64, and what docs/speculative.md says of the two levels."""
    p, q = (np.array(x) for x in zip(*PAIRS, strict=True))
    with np.errstate(divide="ignore"):
        ours = coupled_acceptance(np.log(p), np.log(q))
    two, one, bound = (np.array([f(*pair) for pair in PAIRS])
                       for f in (coupling.two_levels, coupling.one_level, coupling.bound))
    np.testing.assert_allclose(ours, two, atol=2e-6)
    assert np.all(one >= bound - 1e-12) and np.any(two < bound) and np.any(two > one)
    assert (two - one).min() > -0.10 and abs((two - one).mean() + 0.037) < 0.001
    np.testing.assert_allclose(acceptance(np.log(p), np.log(q)), np.minimum(p, q).sum(-1), atol=2e-6)
    np.testing.assert_allclose(coupled_acceptance(np.log(p), np.log(p)), 1, atol=2e-6)


def test_enumeration_of_laws_with_zeros():
    p, q = np.array([0.5, 0.0, 0.5, 0.0]), np.array([0.0, 0.5, 0.5, 0.0])
    with np.errstate(divide="ignore"):
        assert abs(float(coupled_acceptance(np.log(p), np.log(q))) - coupling.two_levels(p, q)) < 1e-6
        assert float(coupled_acceptance(np.log([1.0, 0]), np.log([0, 1.0]))) == 0
