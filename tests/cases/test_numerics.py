"""Area A: the numbers inside a draw."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gumbeljax
from pallas_kernels.tiles import TritonTiles
from tests import heads, oracles, statistics
from tests.cases import routes

FLOATS = [jnp.float32, jnp.bfloat16, jnp.float16]
by_dtype = pytest.mark.parametrize("dtype", FLOATS, ids=lambda d: jnp.dtype(d).name)


# an outcome of probability zero is never returned


@routes.routes(*routes.ALL)
def test_zero_weight_is_never_drawn(route):
    """[0, 1], and [.33, .34, 0, .33]: forbidden by the logit itself, by the bias, and by the mask."""
    rows = 2_000 if route in (routes.by_triton, routes.by_scan) else 100_000
    keys, t = routes.keys_of(0, rows), jnp.ones(rows)
    bias = jnp.array([0.0, 0.0, -jnp.inf, 0.0])
    probs = np.array([0.33, 0.34, 0.0, 0.33])
    with np.errstate(divide="ignore"):
        whole, zero = np.log(np.float32(probs)), np.float32([-np.inf, 0, -np.inf, -np.inf])
    filled = np.where(probs > 0, whole, 3.0).astype(np.float32)  # the forbidden token would be the most probable
    tile = lambda x: jnp.tile(jnp.asarray(x), (rows, 1))  # noqa: E731
    assert (np.asarray(route(tile(zero), keys, t)[0]) == 1).all()
    for tokens in (
        route(tile(whole), keys, t)[0],
        route(tile(filled), keys, t, logit_bias=tile(bias))[0],
        route(tile(filled), keys, t, mask=tile(probs > 0))[0],
    ):
        counts = np.bincount(np.asarray(tokens), minlength=4)
        assert counts[2] == 0 and counts.sum() == rows
        assert statistics.chi_square(counts, probs) > statistics.ALPHA


def test_zero_weight_in_ten_million_draws():
    probs = np.array([0.33, 0.34, 0.0, 0.33])
    with np.errstate(divide="ignore"):
        logits = jnp.log(jnp.asarray(probs, jnp.float32))
    draw = jax.jit(lambda key: jnp.bincount(gumbeljax.sample_logits(jnp.tile(logits, (500_000, 1)), key), length=4))
    counts = sum(np.asarray(draw(jax.random.key(i))) for i in range(20))
    assert counts.sum() == 10_000_000 and counts[2] == 0
    assert statistics.chi_square(counts, probs) > statistics.ALPHA


@routes.routes(*routes.ALL)
def test_one_allowed_token_is_drawn_however_improbable(route):
    """At both ends of groups, of the vocabulary and of its valid part; the rest forbidden, or worth nothing."""
    vocab, valid = 83, 66
    allowed = np.array([0, 15, 16, 31, 32, 63, 64, 65])
    rows = len(allowed)
    mask = np.zeros((rows, vocab), bool)
    mask[np.arange(rows), allowed] = True
    logits = np.random.default_rng(0).normal(size=(rows, vocab)).astype(np.float32) * 10
    logits[mask] = -1e8 if route is routes.by_categorical else -1e30  # its law divides by T first, and must not overflow
    keys, t = routes.keys_of(1, rows), jnp.array([0.0, 1e-30, 1e-3, 1.0, 1.0, 100.0, 1e6, 1.0])
    for token in (
        route(logits, keys, t, mask=mask, valid_vocab=valid)[0],
        route(np.where(mask, logits, -np.inf), keys, t, valid_vocab=valid)[0],
    ):
        np.testing.assert_array_equal(token, allowed)


# noise is float32 whatever the dtype of the weights


@pytest.mark.parametrize("dtype", FLOATS[1:], ids=lambda d: jnp.dtype(d).name)
@pytest.mark.parametrize("way", ["head", "logits", "several", "triton"])
def test_equal_logits_share_evenly_in_every_dtype(way, dtype):
    rows, vocab = (2_000, 128) if way == "triton" else (20_000, 1000)
    h, w = heads.pinned_head(np.ones(vocab), dtype, rows)
    key = jax.random.key(2)
    if way == "head":
        tokens = gumbeljax.sample(h, w, key)
    elif way == "logits":
        tokens = gumbeljax.sample_logits(jnp.ones((rows, vocab), dtype), key)
    elif way == "several":
        tokens = gumbeljax.sample(h[0], w, key, num_samples=rows)
    else:
        if routes.plt is None:
            pytest.skip("this jax has no Pallas Triton backend")
        tokens = jax.jit(lambda h, w: routes.triton_draw(h, w, key).token)(h, w)
    tokens = np.asarray(tokens)
    assert statistics.frequency_within((tokens < vocab // 2).sum(), rows, 0.5)
    assert statistics.chi_square(np.bincount(tokens, minlength=vocab), np.full(vocab, 1 / vocab)) > statistics.ALPHA


# temperatures near zero


TEMPERATURES = [0.0, 1e-45, 1e-40, 1e-38, 1e-30, 1e-12, 1e-6, 1e-3]


@by_dtype
@routes.routes(*routes.ALL)
def test_tiny_temperatures_are_greedy_and_finite(route, dtype):
    """One batch with every temperature in it; and again around -3e4, 1e4 and with a far token."""
    logits = np.asarray(jnp.array([2.875, 2.955, 11.0625], dtype).astype(jnp.float32))
    rows = 40 * len(TEMPERATURES)
    t = jnp.repeat(jnp.array(TEMPERATURES, jnp.float32), 40)
    keys = routes.keys_of(3, rows)
    for row in (logits, logits - 3e4, logits + 1e4, np.where(np.arange(3) == 0, -1e30, logits).astype(np.float32)):
        token, log_prob = route(np.tile(row, (rows, 1)), keys, t)
        np.testing.assert_array_equal(token, 2)
        if log_prob is not None:
            np.testing.assert_allclose(log_prob, 0.0, atol=1e-5)


@by_dtype
def test_log_probs_at_tiny_temperatures(dtype):
    rows = len(TEMPERATURES)
    h, w = heads.pinned_head([2.875, 2.955, 11.0625], dtype, rows)
    t = jnp.array(TEMPERATURES)
    got = np.stack([gumbeljax.log_prob(h, w, jnp.full(rows, i), temperature=t) for i in range(3)])
    assert not np.isnan(got).any()
    np.testing.assert_array_equal(got[2], 0.0)
    assert (got[:2] <= -8000).all() and np.isneginf(got[:2, 0]).all()
    np.testing.assert_array_equal(gumbeljax.greedy(h, w), 2)


@pytest.mark.parametrize("kind", ["scale", "soft_cap", "quantised", "one coordinate", "categorical"])
def test_products_behind_the_head_at_tiny_temperatures(kind):
    """XLA may make a logit that is a product twice, rounded and within a fused multiply-add: their difference, divided by the
    temperature, gave rows without a law."""
    rng, rows = np.random.default_rng(0), 32
    h, w = (jnp.asarray(rng.normal(size=(n, 1 if kind == "one coordinate" else 16)), jnp.float32) for n in (rows, 333))
    options = {"soft_cap": {"soft_cap": 7.3}, "categorical": {"scale": 0.3, "method": "categorical"}}.get(kind, {"scale": 0.3})
    w = gumbeljax.quantize_head(w) if kind == "quantised" else w
    t = jnp.repeat(jnp.array([1e-20, 0.0]), rows)
    out = gumbeljax.sample_with_log_probs(jnp.tile(h, (2, 1)), w, jax.random.key(0), temperature=t, top_p=0.9, **options)
    np.testing.assert_array_equal(out.token[:rows], out.token[rows:])
    np.testing.assert_allclose(out.tempered_log_prob, 0.0, atol=1e-5)


def test_a_quantised_head_with_large_logits():
    logits = np.float32([3e20, 1.0])
    head = gumbeljax.quantize_head(jnp.diag(logits))
    assert gumbeljax.greedy(jnp.ones(2), head) == 0
    assert gumbeljax.sample_with_log_probs(jnp.ones(2), head, jax.random.key(0)).model_log_prob == 0.0


@pytest.mark.parametrize("temperature", [1e-30, 1e-9, 1e-3])
def test_two_equal_maxima_share_evenly_at_tiny_temperatures(temperature):
    """Greedy up to ties: the noise must not be rounded away, nor the tie fall to the lower id."""
    rows = 4000
    logits = np.tile(np.float32([7.0, 11.0625, -3.0, 11.0625]), (rows, 1))
    for draw in (routes.by_head, routes.by_logits, routes.by_several, routes.by_distinct):
        tokens = np.asarray(draw(logits, routes.keys_of(4, rows), jnp.full(rows, temperature))[0])
        assert set(tokens) == {1, 3}
        assert statistics.frequency_within((tokens == 1).sum(), rows, 0.5)


@pytest.mark.parametrize(
    "temperature, far",
    [(1.0, 1e3), (1e-3, 1e1), (1.0, 1e9), (1e-6, 1e1), (1e-20, 1e30)],
)
def test_equal_tokens_far_below_the_first_share_the_second_place(temperature, far):
    """Without replacement, when one token is certain the others still have their law: here 31 equal ones."""
    rows, logits = 8000, np.zeros(32, np.float32)
    logits[5] = far
    drawn = gumbeljax.sample_logits(
        jnp.tile(jnp.asarray(logits), (rows, 1)), jax.random.key(0), temperature=temperature, num_samples=2, replace=False
    )
    assert (drawn[:, 0] == 5).all()
    counts = np.bincount(np.asarray(drawn[:, 1]), minlength=32)
    assert statistics.chi_square(counts, np.where(np.arange(32) == 5, 0, 1 / 31)) > statistics.ALPHA


def test_products_beyond_float16_are_finite():
    """h @ w.T is 90,000 and more in float16, whose largest number is 65,504."""
    h, w = heads.pinned_head([300.0, 300.25, 300.5], jnp.float16, rows=4)
    h = h * jnp.float16(300)
    out = gumbeljax.sample_with_log_probs(h, w, jax.random.key(0), temperature=jnp.array([0.0, 1.0, 1e-6, 100.0]))
    assert (out.token[:3] == 2).all() and 0 <= out.token[3] <= 2
    want = oracles.log_softmax(np.tile([90_000.0, 90_075.0, 90_150.0], (4, 1)))[np.arange(4), out.token]
    np.testing.assert_allclose(out.model_log_prob, want, rtol=1e-6, atol=1e-6)
    assert (gumbeljax.greedy(h, w) == 2).all()


@pytest.mark.parametrize("temperature", [1e3, 1e10, 2.0**100])
def test_large_temperatures_are_uniform(temperature):
    rows, vocab = 8000, 40
    logits = np.tile(np.linspace(-4, 4, vocab, dtype=np.float32), (rows, 1))
    for draw in (routes.by_head, routes.by_logits, routes.by_distinct):
        tokens, log_prob = draw(logits, routes.keys_of(5, rows), jnp.full(rows, temperature))
        counts = np.bincount(np.asarray(tokens), minlength=vocab)
        assert statistics.chi_square(counts, np.full(vocab, 1 / vocab)) > statistics.ALPHA
        if log_prob is not None:
            np.testing.assert_allclose(log_prob, -np.log(vocab), atol=0.01)


# equal maxima go to the lowest id


def ties():
    """Three rows: equal maxima in three places, both signs of zero, and everything equal."""
    logits = np.zeros((3, 20_000), np.float32)
    logits[0, [5, 7_000, 19_999]] = 3.0
    logits[1] = -1.0
    logits[1, [2, 9, 4, 40]] = -0.0, -0.0, 0.0, 0.0
    return logits


@routes.routes(*routes.ALL)
def test_equal_maxima_go_to_the_lowest_id(route):
    logits = ties() if route is not routes.by_triton else ties()[:, :1000]
    logits = logits.copy()
    logits[0, 700] = 3.0
    np.testing.assert_array_equal(route(logits, routes.keys_of(0, 3), jnp.zeros(3))[0], [5, 2, 0])


def test_equal_maxima_in_the_rest_of_the_interface():
    logits = ties()
    h, w = routes.zeros_head(3, logits.shape[1])
    np.testing.assert_array_equal(gumbeljax.greedy(h, w, logit_bias=logits), [5, 2, 0])
    distinct = gumbeljax.sample_logits(logits, jax.random.key(0), temperature=0.0, num_samples=5, replace=False)
    np.testing.assert_array_equal(distinct, [[5, 7_000, 19_999, 0, 1], [2, 4, 9, 40, 0], [0, 1, 2, 3, 4]])
    scored = [gumbeljax.log_prob(h, w, jnp.full(3, i), logit_bias=logits, temperature=0.0) for i in (5, 2, 0)]
    np.testing.assert_array_equal(scored, np.where(np.eye(3, dtype=bool), 0.0, -np.inf))


def test_signs_of_zero_without_replacement_by_the_other_law():
    distinct = gumbeljax.sample_logits(
        ties()[1], jax.random.key(0), temperature=0.0, num_samples=4, replace=False, method="categorical"
    )
    assert distinct.tolist() == [2, 4, 9, 40]


def test_equal_maxima_in_a_long_vocabulary_of_a_model():
    """Exact products this time, over all of 200,000 ids, in two layouts and two dtypes."""
    w = np.zeros((200_000, 2), np.float32)
    w[[5, 70_000, 199_999], 0] = 3.0
    for dtype, rows in ((jnp.float32, 1), (jnp.bfloat16, 3)):
        h, table = jnp.zeros((rows, 2), dtype).at[:, 0].set(1), jnp.asarray(w, dtype)
        np.testing.assert_array_equal(gumbeljax.greedy(h, table), 5)
        np.testing.assert_array_equal(gumbeljax.greedy(h, table.T, vocab_axis=1), 5)
        np.testing.assert_array_equal(gumbeljax.sample(h, table, jax.random.key(0), temperature=0.0), 5)


@routes.needs_triton
@pytest.mark.parametrize("tiles", [TritonTiles(16, 16, 16), TritonTiles(64, 16, 16), TritonTiles(512, 16, 16)])
def test_equal_maxima_do_not_depend_on_tiles(tiles):
    logits = np.full(1100, -1.0)
    logits[[1099, 600, 33]] = 3.0
    h, w = heads.pinned_head(logits, rows=2)
    draw = jax.jit(lambda h, w: routes.triton_draw(h, w, routes.keys_of(0, 2), temperature=0.0, tiles=tiles).token)
    assert draw(h, w).tolist() == [33, 33]


# float32 is multiplied as float32


@pytest.mark.parametrize("precision", [None, "highest", jax.lax.Precision.HIGHEST])
def test_differences_below_ten_bits_are_seen(precision):
    """4096 products of 1 + 2^-12 with 1 + 2^-12 and with 1 + 2^-11: 4098.0 and 4099.0 and a bit."""
    h = jnp.full((1, 4096), 1 + 2.0**-12)
    w = jnp.stack([jnp.full(4096, 1 + 2.0**-12), jnp.full(4096, 1 + 2.0**-11)])
    assert int(gumbeljax.greedy(h, w, precision=precision)[0]) == 1
    assert int(gumbeljax.sample(h, w, jax.random.key(0), temperature=0.0, precision=precision)[0]) == 1
    want = oracles.log_softmax(np.asarray(h, np.float64) @ np.asarray(w, np.float64).T)[0]
    got = [float(gumbeljax.log_prob(h, w, jnp.array([i]), precision=precision)[0]) for i in range(2)]
    np.testing.assert_allclose(got, want, atol=1e-3)


def test_log_probs_are_those_of_float64():
    rng = np.random.default_rng(0)
    h, w = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in [(8, 256), (4_000, 256)])
    logits = np.asarray(h, np.float64) @ np.asarray(w, np.float64).T
    for t in (1.0, 4.0):
        out = gumbeljax.sample_with_log_probs(h, w, jax.random.key(0), temperature=t, precision="highest")
        at_token = np.arange(8), np.asarray(out.token)
        np.testing.assert_allclose(out.model_log_prob, oracles.log_softmax(logits)[at_token], atol=1e-4)
        np.testing.assert_allclose(out.tempered_log_prob, oracles.log_softmax(logits, t)[at_token], atol=1e-4)
        scored = gumbeljax.log_prob(h, w, out.token, temperature=t, precision="highest")
        np.testing.assert_allclose(scored, oracles.log_softmax(logits, t)[at_token], atol=1e-4)
