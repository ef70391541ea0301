"""top_k, top_p and min_p against sorts in float64: every answer, every way to draw, gradients and shapes."""

import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given

import gumbeljax
from pallas_kernels.kept_set import LEADING
from tests import filter_oracle as oracle
from tests import heads, knobs, oracles, statistics
from tests.filter_oracle import Options
from tests.knobs import Case

FILTERS = ("top_k", "top_p", "min_p")


def ask(case: Case):
    """(answers, words) of a case of filters alone."""
    keys, words = heads.keys_of(case.seed, len(case.logits))
    return knobs.answers(case.logits, keys, knobs.filters_of(case.options, len(case.logits))), words


# Every combination, per row


@knobs.checked(max_examples=40)
@given(knobs.filter_cases([17, 100]))
def test_every_answer_of_small_vocabularies(case):
    knobs.assert_answers(case, *ask(case))


@knobs.checked(max_examples=20)
@given(knobs.filter_cases([2100]))
def test_every_answer_where_candidates_are_searched_first(case):
    assert case.logits.shape[1] > oracles.GROUP * LEADING
    knobs.assert_answers(case, *ask(case))


@pytest.mark.parametrize("on", [c for n in range(4) for c in itertools.combinations(FILTERS, n)], ids="+".join)
def test_filters_that_are_left_out_are_off(on):
    """An argument that is absent compiles to nothing; scalars serve all rows."""
    rng = np.random.default_rng(0)
    logits = np.stack([knobs.row_of(kind, 100, rng) for kind in ("grid", "normal", "flat", "both zeros")])
    values = {name: v for name, v in {"top_k": 7, "top_p": 0.6, "min_p": 0.3}.items() if name in on}
    h, w = knobs.logits_head(logits)
    keys, words = heads.keys_of(1, 4)
    tokens = gumbeljax.sample(h, w, keys, **values)
    got, _ = ask(Case(logits, Options(**values), seed=1))  # all filters there, per row
    kept = np.asarray(got.kept)
    knobs.assert_kept(kept, logits.astype(np.float64), Options(**values))
    np.testing.assert_array_equal(tokens, got.draw.token)
    heads.assert_pathwise(tokens, np.where(kept, logits, -np.inf), words)


@pytest.mark.parametrize("off", [{"top_k": None}, {"top_k": 0}, {"top_k": -1}, {"top_p": 1.0}, {"min_p": 0.0}], ids=str)
def test_off_is_the_unfiltered_draw(off):
    h, w = heads.exact_head(500, 32, 16)
    keys, _ = heads.keys_of(0, 16)
    want = gumbeljax.sample_with_log_probs(h, w, keys)
    traced = knobs.filters_of(Options(**{name: v for name, v in off.items() if v is not None}), 16)
    for options in (off, traced):
        got = gumbeljax.sample_with_log_probs(h, w, keys, **options)
        np.testing.assert_array_equal(got.token, want.token)
        np.testing.assert_allclose(got[1:], want[1:], atol=2e-5)


# The other ways to draw


def several_case():
    rows, vocab = 8, 100
    rng = np.random.default_rng(4)
    logits = np.stack([knobs.row_of(knobs.KINDS[i % len(knobs.KINDS)], vocab, rng) for i in range(rows)])
    options = Options(
        [0.0, 0.5, 1, 2, 1, 1, 1, 2],
        [5, 0, 30, 0, 99, 1, 0, 7],
        [1, 0.9, 0.79, 1, 0.5, 1, 0.99, 1],
        [0, 0, 0, 0.05, 0, 0, 0.1, 0],
    )
    want = oracle.laws(logits, options)
    return rows, logits, options, want, np.where(want.kept, want.logits, -np.inf)


def test_several_tokens_equal_the_oracle():
    rows, logits, options, want, in_set = several_case()
    keys, words = heads.keys_of(2, rows)
    out = gumbeljax.sample_with_log_probs(*knobs.logits_head(logits), keys, num_samples=6, **knobs.filters_of(options, rows))
    np.testing.assert_array_equal(out.token, oracles.grouped_tokens(in_set, words, options.temperature, num_samples=6))
    pick = lambda law: np.take_along_axis(law, np.asarray(out.token), -1)  # noqa: E731
    for got, law in zip(out[1:4], (want.model, want.tempered, want.processed), strict=True):
        knobs.assert_log_probs(got, pick(law), 5e-5)


