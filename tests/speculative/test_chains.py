"""Several chains from one prefix: lossless, and more is accepted."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gumbeljax.speculative import Law, acceptance, chains_acceptance, position_keys, verify, verify_chains
from tests.speculative import markov, mutants
from tests.statistics import ALPHA, chi_square, frequency_within

CHUNK = 20_000


def all_rejected(p, q, num_chains):
    """P(N candidates drawn from q are rejected one after the other), by the definition: subtract, renormalise, go on."""
    total = 1.0
    for _ in range(num_chains):
        left = np.maximum(p - q, 0)
        total *= left.sum()
        p = left / left.sum() if left.sum() > 0 else p
    return total


@functools.partial(jax.jit, static_argnames=("n", "num_chains", "draft_len", "route"))
def speculate(target, draft, key, *, n, num_chains, draft_len, route):
    """(tokens `[n, draft_len + 2]`, num_accepted `[n]`): a block of several chains, then plain decoding."""
    def of_chunk(key):
        requests = jax.random.split(key, CHUNK)
        last = jnp.zeros(CHUNK, jnp.int32)
        keys = position_keys(requests, 0, draft_len + 1)
        own = jax.vmap(lambda k: jax.vmap(lambda i: jax.random.fold_in(k, i))(jnp.arange(num_chains)))(requests)
        chain_keys = position_keys(own, 0, draft_len).reshape(CHUNK * num_chains, draft_len)
        drafted = markov.draft_tokens(draft, jnp.repeat(last, num_chains), chain_keys, draft_len)
        drafted = drafted.reshape(CHUNK, num_chains, draft_len)
        before = jnp.concatenate([jnp.zeros((CHUNK, num_chains, 1), jnp.int32), drafted], -1)
        out = verify_chains(markov.law_at(target, before, route), markov.law_at(draft, before[..., :-1], route), drafted, keys)
        kept = jnp.take_along_axis(drafted, out.chain[:, None, None], 1)[:, 0]
        is_accepted = jnp.arange(draft_len) < out.num_accepted[:, None]
        chain_is_right = jnp.all(jnp.where(is_accepted, kept == out.tokens[:, :-1], True))
        tokens, length = markov.put(jnp.zeros((CHUNK, draft_len + 2), jnp.int32), last, out.tokens, out.num_accepted)

        def plain(_, carry):
            tokens, length = carry
            now = tokens[jnp.arange(CHUNK), length - 1]
            token = jax.random.categorical(jax.random.fold_in(key, length[0]), target[now])
            return markov.put(tokens, length, token[:, None], jnp.zeros_like(length))

        tokens, _ = jax.lax.fori_loop(0, draft_len + 1, plain, (tokens, length))
        return tokens, out.num_accepted, chain_is_right

    tokens, accepted, right = jax.lax.map(of_chunk, jax.random.split(key, n // CHUNK))
    return tokens.reshape(n, -1), accepted.reshape(n), jnp.all(right)


@pytest.mark.parametrize("vocab, num_chains, draft_len, route, n", [
    (3, 2, 2, "logits", 200_000),
    pytest.param(17, 4, 2, "hidden", 1_000_000, marks=pytest.mark.slow),
    pytest.param(3, 4, 3, "logits", 1_000_000, marks=pytest.mark.slow),
    pytest.param(40, 2, 3, "logits", 1_000_000, marks=pytest.mark.slow),
])  # fmt: skip
def test_law_and_acceptance(vocab, num_chains, draft_len, route, n):
    target, draft = markov.tables(vocab)
    tokens, accepted, right = speculate(target, draft, jax.random.key(0), n=n, num_chains=num_chains, draft_len=draft_len,
                                        route=route)
    assert right and min(markov.pair_p_values(tokens, target)) > ALPHA
    p, q = mutants.softmax(target)[0], mutants.softmax(draft)[0]
    rejected = [all_rejected(p, q, k) for k in (num_chains, 1)]
    assert frequency_within((np.asarray(accepted) == 0).sum(), n, rejected[0], 4.0)
    assert rejected[0] < rejected[1] - 0.01


@pytest.mark.parametrize("num_chains", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_first_token_over_many_groups(num_chains):
    """Laws over 40 tokens, one position: the law, and the enumerated acceptance."""
    rng, n = np.random.default_rng(num_chains), 100_000
    p, q = rng.dirichlet(np.full(40, 0.3)), rng.dirichlet(np.full(40, 0.7))
    log_p, log_q = (jnp.asarray(np.log(x), jnp.float32) for x in (p, q))
    drafted = rng.choice(40, (n, num_chains, 1), p=q)
    laws = (Law(jnp.broadcast_to(x, (n, num_chains, k, 40))) for x, k in ((log_p, 2), (log_q, 1)))
    out = verify_chains(*laws, drafted, jax.random.key(0))
    assert chi_square(np.bincount(out.tokens[:, 0], minlength=40), p) > ALPHA
    expected = 1 - all_rejected(p, q, num_chains)
    assert frequency_within(out.num_accepted.sum(), n, expected, 4.0)
    np.testing.assert_allclose(chains_acceptance(log_p, log_q, num_chains), expected, atol=1e-5)
    assert expected > float(acceptance(log_p, log_q)) + 0.05


def test_gate_sees_chains_that_are_not_independent():
    """The same chain twice is one chain: what counts as a second try must be a second draw."""
    rng, n = np.random.default_rng(0), 100_000
    p, q = rng.dirichlet(np.full(10, 0.3)), rng.dirichlet(np.full(10, 0.7))
    laws = (jnp.broadcast_to(jnp.asarray(np.log(x), jnp.float32), (n, 2, k, 10)) for x, k in ((p, 2), (q, 1)))
    drafted = np.repeat(rng.choice(10, (n, 1, 1), p=q), 2, axis=1)
    out = verify_chains(*map(Law, laws), drafted, jax.random.key(0))
    assert chi_square(np.bincount(out.tokens[:, 0], minlength=10), p) < ALPHA


def test_one_chain_is_verify():
    logits = jax.random.normal(jax.random.key(0), (200, 4, 40))
    q = logits[:, :3] + jax.random.normal(jax.random.key(1), (200, 3, 40))
    drafted = jax.random.categorical(jax.random.key(2), q)
    lens = jnp.arange(200) % 4
    one = verify(Law(logits), Law(q), drafted, jax.random.key(3), draft_lens=lens)
    chains = verify_chains(Law(logits[:, None]), Law(q[:, None]), drafted[:, None], jax.random.key(3), draft_lens=lens[:, None])
    jax.tree.map(np.testing.assert_array_equal, tuple(one), tuple(chains)[:3])
    assert not chains.chain.any()


def test_ragged_chains():
    """A chain of length 0 is not tried: with one chain left the law and the acceptance are those of one chain."""
    rng, n = np.random.default_rng(1), 100_000
    p, q = rng.dirichlet(np.full(5, 0.5)), rng.dirichlet(np.full(5, 0.5))
    laws = [jnp.broadcast_to(jnp.asarray(np.log(x), jnp.float32), (n, 2, k, 5)) for x, k in ((p, 2), (q, 1))]
    drafted = rng.choice(5, (n, 2, 1), p=q)
    for lens, rejected in (([0, 1], all_rejected(p, q, 1)), ([0, 0], 1.0)):
        out = verify_chains(*map(Law, laws), drafted, jax.random.key(0), draft_lens=jnp.broadcast_to(jnp.array(lens), (n, 2)))
        assert chi_square(np.bincount(out.tokens[:, 0], minlength=5), p) > ALPHA
        assert frequency_within((out.num_accepted == 0).sum(), n, rejected)


def test_greedy_target():
    p = jnp.broadcast_to(jnp.array([0.0, 3.0, 1.0, 2.0]), (2, 3, 3, 4))
    drafted = jnp.array([[[0, 1], [1, 1], [1, 2]], [[2, 1], [0, 1], [3, 2]]])
    out = verify_chains(Law(p, temperature=0.0), Law(jnp.zeros((2, 3, 2, 4))), drafted, jax.random.key(0))
    np.testing.assert_array_equal(out.tokens, [[1, 1, 1], [1, -1, -1]])
    np.testing.assert_array_equal(out.chain[0], 1)


def test_errors():
    with pytest.raises(TypeError, match="draft must be the Law"):
        verify_chains(Law(jnp.zeros((2, 3, 4))), None, jnp.zeros((2, 2), jnp.int32), jax.random.key(0))
    with pytest.raises(ValueError, match="chains"):
        verify_chains(Law(jnp.zeros((3, 4))), Law(jnp.zeros((2, 4))), jnp.zeros(2, jnp.int32), jax.random.key(0))
    with pytest.raises(ValueError, match="key must be"):
        verify_chains(Law(jnp.zeros((2, 3, 4))), Law(jnp.zeros((2, 2, 4))), jnp.zeros((2, 2), jnp.int32),
                      position_keys(jax.random.split(jax.random.key(0), 2), 0, 3))
