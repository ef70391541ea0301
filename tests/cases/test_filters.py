"""Area B: top-k, top-p and min-p, on every route that filters; and K-5, the end token among them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gumbeljax
from tests import filter_oracle, heads, knobs, oracles, statistics
from tests.cases import routes
from tests.filter_oracle import Options

ROUTES = routes.routes(*routes.FILTERED)
OFF = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}  # one structure of options: a route compiles once for each shape


def counts_of(route, logits, rows, t=1.0, seed=0, **filters):
    """How often each id was drawn from one row of logits."""
    logits = np.broadcast_to(np.asarray(logits, np.float32), (rows, len(logits)))
    given = {n: jnp.full(rows, x, jnp.int32 if n == "top_k" else jnp.float32) for n, x in (OFF | filters).items()}
    tokens = np.asarray(route(logits, routes.keys_of(seed, rows), jnp.full(rows, t), **given)[0])
    assert tokens.min() >= 0
    return np.bincount(tokens, minlength=logits.shape[1])


def kept_of(logits, **options):
    """The kept set of one row, as a set of ids."""
    h, w = heads.pinned_head(logits)
    kept = np.asarray(gumbeljax.kept_tokens(h, w, **options))[0]
    log_probs = np.asarray(gumbeljax.processed_log_probs(h, w, **options))[0]
    np.testing.assert_array_equal(kept, log_probs > -np.inf)
    return set(np.flatnonzero(kept).tolist())


def rows_for(route):
    return 400 if route is routes.by_scan else 20_000


# B-1: 0 and -1 are off, and so is a k beyond the vocabulary


@ROUTES
def test_off_values_of_top_k(route):
    rows = rows_for(route)
    values = [0, -1, 4, 100, 2**30, 1]
    k = jnp.tile(jnp.array(values, jnp.int32), rows // len(values) + 1)[:rows]
    off = {"top_p": jnp.ones(rows), "min_p": jnp.zeros(rows)}
    tokens = np.asarray(route(np.zeros((rows, 4), np.float32), routes.keys_of(0, rows), jnp.ones(rows), top_k=k, **off)[0])
    for value in values[:-1]:
        assert statistics.chi_square(np.bincount(tokens[k == value], minlength=4), np.ones(4) / 4) > statistics.ALPHA, value
    assert (tokens[k == 1] == 0).all()


@pytest.mark.parametrize("value", [None, 0, -1, 4, 100, 2**30])
def test_off_values_of_top_k_as_python_numbers(value):
    h, w = heads.pinned_head(np.zeros(4), rows=40_000)
    tokens = np.asarray(gumbeljax.sample(h, w, jax.random.key(0), top_k=value))
    assert np.all(np.abs(np.bincount(tokens) / 40_000 - 0.25) < 0.012)


# B-4: top_k comes first


@ROUTES
def test_top_k_is_applied_before_top_p(route):
    counts = counts_of(route, np.log([0.1, 0.2, 0.3, 0.4]), rows_for(route), top_k=2, top_p=0.5)
    assert (counts[:3] == 0).all()


def test_top_k_is_applied_before_top_p_in_the_set():
    logits = np.log([0.1, 0.2, 0.3, 0.4])
    assert kept_of(logits, top_k=2, top_p=0.5) == {3} and kept_of(logits, top_p=0.5) == {2, 3}


def test_three_answers_to_one_question():
    """Logits [2, 1, 1, 0, -1], T = 2, top_p = 0.5: other libraries keep 3, 1 or 2 tokens. The tempered law is [.357, .216,
    .216, .131, .080]: the second token crosses one half; of the tied ones it is the first."""
    assert kept_of([2.0, 1, 1, 0, -1], temperature=2.0, top_p=0.5) == {0, 1}
    assert kept_of([-1.0, 0, 1, 1, 2], temperature=2.0, top_p=0.5) == {2, 4}


# B-5: the crossing token is kept


@ROUTES
@pytest.mark.parametrize(
    "probs, p, kept", [([0.4, 0.3, 0.2, 0.1], 0.8, 3), ([0.5, 0.3, 0.15, 0.05], 0.6, 2), ([0.5, 0.3, 0.15, 0.05], 0.85, 3)]
)
def test_the_crossing_token_is_kept(route, probs, p, kept):
    counts = counts_of(route, np.log(probs), rows_for(route), top_p=p)
    law = np.where(np.arange(4) < kept, probs, 0)
    assert statistics.chi_square(counts, law / law.sum()) > statistics.ALPHA
    assert kept_of(np.log(probs), top_p=p) == set(range(kept))


# B-8: a tiny p is greedy


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("p", [1e-3, 1e-5, 1e-8, 1e-12, 1e-30, 0.0])
def test_a_tiny_top_p_is_greedy(p, dtype):
    logits = np.random.default_rng(0).normal(size=4096) * 4
    h, w = heads.pinned_head(logits, dtype, rows=200)
    best = int(gumbeljax.greedy(h[:1], w)[0])
    for given in (p, jnp.full(200, p)):
        tokens = gumbeljax.sample(h, w, jax.random.key(0), top_p=given)
        assert (tokens == best).all()


@ROUTES
def test_a_tiny_top_p_is_greedy_on_every_route(route):
    logits = np.random.default_rng(0).normal(size=4)
    for p in (0.0, 1e-12, 1e-8):
        assert counts_of(route, logits, rows_for(route), top_p=p)[logits.argmax()] == rows_for(route)


# B-10: at least p, and no more than it takes


def test_kept_mass_is_at_least_p_and_minimal():
    rng = np.random.default_rng(0)
    logits = np.concatenate(
        [rng.normal(size=(60, 500)) * s for s in (0.1, 1, 4)] + [np.log(rng.dirichlet(np.ones(500), 120) + 1e-30)]
    )
    logits = logits.astype(np.float32)
    h, w = knobs.logits_head(logits)
    ask = jax.jit(lambda p: gumbeljax.processed_log_probs(h, w, top_p=p))
    probs = np.exp(oracles.log_softmax(logits))
    for p in (0.1, 0.5, 0.9, 0.99):
        kept = np.asarray(ask(jnp.full(300, p))) > -np.inf
        mass, smallest = np.where(kept, probs, 0).sum(-1), np.where(kept, probs, 1).min(-1)
        assert (mass >= p - 1e-6).all() and (mass - smallest < p + 1e-6).all(), p


# B-11: min_p acts on the tempered law


@ROUTES
def test_min_p_comes_after_temperature(route):
    probs = np.array([0.95, 0.005, 0.045])
    law = np.append(np.exp(oracles.log_softmax(np.log(probs)[None], 2.0))[0], 0.0)
    counts = counts_of(route, np.append(np.log(probs), -np.inf), rows_for(route), t=2.0, min_p=0.05)
    assert statistics.chi_square(counts, law) > statistics.ALPHA and (counts[:3] > 0).all()
    assert kept_of(np.log(probs), temperature=2.0, min_p=0.05) == {0, 1, 2} and kept_of(np.log(probs), min_p=0.05) == {0}


# B-13: relative to the largest probability


@pytest.mark.parametrize("shift", [0.0, -100.0, 100.0])
def test_min_p_is_relative_to_the_largest_probability(shift):
    logits = np.array([5.0, 4.0, -3.0, 2.9]) + shift
    assert kept_of(logits, min_p=0.1) == {0, 1, 3}
    assert kept_of(logits[::-1], min_p=0.1) == {0, 2, 3}


# Routes, rows and parameters against the oracle


@routes.routes(*(r for r in routes.FILTERED if r is not routes.by_categorical))
def test_rows_of_every_kind_on_every_route(route):
    """All parameters differ in one call; the same token on each route."""
    rows, vocab = 24, 83
    rng = np.random.default_rng(2)
    logits = np.stack([knobs.row_of(knobs.KINDS[i % len(knobs.KINDS)], vocab, rng) for i in range(rows)])
    t = rng.choice([0, 0.5, 1, 2], rows).astype(np.float32)
    options = Options(
        t, rng.choice([0, 1, 3, 20, 82, 83, 2**30], rows), rng.choice([0, 0.3, 0.9, 1], rows), rng.choice([0, 0.1, 1], rows)
    )
    mask = rng.random((rows, vocab)) < 0.8
    filters = knobs.filters_of(options, rows)
    keys = routes.keys_of(3, rows)
    token, log_prob = route(logits, keys, filters.pop("temperature"), mask=mask, valid_vocab=80, **filters)
    want = filter_oracle.laws(logits, options._replace(mask=mask, valid_vocab=80))
    heads.assert_pathwise(token, np.where(want.kept, want.logits, -np.inf), routes.words_of(keys), t)
    if log_prob is not None:
        np.testing.assert_allclose(log_prob, want.tempered[np.arange(rows), token], atol=2e-5)


@ROUTES
def test_bad_rows_are_marked_under_filters(route):
    logits = np.zeros((24, 83), np.float32)
    logits[1], logits[2, 79], logits[3, 0], logits[4, [3, 64]] = -np.inf, np.nan, np.inf, np.inf
    marked = np.isin(np.arange(24), [1, 2, 3, 4])
    for filters in ({"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.5}):
        for t in (1.0, 0.0):
            given = {n: jnp.full(24, x, jnp.int32 if n == "top_k" else jnp.float32) for n, x in (OFF | filters).items()}
            token, log_prob = route(
                logits, routes.keys_of(0, 24), jnp.full(24, t), mask=np.ones((24, 83), bool), valid_vocab=80, **given
            )
            np.testing.assert_array_equal(np.asarray(token) == -1, marked)
            if log_prob is not None:
                np.testing.assert_array_equal(np.isnan(log_prob), marked)


@routes.needs_triton
def test_a_kernel_that_cannot_filter_a_call_says_so():
    with pytest.raises(NotImplementedError, match="implementation='triton' cannot run this call"):
        gumbeljax.sample(*heads.pinned_head(np.zeros(20)), jax.random.key(0), top_k=5, num_samples=2, implementation="triton")


# K-5: the end token is a token


@ROUTES
def test_an_end_token_outside_top_k_is_never_drawn(route):
    rows = 400 if route is routes.by_scan else 5000
    logits = -np.arange(40.0) / 8  # the end token, id 19, is the 20th
    assert counts_of(route, logits, rows, top_k=5)[19] == 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_end_token_comes_after_the_minimum_and_then_at_once(temperature):
    """The end token is the argmax, with nearly all the mass."""
    h, w = heads.pinned_head(np.where(np.arange(40) == 7, 30.0, 0.0), rows=16)

    def step(length, key):
        processors = gumbeljax.Processors(end_tokens=[7], min_new_tokens=4, num_new_tokens=length)
        return length + 1, gumbeljax.sample(h, w, key, temperature=temperature, processors=processors, top_k=5)

    tokens = np.asarray(jax.lax.scan(step, jnp.zeros(16, jnp.int32), jax.random.split(jax.random.key(0), 6))[1])
    assert (tokens[:4] != 7).all() and (tokens[4:] == 7).all()
