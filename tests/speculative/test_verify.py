"""Verification on inputs that break verifiers: zeros, equal laws, ragged drafts, options, layouts, memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gumbeljax
from gumbeljax.speculative import Law, position_keys, verify
from tests.heads import exact_head
from tests.statistics import ALPHA, chi_square, frequency_within

P, Q = np.array([0.6, 0.3, 0.1]), np.array([0.2, 0.3, 0.5])


def keys_of(seed, rows, positions):
    return position_keys(jax.random.split(jax.random.key(seed), rows), 0, positions)


def repeated(law, rows, positions):
    with np.errstate(divide="ignore"):
        return jnp.broadcast_to(jnp.asarray(np.log(law), jnp.float32), (rows, positions, len(law)))


def two_heads(rows, draft_len, vocab, dtype=jnp.float32):
    """(h, w, draft_h, draft_w) with exact logits, laws that are alike, d_models that are not."""
    h, w = exact_head(vocab, 16, rows * (draft_len + 1), dtype)
    other_h, other_w = exact_head(vocab, 16, rows * draft_len, dtype, seed=1)
    h = h.reshape(rows, draft_len + 1, 16)
    draft_h = jnp.concatenate([h[:, :-1], other_h.reshape(rows, draft_len, 16)], -1)
    return h, w, draft_h, jnp.concatenate([w, other_w / 2], -1)


def test_one_hot_draft():
    """CASES G-2: a draft by argmax is one-hot; with its soft law passed instead, the law is wrong in a known way."""
    n, p, soft = 400_000, np.array([0.5, 0.3, 0.2]), np.array([0.6, 0.3, 0.1])
    drafted, keys, target = jnp.zeros((n, 1), jnp.int32), keys_of(0, n, 2), Law(repeated(p, n, 2))
    for draft in (None, Law(repeated([1.0, 0, 0], n, 1)), Law(repeated(soft, n, 1), temperature=0.0)):
        out = verify(target, draft, drafted, keys)
        assert chi_square(np.bincount(out.tokens[:, 0], minlength=3), p) > ALPHA
        assert frequency_within((out.num_accepted == 1).sum(), n, 0.5)
    wrong = verify(target, Law(repeated(soft, n, 1)), drafted, keys).tokens[:, 0]
    assert chi_square(np.bincount(wrong, minlength=3), [0.5 / 0.6, 0, 1 - 0.5 / 0.6]) > ALPHA


@pytest.mark.parametrize("route", ["logits", "hidden"])
def test_token_of_probability_zero_is_never_accepted(route):
    """CASES G-4: 2^21 rows, a draft that always proposes a forbidden token."""
    n, p = 2**21 if route == "logits" else 2**17, np.array([0.0, 0.5, 0.5])
    logits = repeated(p, n, 2)
    for q in ([1.0, 0, 0], [0.8, 0.15, 0.05]):
        draft = None if q[0] == 1 else Law(repeated(q, n, 1))
        if route == "logits":
            target = Law(logits)
        else:
            target = Law(jnp.zeros((n, 2, 16)), jnp.zeros((3, 16)), mask=jnp.array([False, True, True]))
        out = verify(target, draft, jnp.zeros((n, 1), jnp.int32), keys_of(1, n, 2))
        assert int(out.num_accepted.max()) == 0
        counts = np.bincount(out.tokens[:, 0], minlength=3)
        residual = np.maximum(p - q, 0)
        assert counts[0] == 0 and chi_square(counts, residual / residual.sum()) > ALPHA


def test_equal_laws():
    """CASES G-5: everything is accepted, nothing is NaN."""
    rows, draft_len, vocab = 50, 4, 50_000
    logits = jax.random.normal(jax.random.key(0), (vocab,))
    p = jnp.broadcast_to(logits, (rows, draft_len + 1, vocab))
    keys = keys_of(2, rows, draft_len + 1)
    drafted = gumbeljax.sample_logits(p[:, :-1], keys[:, :-1])
    noisy = logits + 1e-6 * jax.random.normal(jax.random.key(1), (vocab,))
    laws = {"equal": logits, "noise": noisy, "bfloat16": logits.astype(jnp.bfloat16)}
    for name, q in laws.items():
        out = verify(Law(p), Law(jnp.broadcast_to(q, (rows, draft_len, vocab))), drafted, keys)
        assert ((out.tokens >= 0) & (out.tokens < vocab)).sum(1).tolist() == (out.num_accepted + 1).tolist()
        assert not jnp.isnan(out.log_probs[:, 0]).any()
        if name != "bfloat16":
            assert (out.num_accepted == draft_len).all()
            np.testing.assert_array_equal(out.tokens[:, :-1], drafted)


def test_equal_one_hot_laws_and_a_rejection_that_leaves_nothing():
    p = repeated([0, 1.0, 0], 4, 3)
    out = verify(Law(p), Law(p[:, :2]), jnp.ones((4, 2), jnp.int32), jax.random.key(0))
    assert out.tokens.tolist() == [[1, 1, 1]] * 4 and out.log_probs.tolist() == [[0.0] * 3] * 4
    # p(2) = 0 = q(2): such a draft cannot be; it is refused, and max(p - q, 0) is empty: the token comes from p.
    out = verify(Law(p), Law(p[:, :2]), jnp.full((4, 2), 2), jax.random.key(0))
    assert out.tokens.tolist() == [[1, -1, -1]] * 4


def test_replacement_comes_from_the_residual():
    """CASES G-6: the law is p, the acceptance sum min(p, q), and rejected rows follow max(p - q, 0): token 0 alone."""
    n = 400_000
    drafted = jnp.asarray(np.random.default_rng(0).choice(3, (n, 1), p=Q))
    out = verify(Law(repeated(P, n, 2)), Law(repeated(Q, n, 1)), drafted, keys_of(3, n, 2))
    first, rejected = np.asarray(out.tokens[:, 0]), np.asarray(out.num_accepted == 0)
    assert chi_square(np.bincount(first, minlength=3), P) > ALPHA
    assert frequency_within(n - rejected.sum(), n, 0.6)
    assert set(first[rejected]) == {0}


def test_acceptance_and_joint_law_over_three_positions():
    """CASES G-10: laws that differ from position to position."""
    rng, n, vocab = np.random.default_rng(4), 200_000, 6
    p, q = rng.dirichlet(np.ones(vocab), 4), rng.dirichlet(np.ones(vocab), 3)
    drafted = np.stack([rng.choice(vocab, n, p=law) for law in q], 1)
    out = verify(Law(jnp.broadcast_to(jnp.log(p), (n, 4, vocab)).astype(jnp.float32)),
                 Law(jnp.broadcast_to(jnp.log(q), (n, 3, vocab)).astype(jnp.float32)), drafted, keys_of(5, n, 4))
    overlap = np.minimum(p[:3], q).sum(1)
    assert frequency_within([(out.num_accepted > i).sum() for i in range(3)], n, np.cumprod(overlap))
    tokens = np.asarray(out.tokens)
    two = tokens[tokens[:, 1] >= 0]  # a second token exists where the first was accepted: its law is p_2 whatever came
    accepted_first = np.minimum(p[0], q[0]) / overlap[0]
    counts = np.bincount(two[:, 0] * vocab + two[:, 1], minlength=vocab**2)
    assert chi_square(counts, np.outer(accepted_first, p[1]).ravel()) > ALPHA


def test_greedy_rows_equal_argmax_decoding():
    rows, draft_len, vocab = 512, 3, 33
    h, w = exact_head(vocab, 16, rows * (draft_len + 1))
    h = h.reshape(rows, draft_len + 1, 16)
    best = gumbeljax.greedy(h, w)
    noise = jax.random.bernoulli(jax.random.key(0), 0.3, (rows, draft_len))
    drafted = jnp.where(noise, (best[:, :-1] + 1) % vocab, best[:, :-1])
    agree = np.cumprod(np.asarray(drafted == best[:, :-1]), 1).sum(1)
    draft_h = jax.random.normal(jax.random.key(1), (rows, draft_len, 16))
    for draft in (None, Law(draft_h, w)):
        out = verify(Law(h, w, temperature=0.0), draft, drafted, jax.random.key(2))
        np.testing.assert_array_equal(out.num_accepted, agree)
        is_out = np.arange(draft_len + 1) <= agree[:, None]
        np.testing.assert_array_equal(out.tokens, np.where(is_out, best, -1))
        assert np.all(np.asarray(out.log_probs)[is_out] == 0)


def test_each_row_has_its_own_parameters_and_neighbours_do_not_matter():
    rows, draft_len, vocab = 6, 3, 40
    h, w, draft_h, draft_w = two_heads(rows, draft_len, vocab)
    keys = keys_of(6, rows, draft_len + 1)
    temperature = jnp.array([0.0, 0.5, 1.0, 1.0, 2.0, 0.1])
    lens = jnp.array([3, 2, 0, 3, 1, 3])
    mask = jax.random.bernoulli(jax.random.key(3), 0.7, (rows, vocab))
    bias = jax.random.normal(jax.random.key(4), (rows, vocab))
    options = {"temperature": temperature, "mask": mask, "logit_bias": bias}
    q = Law(draft_h, draft_w, **options)
    drafted = gumbeljax.sample(draft_h, draft_w, keys[:, :-1], temperature=temperature[:, None] * jnp.ones((1, draft_len)),
                               mask=jnp.repeat(mask[:, None], draft_len, 1), logit_bias=jnp.repeat(bias[:, None], draft_len, 1))
    whole = verify(Law(h, w, **options), q, drafted, keys, draft_lens=lens)
    assert np.all(whole.num_accepted <= lens) and 0 < int(whole.num_accepted.sum()) < int(lens.sum())
    for i in range(rows):
        own = {name: x[i] for name, x in options.items()}
        alone = verify(Law(h[i], w, **own), Law(draft_h[i], draft_w, **own), drafted[i], keys[i], draft_lens=lens[i])
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y[i], rtol=1e-5, atol=1e-5), alone, whole)  # noqa: B023
    # What was drafted past its length is not read.
    junk = jnp.where(jnp.arange(draft_len) < lens[:, None], drafted, 10**6)
    jax.tree.map(np.testing.assert_array_equal, verify(Law(h, w, **options), q, junk, keys), whole)
    mapped = jax.jit(jax.vmap(lambda h, dh, d, k, n: verify(Law(h, w), Law(dh, draft_w), d, k, draft_lens=n)))
    plain = verify(Law(h, w), Law(draft_h, draft_w), drafted, keys, draft_lens=lens)
    close = lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)  # noqa: E731
    jax.tree.map(close, mapped(h, draft_h, drafted, keys, lens), plain)


def test_every_option_on_both_sides_is_that_of_sample():
    """The law that `sample` draws with these options, from drafts drawn by `sample` with options of their own."""
    n, vocab, draft_len = 100_000, 19, 2
    h, w = exact_head(vocab + 3, 16, 1)
    draft_h, draft_w = exact_head(vocab, 16, 1, seed=1)
    bias = jnp.linspace(-1, 1, vocab + 3)
    target = {"temperature": 0.7, "valid_vocab": vocab, "logit_bias": bias, "mask": jnp.arange(vocab + 3) % 5 != 0,
              "scale": 0.8, "soft_cap": 3.0}
    draft = {"temperature": 1.4, "soft_cap": 2.0, "mask": jnp.arange(vocab) != 6}
    keys = keys_of(7, n, draft_len + 1)
    every = lambda x, p: jnp.broadcast_to(x[0], (n, p, x.shape[-1]))  # noqa: E731
    drafted = gumbeljax.sample(every(draft_h, draft_len), draft_w, keys[:, :-1], **draft)
    out = verify(Law(every(h, draft_len + 1), w, **target), Law(every(draft_h, draft_len), draft_w, **draft), drafted, keys)
    every_token = jnp.arange(vocab)
    log_p = gumbeljax.log_prob(jnp.broadcast_to(h[0], (vocab, 16)), w, every_token, **target)
    law = np.exp(np.asarray(log_p, np.float64))
    for j in range(draft_len + 1):
        tokens = np.asarray(out.tokens[:, j])
        tokens = tokens[np.asarray(out.num_accepted) >= j]  # independent of the positions before: the law does not change
        assert chi_square(np.bincount(tokens, minlength=vocab), law / law.sum()) > ALPHA
    is_out = np.asarray(out.tokens) >= 0
    np.testing.assert_allclose(np.asarray(out.log_probs)[is_out], np.asarray(log_p)[np.asarray(out.tokens)[is_out]], atol=2e-6)


@pytest.mark.parametrize("dtype", [pytest.param(jnp.float32, marks=pytest.mark.slow), jnp.bfloat16])
def test_layouts_do_not_matter(dtype):
    rows, draft_len, vocab = 64, 3, 50
    h, w, draft_h, draft_w = two_heads(rows, draft_len, vocab, dtype)
    drafted = gumbeljax.sample(draft_h, draft_w, jax.random.key(0))
    want = verify(Law(h, w), Law(draft_h, draft_w), drafted, jax.random.key(0))
    assert 0 < int(want.num_accepted.sum()) < rows * draft_len
    strided = jnp.stack([h, h], 2)[:, :, 0], np.asfortranarray(np.asarray(draft_h)), np.asarray(drafted, np.int64)[::-1][::-1]
    for got in (
        verify(Law(h, w.T, vocab_axis=1), Law(draft_h, draft_w.T, vocab_axis=1), drafted, jax.random.key(0)),
        verify(Law(strided[0], w), Law(strided[1], draft_w), strided[2], jax.random.key(0)),
        verify(Law(h, jnp.pad(w, ((0, 9), (0, 0))), valid_vocab=vocab), Law(draft_h, draft_w), drafted, jax.random.key(0)),
    ):
        np.testing.assert_array_equal(got.tokens, want.tokens)
        np.testing.assert_allclose(got.log_probs, want.log_probs, atol=1e-5)


def test_rows_without_a_law():
    logits = jnp.zeros((5, 3, 4)).at[0, 0].set(jnp.nan).at[1, 1].set(-jnp.inf).at[2, 2, 1].set(jnp.inf)
    q = jnp.zeros((5, 2, 4)).at[3, 1].set(-jnp.inf)
    drafted = jnp.array([[1, 2], [1, 2], [1, 2], [1, -1], [1, 2]])
    out = verify(Law(logits), Law(q), drafted, jax.random.key(0))
    np.testing.assert_array_equal(out.num_accepted, [0, 1, 2, 1, 2])
    np.testing.assert_array_equal(out.tokens[:3], [[-1, -1, -1], [1, -1, -1], [1, 2, -1]])
    last = np.arange(3) == np.asarray(out.num_accepted)[:, None]
    np.testing.assert_array_equal(np.isnan(out.log_probs), last & (np.asarray(out.tokens) == -1))
    assert out.tokens[3, 1] >= 0 and out.tokens[4, 2] >= 0  # where the draft has no law, the target draws


def test_no_drafts_and_no_rows():
    logits = jax.random.normal(jax.random.key(0), (3, 1, 20))
    out = verify(Law(logits), Law(logits[:, :0]), jnp.zeros((3, 0), jnp.int32), jax.random.key(0))
    assert out.tokens.shape == (3, 1) and (out.tokens >= 0).all() and not out.num_accepted.any()
    out = verify(Law(jnp.zeros((0, 3, 4))), None, jnp.zeros((0, 2), jnp.int32), jax.random.key(0))
    assert out.tokens.shape == (0, 3) and out.num_accepted.shape == (0,)


def largest(jaxpr):
    """The most elements of any value in a jaxpr, inner ones included."""
    most = 0
    for eqn in jaxpr.eqns:
        most = max([most, *(v.aval.size for v in eqn.outvars if hasattr(v.aval, "size"))])
        for sub in jax.tree.leaves(eqn.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
            inner = getattr(sub, "jaxpr", sub)
            if hasattr(inner, "eqns"):
                most = max(most, largest(inner))
    return most


def test_hidden_states_never_become_all_the_logits():
    """No value of the traced program, and no buffer of the compiled one, comes near rows x draft_len x vocab."""
    rows, draft_len, vocab, d_model = 32, 8, 65_536, 16

    def hidden(h, w, draft_h, draft_w, drafted, key):
        return verify(Law(h, w), Law(draft_h, draft_w), drafted, key)

    shape = lambda *s: jax.ShapeDtypeStruct(s, jnp.float32)  # noqa: E731
    arguments = (shape(rows, draft_len + 1, d_model), shape(vocab, d_model), shape(rows, draft_len, d_model),
                 shape(vocab, d_model), jax.ShapeDtypeStruct((rows, draft_len), jnp.int32),
                 jax.eval_shape(lambda: jax.random.key(0)))
    everything = rows * draft_len * vocab
    scores = rows * (draft_len + 1) * vocab // 16  # one a group
    assert largest(jax.make_jaxpr(hidden)(*arguments).jaxpr) <= scores
    memory = jax.jit(hidden).lower(*arguments).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 4 * everything // 8

    logits = (shape(rows, draft_len + 1, vocab), shape(rows, draft_len, vocab))
    given = jax.make_jaxpr(lambda p, q, *rest: verify(Law(p * 2), Law(q * 2), *rest))(*logits, *arguments[4:])
    assert largest(given.jaxpr) >= everything  # the measure can see such a tensor


P2 = jnp.zeros((2, 3, 5))


@pytest.mark.parametrize("arguments, error, words", [
    ((P2, None, jnp.zeros((2, 2), jnp.int32)), TypeError, "target must be a Law"),
    ((Law(P2), None, jnp.zeros((2, 3), jnp.int32)), ValueError, "one position more"),
    ((Law(P2), None, jnp.zeros((2, 2))), TypeError, "tokens must be integers"),
    ((Law(P2), Law(P2), jnp.zeros((2, 2), jnp.int32)), ValueError, "draft must have the positions"),
    ((Law(P2), Law(jnp.zeros((2, 2, 6))), jnp.zeros((2, 2), jnp.int32)), ValueError, "valid_vocab"),
    ((Law(P2, scale=2.0), None, jnp.zeros((2, 2), jnp.int32)), ValueError, "no scale"),
    ((Law(jnp.zeros(5)), None, jnp.zeros((2, 2), jnp.int32)), ValueError, "positions"),
    ((Law(P2, temperature=-1.0), None, jnp.zeros((2, 2), jnp.int32)), ValueError, "temperature"),
])  # fmt: skip
def test_errors(arguments, error, words):
    with pytest.raises(error, match=words):
        verify(*arguments, jax.random.key(0))
    good = (Law(P2), None, jnp.zeros((2, 2), jnp.int32))
    with pytest.raises(ValueError, match="key must be"):
        verify(*good, jax.random.split(jax.random.key(0), 2))
    with pytest.raises(ValueError, match="draft_lens must be"):
        verify(*good, jax.random.key(0), draft_lens=jnp.ones(3, jnp.int32))


def test_keys_of_positions_are_those_of_decode_loops():
    requests = jax.random.split(jax.random.key(0), 2)
    got = position_keys(requests, jnp.array([5, 9]), 3)
    for i, start in enumerate((5, 9)):
        for j in range(3):
            assert (got[i, j] == jax.random.fold_in(requests[i], start + j)).all()
    np.testing.assert_array_equal(jax.random.key_data(position_keys(jax.random.key_data(requests), 5, 3))[0],
                                  jax.random.key_data(got)[0])
