"""Area L: input that has no answer, or not the one that was meant."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gumbeljax
from tests import heads
from tests.cases import routes

NAN, INF = float("nan"), float("inf")
METHODS = pytest.mark.parametrize("method", ["grouped", "categorical"])


def every_draw(h, w, key, *, method="grouped", **options):
    """Tokens `[rows, n]` of several ways to draw, and log-probs `[rows, m]` of those and of given tokens."""
    one = gumbeljax.sample_with_log_probs(h, w, key, method=method, **options)
    distinct = gumbeljax.sample_with_log_probs(h, w, key, method=method, num_samples=2, replace=False, **options)
    options.pop("temperature", None)
    tokens = [one.token[:, None], distinct.token, gumbeljax.greedy(h, w, **options)[:, None]]
    parts = [x[:, None] if x.ndim == 1 else x for out in (one, distinct) for x in (out.tempered_log_prob, out.log_normalizer)]
    parts.append(gumbeljax.log_prob(h, w, jnp.ones(h.shape[0], jnp.int32), **options)[:, None])
    return np.concatenate(tokens, axis=1), np.concatenate(parts, axis=1)


def assert_marked(tokens, log_probs, marked):
    """Rows of `marked` have no law, and say so everywhere; the others have one, and say nothing odd."""
    marked = np.asarray(marked)
    assert (tokens[marked] == -1).all() and np.isnan(log_probs[marked]).all()
    assert (tokens[~marked] >= 0).all() and np.isfinite(log_probs[~marked]).all()


# L-1: ids out of range


@pytest.mark.parametrize("token", [100, 99_999, -1, 2**31, 2**40, 1.0, "7", True, None])
def test_a_bias_for_a_token_that_does_not_exist(token):
    h, w = heads.pinned_head(np.zeros(100), rows=2)
    for call in (
        lambda: gumbeljax.sample(h, w, jax.random.key(0), logit_bias={3: 1.0, token: 5.0}),
        lambda: jax.jit(lambda b: gumbeljax.sample(h, w, jax.random.key(0), logit_bias={3: b, token: b}))(2.0),
        lambda: gumbeljax.log_prob(h, w, jnp.zeros(2, jnp.int32), logit_bias={token: 5.0}),
        lambda: gumbeljax.greedy(h, w, logit_bias={token: 5.0}),
        lambda: gumbeljax.sample_logits(jnp.zeros((2, 100)), jax.random.key(0), logit_bias={token: 5.0}),
    ):
        with pytest.raises(ValueError, match=rf"^logit_bias must name token ids from 0 to 99; got {token!r}"):
            call()


def test_a_bias_for_a_padding_id_is_refused():
    h, w = heads.pinned_head(np.zeros(100))
    with pytest.raises(ValueError, match=r"logit_bias must name token ids from 0 to 89; got 90"):
        gumbeljax.sample(h, w, jax.random.key(0), logit_bias={90: 5.0}, valid_vocab=90)


def test_a_dict_of_biases_is_the_dense_bias():
    h, w = heads.exact_head(100, 16, 8)
    keys, bias = routes.keys_of(0, 8), {7: 5.0, np.int64(99): -INF, 0: jnp.float32(2.5)}
    dense = jnp.zeros(100).at[7].set(5.0).at[99].set(-INF).at[0].set(2.5)
    want = gumbeljax.sample(h, w, keys, logit_bias=dense)
    np.testing.assert_array_equal(gumbeljax.sample(h, w, keys, logit_bias=bias), want)
    traced = jax.jit(lambda b: gumbeljax.sample(h, w, keys, logit_bias={7: 2 * b, 99: -INF, 0: b}))(2.5)
    np.testing.assert_array_equal(traced, want)
    np.testing.assert_array_equal(gumbeljax.sample(h, w, keys, logit_bias={}), gumbeljax.sample(h, w, keys))


def test_the_score_of_a_token_that_does_not_exist():
    h, w = heads.pinned_head(np.zeros(100), rows=6)
    tokens = jnp.array([-1, 100, 2**31 - 1, -(2**31), 99, 0])
    got = gumbeljax.log_prob(h, w, tokens)
    assert np.isnan(got[:4]).all() and np.isfinite(got[4:]).all()
    np.testing.assert_array_equal(jax.jit(lambda t: gumbeljax.log_prob(h, w, t))(tokens), got)
    assert np.isnan(gumbeljax.log_prob(h, w, jnp.full(6, 90), valid_vocab=90)).all()
    unsigned = gumbeljax.log_prob(h, w, np.full(6, 2**32 - 1, np.uint32))
    assert np.isnan(unsigned).all()


def test_the_score_of_a_token_beyond_32_bits():
    h, w = heads.pinned_head(np.zeros(100), rows=2)
    assert np.isnan(gumbeljax.log_prob(h, w, np.full(2, 2**32 + 5))).all()


# L-4: nothing is allowed


def nothing_allowed(way):
    """Options under which row 1 of 3 has no token."""
    mask, bias = np.ones((3, 83), bool), np.zeros((3, 83), np.float32)
    mask[1], bias[1] = False, -INF
    half = np.arange(83) < 40
    return {
        "mask": {"mask": mask},
        "both": {"mask": np.where(mask, half | (np.arange(3) != 1)[:, None], ~half), "logit_bias": np.where(~half, bias, 0)},
    }[way]


@METHODS
@pytest.mark.parametrize("way", ["mask", "both"])
def test_a_row_with_nothing_allowed_is_marked(way, method):
    h, w = heads.exact_head(83, 16, 3)
    options = nothing_allowed(way)
    for temperature in (1.0, 0.0):
        if temperature == 0.0:
            options = options | {"temperature": np.zeros(3)}
            tokens = np.asarray(gumbeljax.sample(h, w, jax.random.key(0), method=method, **options))
            assert tokens[1] == -1 and (tokens[[0, 2]] >= 0).all()
        else:
            assert_marked(*every_draw(h, w, jax.random.key(0), method=method, **options), [False, True, False])


@routes.routes(*routes.ALL)
def test_a_row_with_nothing_allowed_is_marked_on_every_route(route):
    logits = np.zeros((9, 83), np.float32)
    logits[1], keys = -INF, routes.keys_of(0, 9)
    mask = np.ones((9, 83), bool)
    mask[2] = False
    marked = np.isin(np.arange(9), [1, 2])
    for t in (jnp.ones(9), jnp.zeros(9)):
        token, log_prob = route(logits, keys, t, mask=mask)
        np.testing.assert_array_equal(np.asarray(token) == -1, marked)
        assert (np.asarray(token)[~marked] >= 0).all()
        if log_prob is not None:
            np.testing.assert_array_equal(np.isnan(log_prob), marked)


def test_a_mask_without_tokens_and_a_padded_head():
    """All real ids forbidden, the padding ids allowed: the padding is not drawn."""
    h, w = heads.pinned_head(np.zeros(64), rows=2)
    mask = np.arange(64) >= 50
    tokens = gumbeljax.sample(h, w, jax.random.key(0), mask=mask, valid_vocab=50)
    assert tokens.tolist() == [-1, -1]


# L-5: a NaN or a +inf


POSITIONS = [0, 15, 16, 41, 63, 64, 80, 82]


@routes.routes(*routes.ALL)
@pytest.mark.parametrize("bad", [NAN, INF])
def test_one_bad_logit_marks_its_row(route, bad):
    """At first, middle, last, group-edge and tile-edge ids; row 0 is sound."""
    rows = 1 + len(POSITIONS)
    logits = np.random.default_rng(0).normal(size=(rows, 83)).astype(np.float32)
    logits[np.arange(1, rows), POSITIONS] = bad
    for t in (jnp.ones(rows), jnp.zeros(rows), jnp.full(rows, 1e-3)):
        token, log_prob = route(logits, routes.keys_of(1, rows), t, mask=np.ones(logits.shape, bool))
        assert int(token[0]) >= 0 and (np.asarray(token)[1:] == -1).all()
        if log_prob is not None:
            assert np.isfinite(log_prob[0]) and np.isnan(log_prob[1:]).all()


@METHODS
@pytest.mark.parametrize("kind", ["nan", "inf", "two infs", "inf and -inf", "nan and inf", "nan in a bias", "inf bias"])
def test_bad_logits_mark_their_row_in_the_whole_interface(kind, method):
    logits = np.zeros((3, 83), np.float32)
    bias = np.zeros((3, 83), np.float32)
    places = {
        "nan": {40: NAN},
        "inf": {82: INF},
        "two infs": {0: INF, 64: INF},
        "inf and -inf": {3: INF, 4: -INF},
        "nan and inf": {16: NAN, 70: INF},
        "nan in a bias": {},
        "inf bias": {},
    }[kind]
    for place, value in places.items():
        logits[1, place] = value
    bias[1, 33] = {"nan in a bias": NAN, "inf bias": INF}.get(kind, 0.0)
    h, w, bias = routes.biased_head(logits, bias)
    assert_marked(*every_draw(h, w, jax.random.key(0), logit_bias=bias, method=method), [False, True, False])


def test_bad_numbers_in_h_and_w():
    """NaN or inf in a row of h marks that row; in a row of w, every row that reads it; masked, it is not read."""
    h, w = heads.exact_head(2100, 16, 4)
    bad_h = h.at[1, 3].set(NAN).at[2, 15].set(INF)
    assert_marked(*every_draw(bad_h, w, jax.random.key(0)), [False, True, True, False])
    for place in (0, 2047, 2048, 2099):
        bad_w = w.at[place, 7].set(NAN)
        for temperature in (0.0, 1.0):
            tokens = gumbeljax.sample(h, bad_w, jax.random.key(0), temperature=temperature)
            assert (tokens == -1).all(), place
        allowed = jnp.arange(2100) != place
        tokens = gumbeljax.sample(h, bad_w, jax.random.key(0), mask=allowed)
        np.testing.assert_array_equal(tokens, gumbeljax.sample(h, w, jax.random.key(0), mask=allowed))


def test_padding_rows_of_w_are_never_read():
    h, w = heads.exact_head(100, 16, 6)
    keys = routes.keys_of(0, 6)
    padded = jnp.concatenate([w, jnp.full((37, 16), NAN)])
    for axis, options in enumerate([{}, {"num_samples": 3, "replace": False}]):
        want = gumbeljax.sample_with_log_probs(h, w, keys, **options)
        table = padded.T if axis == 1 else padded
        got = gumbeljax.sample_with_log_probs(h, table, keys, valid_vocab=100, vocab_axis=axis, **options)
        np.testing.assert_array_equal(got.token, want.token)
        np.testing.assert_allclose(got[1:], want[1:], rtol=1e-5, atol=1e-5)
    score = gumbeljax.log_prob(h, padded, jnp.arange(6), valid_vocab=100)
    np.testing.assert_allclose(score, gumbeljax.log_prob(h, w, jnp.arange(6)), atol=1e-5)
    assert (gumbeljax.greedy(h, padded, valid_vocab=100) == gumbeljax.greedy(h, w)).all()


@METHODS
def test_traced_bad_temperatures_mark_their_row(method):
    h, w = heads.exact_head(83, 16, 6)
    t = jnp.array([1.0, -1.0, NAN, INF, -INF, 0.0])
    marked = [False, True, True, True, True, False]

    @jax.jit
    def draw(t):
        one = gumbeljax.sample_with_log_probs(h, w, jax.random.key(0), temperature=t, method=method)
        several = gumbeljax.sample(h, w, jax.random.key(0), temperature=t, num_samples=2, method=method)
        distinct = gumbeljax.sample(h, w, jax.random.key(0), temperature=t, num_samples=2, replace=False, method=method)
        return one, several, distinct, gumbeljax.log_prob(h, w, jnp.maximum(one.token, 0), temperature=t)

    one, several, distinct, score = draw(t)
    for tokens in (one.token[:, None], several, distinct):
        np.testing.assert_array_equal((tokens == -1).all(1), marked)
        np.testing.assert_array_equal((tokens == -1).any(1), marked)
    for value in (one.model_log_prob, one.tempered_log_prob, one.log_normalizer, score):
        np.testing.assert_array_equal(np.isnan(value), marked)
    got = jax.vmap(lambda h, t: gumbeljax.sample(h, w, jax.random.key(0), temperature=t, method=method))(h, t)
    np.testing.assert_array_equal(got == -1, marked)
    greedy_row = gumbeljax.sample(h[5], w, jax.random.key(0), temperature=0.0, method=method)
    assert int(one.token[5]) == int(greedy_row)


def test_a_marked_row_does_not_reach_into_h_or_w_of_others():
    """-1 means "last" to an index: the log-probs of a marked row are NaN and not those of the last token."""
    h, w = heads.pinned_head(np.arange(20.0), rows=2)
    mask = jnp.ones((2, 20), bool).at[0].set(False)
    out = gumbeljax.sample_with_log_probs(h, w, jax.random.key(0), mask=mask)
    assert int(out.token[0]) == -1 and all(np.isnan(x[0]) and np.isfinite(x[1]) for x in out[1:])
    assert np.isnan(gumbeljax.log_prob(h, w, out.token)[0])


# L-8: a mask of another width


@pytest.mark.parametrize(
    "name, value",
    [
        ("mask", np.ones(300, bool)),
        ("logit_bias", np.zeros(300, np.float32)),
        ("mask", np.ones((2, 300), bool)),
        ("mask", np.ones((2, 1), bool)),
        ("logit_bias", np.zeros((2, 321), np.float32)),
        ("mask", np.ones(10, bool)),
    ],
)
def test_options_of_another_width_are_refused_with_both_widths(name, value):
    h, w = heads.pinned_head(np.zeros(320), rows=2)
    want = rf"^{name} must be as wide as the vocabulary of w, 320; got width {value.shape[-1]}: pad it to 320\.(\n|$)"
    for more in ({}, {"valid_vocab": 300}):
        with pytest.raises(ValueError, match=want):
            gumbeljax.sample(h, w, jax.random.key(0), **{name: value}, **more)
        with pytest.raises(ValueError, match=want):
            jax.jit(lambda x, more=more: gumbeljax.log_prob(h, w, jnp.zeros(2, jnp.int32), **{name: x}, **more))(value)
        with pytest.raises(ValueError, match=want):
            gumbeljax.sample_logits(jnp.zeros((2, 320)), jax.random.key(0), **{name: value}, **more)


@pytest.mark.parametrize("shape", [(1, 320), (3, 320), (1, 2, 320), (320, 320)])
def test_options_of_another_batch_are_never_broadcast(shape):
    h, w = heads.pinned_head(np.zeros(320), rows=2)
    with pytest.raises(ValueError, match=r"mask must be \[320\] or \[2, 320\]; got \["):
        gumbeljax.sample(h, w, jax.random.key(0), mask=np.ones(shape, bool))
    with pytest.raises(ValueError, match=r"logit_bias must be \[320\] or \[2, 320\]; got \["):
        gumbeljax.greedy(h, w, logit_bias=np.zeros(shape, np.float32))