def test_distinct_tokens_equal_the_oracle():
    rows, logits, options, want, in_set = several_case()
    keys, words = heads.keys_of(2, rows)
    out = gumbeljax.sample_with_log_probs(
        *knobs.logits_head(logits), keys, num_samples=9, replace=False, **knobs.filters_of(options, rows)
    )
    token = np.asarray(out.token)
    np.testing.assert_array_equal(token, oracles.grouped_without_replacement(in_set, words, 9, options.temperature))
    pick = lambda law: np.where(token < 0, np.nan, np.take_along_axis(law, token, -1))  # noqa: E731
    for got, law in zip(out[1:4], (want.model, want.tempered, want.processed), strict=True):
        knobs.assert_log_probs(got, pick(law), 5e-5)


def test_the_categorical_law_on_the_kept_set():
    """Token for token `jax.random.categorical` on the kept logits."""
    rows, logits, options, _, _ = several_case()
    t = np.where(np.asarray(options.temperature) == 0, 1.0, options.temperature)
    filters = knobs.filters_of(options._replace(temperature=t), rows)
    kept = oracle.laws(logits, options._replace(temperature=t)).kept
    scaled = jnp.where(kept, jnp.asarray(logits) / jnp.asarray(t, jnp.float32)[:, None], -jnp.inf)
    key = jax.random.key(1)
    tokens = gumbeljax.sample(*knobs.logits_head(logits), key, method="categorical", mode="high", **filters)
    np.testing.assert_array_equal(tokens, jax.random.categorical(key, scaled, mode="high"))


# Without replacement, gradients, traces


@pytest.mark.parametrize(
    "options", [{"top_k": 5}, {"top_p": 0.85}, {"min_p": 0.2}, {"top_k": 6, "top_p": 0.9, "min_p": 0.05}], ids=str
)
def test_without_replacement_is_plackett_luce_on_the_kept_set(options):
    """Ordered triples by enumeration; 20 ids cross a group border."""
    rows, logits = 60_000, np.random.default_rng(20).normal(size=20)
    h, w = heads.pinned_head(logits, rows=rows)
    filters = knobs.filters_of(Options(temperature=0.8, **options), rows)
    draws = np.asarray(gumbeljax.sample(h, w, jax.random.key(0), num_samples=3, replace=False, **filters))
    want = oracle.laws(np.asarray(w[:, 0])[None].astype(np.float64), Options(temperature=0.8, **options))
    assert 3 < want.kept.sum() < 20
    law = statistics.plackett_luce(np.exp(want.processed[0]), 3)
    assert statistics.chi_square(*statistics.tuple_counts(draws, law)) > statistics.ALPHA


def test_fewer_kept_tokens_than_samples():
    h, w = heads.pinned_head(np.arange(40.0), rows=3)
    draws = np.asarray(gumbeljax.sample(h, w, jax.random.key(0), num_samples=5, replace=False, top_k=jnp.array([1, 3, 5])))
    assert [sorted(row.tolist()) for row in draws] == [[-1] * 4 + [39], [-1, -1, 37, 38, 39], [35, 36, 37, 38, 39]]
    assert (draws[0] == [39, -1, -1, -1, -1]).all() and (draws[1, 3:] == -1).all()


@jax.jit
@functools.partial(jax.value_and_grad, argnums=(0, 1, 2, 3))
def weighted_log_prob(h, w, bias, t, tokens, weights, mask, filters):
    """Half by `log_prob`, half by `processed_log_probs`."""
    options = {"temperature": t, "logit_bias": bias, "mask": mask, **filters}
    whole = jnp.take_along_axis(gumbeljax.processed_log_probs(h, w, **options), tokens[:, None], 1)[:, 0]
    return jnp.sum(weights * (gumbeljax.log_prob(h, w, tokens, **options) + whole)) / 2


