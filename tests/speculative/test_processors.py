"""Filters, penalties and token lists on both sides, at every position."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gumbeljax
from gumbeljax import Processors, count_tokens
from gumbeljax.speculative import Law, position_counts, position_keys, stored, verify, verify_chains, verify_coupled
from tests.heads import exact_head
from tests.statistics import ALPHA, chi_square, frequency_within

VOCAB = 40
FILTERS = [{"top_k": 6}, {"top_p": 0.7}, {"min_p": 0.2}, {"top_k": 20, "top_p": 0.9, "min_p": 0.02, "temperature": 1.5}]


def keys_of(seed, rows, positions):
    return position_keys(jax.random.split(jax.random.key(seed), rows), 0, positions)


def law_of(logits, **options):
    """float64 law of one row of logits under options."""
    w = jnp.asarray(logits)[:, None]
    law = np.exp(np.asarray(gumbeljax.processed_log_probs(jnp.ones(1), w, **options), np.float64))
    return law / law.sum()


@pytest.fixture
def small_chunks(monkeypatch):
    """So few logits at a time that a batch takes several chunks, the last one not full."""
    monkeypatch.setattr(stored, "LOGITS", 30_000 * 3 * VOCAB)


@pytest.mark.parametrize("options", [
    *(pytest.param(x, marks=pytest.mark.slow) for x in FILTERS[:-1]), FILTERS[-1]])  # fmt: skip
def test_law_under_filters(options, small_chunks):
    """Different filters on the two sides: the law, the support, and the acceptance sum min(p, q)."""
    n, draft_options = 100_000, {"top_p": 0.8, "temperature": 1.2}
    p_logits, q_logits = jax.random.normal(jax.random.key(0), (2, VOCAB)) * 1.5
    q_logits = 0.5 * q_logits + 0.5 * p_logits
    p, q = law_of(p_logits, **options), law_of(q_logits, **draft_options)
    keys = keys_of(1, n, 2)
    spread = lambda x, k: jnp.broadcast_to(x, (n, k, VOCAB))  # noqa: E731
    drafted = gumbeljax.sample_logits(spread(q_logits, 1), keys[:, :1], **draft_options)
    out = verify(Law(spread(p_logits, 2), **options), Law(spread(q_logits, 1), **draft_options), drafted, keys)
    assert chi_square(np.bincount(out.tokens[:, 0], minlength=VOCAB), p) > ALPHA
    assert frequency_within(out.num_accepted.sum(), n, np.minimum(p, q).sum())
    bonus = np.asarray(out.tokens[:, 1])
    assert chi_square(np.bincount(bonus[bonus >= 0], minlength=VOCAB), p) > ALPHA
    np.testing.assert_allclose(np.exp(out.log_probs[:, 0]), p[np.asarray(out.tokens[:, 0])], rtol=2e-4)


def test_hidden_states_under_filters_row_by_row():
    """Rows with filters of their own, in one batch and one by one; a side without filters beside one with them."""
    rows, draft_len = 5, 3
    h, w = exact_head(VOCAB, 16, rows * (draft_len + 1))
    h = h.reshape(rows, draft_len + 1, 16)
    draft_h = h[:, :-1] + exact_head(VOCAB, 16, rows * draft_len, seed=3)[0].reshape(rows, draft_len, 16) / 2
    own = {"top_k": jnp.array([0, 3, 10, 40, 2]), "top_p": jnp.array([1.0, 0.9, 0.5, 0.8, 1.0]),
           "temperature": jnp.array([1, 0, 0.5, 1, 2.0])}
    keys = keys_of(2, rows, draft_len + 1)
    drafted = gumbeljax.sample(draft_h, w, keys[:, :-1])
    whole = verify(Law(h, w, **own), Law(draft_h, w), drafted, keys)
    assert 0 < int(whole.num_accepted.sum()) < rows * draft_len
    for i in range(rows):
        options = {name: x[i] for name, x in own.items()}
        alone = verify(Law(h[i], w, **options), Law(draft_h[i], w), drafted[i], keys[i])
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y[i], rtol=1e-5, atol=1e-5), alone, whole)  # noqa: B023
    # A filter that keeps everything changes nothing but the route.
    for one_hot in (True, False):
        q = None if one_hot else Law(draft_h, w)
        plain, stored_ = (verify(Law(h, w, top_k=k), q, drafted, keys) for k in (None, 0))
        np.testing.assert_array_equal(plain.tokens, stored_.tokens)


def test_coupled_under_filters_is_sample(small_chunks):
    h, w = exact_head(VOCAB, 16, 7 * 4)
    h, keys = h.reshape(7, 4, 16), keys_of(3, 7, 4)
    for options in FILTERS[1::2]:
        want = gumbeljax.sample_with_log_probs(h, w, keys, **options)
        out = verify_coupled(Law(h, w, **options), want.token[:, :-1], keys)
        np.testing.assert_array_equal(out.tokens, want.token)
        np.testing.assert_allclose(out.log_probs, want.processed_log_prob, atol=1e-6)
    monkey = verify_coupled(Law(h, w, top_k=1), gumbeljax.greedy(h, w)[:, :-1], keys)
    assert (monkey.num_accepted == 3).all()


def test_chains_under_filters():
    n, options = 50_000, {"top_k": 5}
    p_logits, q_logits = jax.random.normal(jax.random.key(4), (2, VOCAB))
    p, q = law_of(p_logits, **options), law_of(q_logits, top_k=20)
    drafted = np.random.default_rng(0).choice(VOCAB, (n, 2, 1), p=q)
    out = verify_chains(Law(jnp.broadcast_to(p_logits, (n, 2, 2, VOCAB)), **options),
                        Law(jnp.broadcast_to(q_logits, (n, 2, 1, VOCAB)), top_k=20), drafted, jax.random.key(5))
    assert chi_square(np.bincount(out.tokens[:, 0], minlength=VOCAB), p) > ALPHA


@pytest.mark.parametrize("filters", [pytest.param({}, marks=pytest.mark.slow), {"top_p": 0.9}])
def test_penalties_count_the_drafted_tokens(filters):
    """Three tokens one by one under penalties, and the same law from drafts: the joint law of two tokens."""
    n, vocab = 100_000, 5
    logits = jnp.array([1.0, 0.5, 0.0, -0.5, 0.2])
    prompt = count_tokens(jnp.array([1]), vocab)
    numbers = {"repetition_penalty": 1.7, "presence_penalty": 0.4, "frequency_penalty": 0.6}
    first = law_of(logits, processors=Processors(counts=prompt, **numbers), **filters)
    second = np.stack([law_of(logits, processors=Processors(counts=prompt.add(jnp.int32(v)), **numbers), **filters)
                       for v in range(vocab)])
    counts = jax.tree.map(lambda x: jnp.broadcast_to(x, (n, vocab)), prompt)
    drafted = jax.random.categorical(jax.random.key(6), jnp.zeros((n, 2, vocab)))
    processors = Processors(counts=position_counts(counts, drafted), **numbers)
    out = verify(Law(jnp.broadcast_to(logits, (n, 3, vocab)), processors=processors, **filters), Law(jnp.zeros((n, 2, vocab))),
                 drafted, keys_of(7, n, 3))
    tokens = np.asarray(out.tokens)
    assert chi_square(np.bincount(tokens[:, 0], minlength=vocab), first) > ALPHA
    for v in np.flatnonzero(first):
        after = tokens[(tokens[:, 0] == v) & (tokens[:, 1] >= 0), 1]
        assert chi_square(np.bincount(after, minlength=vocab), second[v]) > ALPHA


def test_token_lists_and_requests_of_their_own():
    """Numbers and lists `[*batch]`, repeated for the positions, are those of `sample`."""
    h, w = exact_head(VOCAB, 16, 6 * 3)
    h, keys = h.reshape(6, 3, 16), keys_of(8, 6, 3)
    allowed = jnp.array([[1, 2, 3], [4, 5, -1], [6, -1, -1], [7, 8, 9], [1, 11, 21], [0, 39, 20]])
    bias = jnp.linspace(-2, 2, 6)[:, None] * jnp.ones((1, 2))
    tokens = jnp.broadcast_to(jnp.array([2, 8]), (6, 2))
    processors = Processors(allowed_tokens=allowed, bias_tokens=tokens, bias_values=bias)
    each = lambda x: jnp.broadcast_to(x[:, None], (6, 3, *x.shape[1:]))  # noqa: E731
    want = gumbeljax.sample(h, w, keys, processors=jax.tree.map(each, processors))
    out = verify_coupled(Law(h, w, processors=processors), want[:, :2], keys)
    np.testing.assert_array_equal(out.tokens, want)
    one_hot = verify(Law(h, w, processors=processors), None, want[:, :2], keys)
    inside = np.asarray([[t in row or t == -1 for t in tokens] for row, tokens in zip(allowed, one_hot.tokens, strict=True)])
    assert inside.all()
