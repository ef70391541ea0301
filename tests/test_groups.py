"""Merging parts of a vocabulary: algebra bit for bit, laws by chi-square, and careless merges that must fail."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gumbeljax
from gumbeljax.groups import Candidate, Summary, merge, merge_log_mass, merge_online, summarize
from tests import heads, oracles, statistics

ROWS = 256
EMPTY = Summary(jnp.full(ROWS, -jnp.inf), jnp.full(ROWS, -1), jnp.full(ROWS, -jnp.inf))


@functools.cache
def parts(cuts=(0, 16, 64, 80, 144)):
    """Logits `[rows, 144]` with an empty part, and the summaries of the parts."""
    rng = np.random.default_rng(0)
    logits = rng.integers(-8, 9, (ROWS, cuts[-1])).astype(np.float32) / 4
    logits[:, 64:80] = -np.inf
    keys, words = heads.keys_of(0, ROWS)
    found = [jax.jit(summarize)(logits[:, a:b], keys, first_id=a) for a, b in itertools.pairwise(cuts)]
    return logits, keys, words, found


def test_parts_merge_to_the_token_of_the_whole():
    logits, keys, words, found = parts()
    whole = functools.reduce(merge, found)
    np.testing.assert_array_equal(whole.token, gumbeljax.sample_logits(logits, keys))
    np.testing.assert_array_equal(whole.token, oracles.grouped_draw(logits, words, 1.0).tokens)
    np.testing.assert_allclose(whole.log_mass, jax.nn.logsumexp(logits, axis=1), rtol=1e-6)
    assert statistics.gumbel_ks(whole.score - whole.log_mass) > statistics.ALPHA


def test_merge_is_associative_and_commutative_bit_for_bit():
    *_, found = parts()
    want = functools.reduce(merge, found)
    for order in itertools.permutations(range(4)):
        a, b, c, d = (found[i] for i in order)
        for got in (merge(merge(a, b), merge(c, d)), merge(a, merge(b, merge(c, d))), merge(merge(merge(a, b), c), d)):
            np.testing.assert_array_equal(got.token, want.token)
            np.testing.assert_array_equal(got.score, want.score)
            np.testing.assert_allclose(got.log_mass, want.log_mass, rtol=1e-6)
    got = jax.lax.associative_scan(merge, jax.tree.map(lambda *x: jnp.stack(x), *found))
    np.testing.assert_array_equal(got.token[-1], want.token)


def test_empty_parts_and_ties_and_nan():
    *_, found = parts()
    for got in (merge(EMPTY, found[0]), merge(found[0], EMPTY)):
        for a, b in zip(got, found[0], strict=True):
            np.testing.assert_array_equal(a, b)
    both = merge(EMPTY, EMPTY)
    assert (both.token == -1).all() and np.isneginf(both.score).all() and np.isneginf(both.log_mass).all()
    assert (found[2].token == -1).all() and np.isneginf(found[2].score).all()  # it is masked
    tied = Summary(jnp.zeros(2), jnp.array([5, 9]), jnp.zeros(2)), Summary(jnp.zeros(2), jnp.array([7, 3]), jnp.zeros(2))
    assert merge(*tied).token.tolist() == merge(*tied[::-1]).token.tolist() == [5, 3]
    bad = summarize(jnp.array([[0.0, jnp.nan], [jnp.inf, 0.0]]), jax.random.key(0))
    good = summarize(jnp.zeros((2, 2)), jax.random.key(0), first_id=16)
    for got in (bad, merge(bad, good), merge(good, bad), merge(good, merge(bad, good))):
        assert got.token.tolist() == [-1, -1] and np.isnan(got.log_mass).all() and np.isnan(got.score).all()


@pytest.mark.parametrize("call, sentence", [
    (lambda: summarize(jnp.zeros(()), jax.random.key(0)), r"^logits must be \[\*batch, n\]"),
    (lambda: merge_log_mass(Candidate(jnp.zeros(3, jnp.int32), jnp.zeros(2)), jax.random.key(0)), r"^candidates must have"),
])
def test_bad_arguments(call, sentence):
    with pytest.raises(ValueError, match=sentence):
        call()
    with pytest.raises(TypeError, match=r"^first_id must be one integer"):
        summarize(jnp.zeros(4), jax.random.key(0), first_id=0.5)


# In distribution: parts give a token and a log mass only

CUTS = (0, 3, 8, 9, 24)
LOGITS = np.cos(np.arange(24.0)) * 2
LAW = np.exp(oracles.log_softmax(LOGITS[None], 1.0)[0])
N = 100_000


@functools.cache
def candidates():
    """N independent candidates of each part, `[4, N]`."""
    out = []
    for i, (a, b) in enumerate(itertools.pairwise(CUTS)):
        keys = jax.random.split(jax.random.key(100 + i), N)
        token = a + gumbeljax.sample_logits(jnp.broadcast_to(jnp.asarray(LOGITS[a:b], jnp.float32), (N, b - a)), keys)
        out.append(Candidate(token, jnp.full(N, jax.nn.logsumexp(LOGITS[a:b]), jnp.float32)))
    return jax.tree.map(lambda *x: jnp.stack(x), *out)


def holds(tokens) -> bool:
    return statistics.chi_square(np.bincount(np.asarray(tokens), minlength=24), LAW) > statistics.ALPHA


def online(merge_fn=merge_online, order=range(4)):
    held = Candidate(jnp.full(N, -1), jnp.full(N, -jnp.inf))
    for step, i in enumerate(order):
        keys = jax.random.split(jax.random.key(step), N)
        held = merge_fn(held, jax.tree.map(lambda x, i=i: x[i], candidates()), keys)
    return held


def test_many_candidates_have_the_law_of_the_whole():
    out = jax.jit(merge_log_mass)(candidates(), jax.random.split(jax.random.key(9), N))
    assert holds(out.token)
    np.testing.assert_allclose(out.log_mass, jax.nn.logsumexp(LOGITS), rtol=1e-6)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 1, 0, 2)])
def test_the_online_form_has_the_law_of_the_whole_in_any_order(order):
    held = online(order=order)
    assert holds(held.token)
    np.testing.assert_allclose(held.log_mass, jax.nn.logsumexp(LOGITS), rtol=1e-6)


def test_one_key_for_a_batch_and_steps_and_levels_are_independent():
    """Two parts of one mass: the coins of two keys, of neighbouring rows and of the two forms of merging are independent."""
    n = 20_000
    old, new = Candidate(jnp.zeros(n, jnp.int32), jnp.zeros(n)), Candidate(jnp.ones(n, jnp.int32), jnp.zeros(n))
    online = [np.asarray(merge_online(old, new, jax.random.key(i)).token) for i in (1, 2)]
    many = np.asarray(merge_log_mass(jax.tree.map(lambda *x: jnp.stack(x), old, new), jax.random.key(1)).token)
    for x, y in [online, (online[0], many), (online[0][:-1], online[0][1:])]:
        table = np.zeros((2, 2))
        np.add.at(table, (x, y), 1)
        assert statistics.chi_square(table, np.full(4, 0.25)) > statistics.ALPHA


def test_parts_without_mass():
    nothing = Candidate(jnp.full((3, 5), 7), jnp.full((3, 5), -jnp.inf))
    out = merge_log_mass(nothing, jax.random.key(0))
    assert (out.token == -1).all() and np.isneginf(out.log_mass).all()
    none = Candidate(jnp.int32(-1), jnp.float32(-jnp.inf))
    for old, new, token in [(none, none, -1), (none, Candidate(4, 0.0), 4), (Candidate(4, 0.0), none, 4)]:
        for step in range(20):
            assert merge_online(old, new, jax.random.key(step)).token == token
    bad = merge_online(Candidate(4, jnp.nan), Candidate(5, 0.0), jax.random.key(0))
    assert bad.token == -1 and np.isnan(bad.log_mass)
    bad = merge_log_mass(Candidate(jnp.array([1, 2]), jnp.array([0.0, jnp.nan])), jax.random.key(0))
    assert bad.token == -1 and np.isnan(bad.log_mass)


def test_a_mass_that_a_coin_would_lose():
    """A part of 2^-26 of the whole, ten million times: 0.15 draws expected of each row below; a coin of resolution 2^-24
    would give it none or far too many. Here 4,000,000 draws at 1.5e-6 must give about 6."""
    n, p = 4_000_000, 1.5e-6
    old, new = Candidate(jnp.zeros(n, jnp.int32), jnp.zeros(n)), Candidate(jnp.ones(n, jnp.int32), jnp.full(n, np.log(p)))
    count = int(jax.jit(merge_online)(old, new, jax.random.key(5)).token.sum())
    assert statistics.frequency_within(count, n, p / (1 + p)) and count > 0


# Careless merges


def test_mutations_fail():
    """The last part always wins; parts are equally likely; one coin for all steps; masses that do not add."""
    def last(old, new, key):
        return new

    def equal(old, new, key):
        held = jnp.where(old.token < 0, -jnp.inf, 0.0)
        return merge_online(old._replace(log_mass=held), new._replace(log_mass=jnp.zeros(N)), key)

    def same_coin(old, new, key):
        return merge_online(old, new, jax.random.split(jax.random.key(0), N))

    def forgetful(old, new, key):
        return merge_online(old, new, key)._replace(log_mass=new.log_mass)

    for wrong in (last, equal, same_coin, forgetful):
        assert not holds(online(wrong).token), wrong.__name__


def test_mutation_summaries_with_one_noise_fail():
    """Parts that all start at id 0 share their noise: no longer the token of the whole."""
    logits, keys, _, found = parts()
    wrong = [jax.jit(summarize)(logits[:, a:b], keys) for a, b in [(0, 16), (16, 64), (64, 80), (80, 144)]]
    whole = functools.reduce(merge, [s._replace(token=f.token) for s, f in zip(wrong, found, strict=True)])
    assert (whole.token != functools.reduce(merge, found).token).mean() > 0.1