@pytest.mark.parametrize(
    "options", [{"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}, {"top_k": 20, "top_p": 0.8, "min_p": 0.02}], ids=str
)
def test_gradients_are_those_of_the_law_on_the_kept_set(options):
    """Float64 finite differences of the oracle's law with the kept set held still, for h, w, bias and temperature."""
    rows, vocab, d_model = 3, 60, 8
    rng = np.random.default_rng(3)
    h, w, bias, t = (
        rng.normal(size=(rows, d_model)),
        rng.normal(size=(vocab, d_model)),
        rng.normal(size=vocab),
        np.array([0.7, 1, 2]),
    )
    filters = knobs.filters_of(Options(**options), rows)
    filters.pop("temperature")
    arguments = tuple(np.asarray(x, np.float32).astype(np.float64) for x in (h, w, bias, t))
    mask = rng.random(vocab) < 0.9
    law = lambda h, w, bias, t: oracle.laws(h @ w.T, Options(t, logit_bias=bias, mask=mask, **options))  # noqa: E731
    kept = law(*arguments).kept
    tokens = np.array([rng.choice(np.flatnonzero(k)) for k in kept])
    weights = np.array([1.0, -2.0, 0.5])

    def still(h, w, bias, t):
        x = np.where(kept, h @ w.T + bias, -np.inf)
        z = x / t[:, None]
        return np.sum(weights * (z - oracles.logsumexp(z)[:, None])[np.arange(rows), tokens])

    small = tuple(jnp.asarray(x, jnp.float32) for x in arguments)
    value, gradients = weighted_log_prob(*small, tokens, weights, mask, filters)
    np.testing.assert_allclose(value, still(*arguments), rtol=1e-5)
    for place, got in enumerate(gradients):
        chex.assert_tree_all_finite(got)
        want, step = np.zeros_like(arguments[place]), 1e-6
        for i in np.ndindex(want.shape):
            moved = [x.copy() for x in arguments], [x.copy() for x in arguments]
            moved[0][place][i] += step
            moved[1][place][i] -= step
            want[i] = (still(*moved[0]) - still(*moved[1])) / (2 * step)
        np.testing.assert_allclose(got, want, atol=2e-5)
        assert np.abs(want).max() > 1e-2


def test_log_prob_outside_the_kept_set():
    h, w = heads.pinned_head([3.0, 2.0, 1.0, 0.0], rows=4)
    got = gumbeljax.log_prob(h, w, jnp.arange(4), top_k=2)
    np.testing.assert_allclose(got, [-0.3132617, -1.3132617, -np.inf, -np.inf], atol=1e-6)
    got = gumbeljax.log_prob(h, w, jnp.array([-1, 4, 3, 0]), top_k=2)
    assert np.isnan(got[:2]).all() and got[2] == -np.inf
    grad = jax.grad(lambda w: gumbeljax.log_prob(h, w, jnp.zeros(4, jnp.int32), top_k=2).sum())(w)
    assert (grad[2:] == 0).all() and (np.abs(grad[:2, 0]) > 0.1).all()


def test_parameters_may_change_every_step_without_a_retrace():
    vocab, rows = 2100, 4
    h, w = heads.exact_head(vocab, 16, rows)
    keys, words = heads.keys_of(0, rows)
    logits = heads.exact_logits(h, w)

    @jax.jit
    @chex.assert_max_traces(n=1)
    def step(keys, filters):
        return gumbeljax.sample(h, w, keys, **filters), gumbeljax.kept_tokens(h, w, **filters)

    rng = np.random.default_rng(0)
    for _ in range(6):
        options = Options(
            rng.choice([0, 0.5, 1, 2], rows),
            rng.choice([0, 1, 50, 100, 2000, 2**30], rows),
            rng.choice([0, 0.3, 0.9, 1], rows),
            rng.choice([0, 0.1, 1], rows),
        )
        tokens, kept = step(keys, knobs.filters_of(options))
        knobs.assert_kept(np.asarray(kept), logits.astype(np.float64), options)
        heads.assert_pathwise(tokens, np.where(kept, logits, -np.inf), words, options.temperature)


@pytest.mark.parametrize("batch", [(), (1,), (2, 3), (0,)])
def test_leading_shapes(batch):
    def everything(h, w):
        options = {"top_k": jnp.full(batch, 5), "top_p": 0.9, "min_p": jnp.zeros(batch)}
        several = gumbeljax.sample(h, w, jax.random.key(0), num_samples=2, **options)
        top = gumbeljax.top_log_probs(h, w, 3, tokens=several[..., 0], **options)
        return (
            gumbeljax.sample(h, w, jax.random.key(0), **options),
            several,
            gumbeljax.kept_tokens(h, w, **options),
            gumbeljax.processed_log_probs(h, w, **options),
            *top,
            gumbeljax.log_prob(h, w, several[..., 0], **options),
        )

    shapes = jax.eval_shape(everything, jnp.ones((*batch, 8)), jnp.ones((100, 8)))
    assert [x.shape[len(batch) :] for x in shapes] == [(), (2,), (100,), (100,), (3,), (3,), (), ()]
    assert all(x.shape[: len(batch)] == batch for x in shapes)
