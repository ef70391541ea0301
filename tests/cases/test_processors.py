"""Areas N and L, the part with processors and filters: penalties, ids out of range, masks that allow nothing, packed masks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gumbeljax
from gumbeljax import Processors, count_tokens
from tests import filter_oracle, heads, knobs, oracles
from tests.cases import routes
from tests.filter_oracle import Options

SAME_TOKEN = routes.routes(*routes.SAME_TOKEN)
SCORED = routes.routes(routes.by_head, routes.by_triton, routes.by_categorical)  # routes with log-probs


def processed(logits, processors, **options):
    """The logits after processors, up to a constant per row: log-probs at T = 1."""
    return np.asarray(gumbeljax.processed_log_probs(*heads.pinned_head(logits), processors=processors, **options))[0]


def assert_logits(got, want):
    np.testing.assert_allclose(got, oracles.log_softmax(np.asarray(want, np.float64)[None])[0], atol=1e-6)


def counts(prompt, output, vocab):
    return count_tokens(np.array([prompt]), vocab).add(np.array([output], np.int32).reshape(1, -1))


# N-1: three kinds of log-probs


def test_three_kinds_of_log_probs_of_one_draw():
    h, w = heads.pinned_head([2.0, 1.0, 0.0], rows=300)
    out = gumbeljax.sample_with_log_probs(h, w, jax.random.key(0), temperature=0.5, top_k=2)
    assert set(np.asarray(out.token)) == {0, 1}
    np.testing.assert_allclose(out.model_log_prob, np.array([-0.4076, -1.4076])[out.token], atol=1e-4)
    np.testing.assert_allclose(out.tempered_log_prob, np.array([-0.1429, -2.1429])[out.token], atol=1e-4)
    np.testing.assert_allclose(out.processed_log_prob, np.array([-0.1269, -2.1269])[out.token], atol=1e-4)
    np.testing.assert_allclose(out.log_kept_mass, -0.0160, atol=1e-4)
    np.testing.assert_allclose(gumbeljax.log_prob(h, w, out.token, temperature=0.5, top_k=2), out.processed_log_prob, atol=1e-5)


# N-4: beside tokens that filters dropped


def test_a_drawn_token_never_has_log_prob_minus_infinity():
    rng = np.random.default_rng(0)
    rows = 1000
    logits = (rng.normal(size=(rows, 83)) * np.exp(rng.uniform(-3, 6, (rows, 1)))).astype(np.float32)
    t = jnp.asarray(np.exp(rng.uniform(-20, 20, rows)), jnp.float32).at[::10].set(0.0)
    filters = {
        "top_k": jnp.asarray(rng.choice([0, 1, 5, 83], rows), jnp.int32),
        "top_p": jnp.asarray(rng.uniform(0, 1, rows), jnp.float32),
        "min_p": jnp.asarray(rng.choice([0, 0.1, 1], rows), jnp.float32),
    }
    for route in (routes.by_head, routes.by_categorical):
        token, log_prob = route(logits, routes.keys_of(0, rows), t, **filters)
        assert np.isfinite(log_prob).all() and np.max(log_prob) < 1e-5 and np.min(token) >= 0


# N-5: the sign of a logit and the repetition penalty


def test_repetition_divides_positive_and_multiplies_negative_logits():
    seen = counts([0, 1], [], 3)
    assert_logits(processed([2.0, -2.0, 0.5], Processors(repetition_penalty=2.0, counts=seen)), [1.0, -4.0, 0.5])
    assert_logits(processed([2.0, -2.0, 0.5], Processors(repetition_penalty=1.0, counts=seen)), [2.0, -2.0, 0.5])
    got = processed([2.0, -2.0, 0.5], Processors(repetition_penalty=2.0, counts=seen), mask=np.array([False, True, True]))
    assert_logits(got, [-np.inf, -4.0, 0.5])
    assert not np.isnan(
        processed([0.0, 0.0, 0.5], Processors(repetition_penalty=0.5, counts=seen), logit_bias=jnp.array([-jnp.inf, 0, 0]))
    ).any()


@pytest.mark.parametrize("penalty", [0.0, -1.0, np.nan, np.inf])
def test_a_penalty_that_is_none(penalty):
    """A repetition penalty is positive; traced ones that are not mark their row."""
    seen = count_tokens(np.zeros((2, 1), int), 5)
    h, w = heads.pinned_head(np.zeros(5), rows=2)
    draw = lambda r: gumbeljax.sample(h, w, jax.random.key(0), processors=Processors(repetition_penalty=r, counts=seen))  # noqa: E731
    with pytest.raises(ValueError, match=r"^repetition_penalty must be finite and positive"):
        draw(penalty)
    np.testing.assert_array_equal(jax.jit(draw)(jnp.array([1.5, penalty])) == -1, [False, True])


# N-7: how often a token counts


@SCORED
@pytest.mark.parametrize("name, value, logit", [("frequency", 0.5, -1.0), ("repetition", 2.0, 0.5), ("presence", 0.5, 0.5)])
def test_how_often_a_token_counts(route, name, value, logit):
    """Token 6 was generated four times among ten logits of 1."""
    rows = 200
    seen = count_tokens(np.full((rows, 16), -1), 10).add(np.tile([6, 6, 6, 6, *[-1] * 12], (rows, 1)))
    want = oracles.log_softmax(np.where(np.arange(10) == 6, logit, 1.0)[None])[0]
    first = jax.tree.map(lambda x: x[:1], seen)
    assert_logits(
        processed(np.ones(10), Processors(**{f"{name}_penalty": value}, counts=first)), np.where(np.arange(10) == 6, logit, 1.0)
    )
    token, log_prob = route(
        np.ones((rows, 10), np.float32),
        routes.keys_of(0, rows),
        jnp.ones(rows),
        processors=knobs.processors_of(Options(**{name: value}), 10, rows, counts=seen),
    )
    np.testing.assert_allclose(log_prob, want[token], atol=1e-5)
    assert 6 in np.asarray(token)


def test_repetition_reads_the_prompt_and_the_others_do_not():
    seen = counts([6, 6], [], 10)
    for name, logit in (("repetition_penalty", 0.5), ("presence_penalty", 1.0), ("frequency_penalty", 1.0)):
        got = processed(np.ones(10), Processors(**{name: 2.0}, counts=seen))
        assert_logits(got, np.where(np.arange(10) == 6, logit, 1.0))


@SAME_TOKEN
def test_penalties_draw_the_same_token_on_every_route(route):
    rows, vocab = 24, 83
    rng = np.random.default_rng(0)
    logits = (rng.integers(-16, 17, (rows, vocab)) / 8).astype(np.float32)
    lists = lambda: [rng.integers(0, vocab, rng.integers(0, 7)).tolist() for _ in range(rows)]  # noqa: E731
    options = Options(
        prompt=lists(),
        output=lists(),
        repetition=rng.choice([0.5, 1, 2], rows),
        presence=rng.choice([0, 0.5], rows),
        frequency=rng.choice([0, 0.25], rows),
        banned=lists(),
        end_tokens=[[3]] * rows,
        min_new=rng.integers(0, 6, rows),
        sparse_bias=[[(int(t), 0.5)] for t in rng.integers(0, vocab, rows)],
    )
    keys, t = routes.keys_of(1, rows), rng.choice([0, 0.5, 1], rows).astype(np.float32)
    token, _ = route(logits, keys, t, processors=knobs.processors_of(options, vocab, rows))
    want = filter_oracle.processed_logits(logits, options)[1]
    heads.assert_pathwise(token, want, routes.words_of(keys), t)


# L-1: ids out of range


BAD_LISTS = [
    ("bias_tokens", {"bias_values": [5.0]}),
    ("allowed_tokens", {}),
    ("banned_tokens", {}),
    ("end_tokens", {"min_new_tokens": 3, "num_new_tokens": 0}),
]


@pytest.mark.parametrize("name, more", BAD_LISTS)
@pytest.mark.parametrize("token", [100, 99_999, 2**31 - 1, -2])
def test_known_ids_out_of_range_are_refused(name, more, token):
    h, w = heads.pinned_head(np.zeros(100))
    for tokens in ([token], np.array([token]), jnp.array([token])):
        with pytest.raises(ValueError, match=rf"^{name} must name token ids from 0 to 99.*got {token}"):
            gumbeljax.sample(h, w, jax.random.key(0), processors=Processors(**{name: tokens}, **more))
    with pytest.raises(ValueError, match=rf"^{name} must name token ids from 0 to 89"):  # padding of the head
        gumbeljax.sample(h, w, jax.random.key(0), valid_vocab=90, processors=Processors(**{name: [95]}, **more))


@pytest.mark.parametrize("token", [2**31, 2**32 + 5, 2**40])
def test_known_ids_beyond_32_bits_are_refused(token):
    h, w = heads.pinned_head(np.zeros(100))
    for tokens in ([token], np.array([token])):
        with pytest.raises(ValueError, match=r"^banned_tokens must"):
            gumbeljax.sample(h, w, jax.random.key(0), processors=Processors(banned_tokens=tokens))
        with pytest.raises(ValueError, match=r"^prompt must"):
            count_tokens(tokens, 100)


def test_a_prompt_token_that_does_not_exist():
    with pytest.raises(ValueError, match=r"^prompt must name token ids from 0 to 99.*got 150"):
        count_tokens([[1, 150]], 100)
    seen = jax.jit(lambda p: count_tokens(p, 100))(jnp.array([[1, 150, -7]]))
    assert seen.in_prompt.sum() == 1 and bool(seen.in_prompt[0, 1])


@pytest.mark.parametrize("name, more", BAD_LISTS)
def test_traced_ids_out_of_range_are_nothing(name, more):
    """Never the last token, never a wrapped one, nor the padding of a table."""
    h, w = heads.exact_head(100, 16, 1)
    more = more | ({"bias_values": jnp.array([5.0, 1.0])} if name == "bias_tokens" else {})

    @jax.jit
    def law(token):
        processors = Processors(**{name: jnp.stack([token, 4])}, **more)
        return gumbeljax.processed_log_probs(h, w, valid_vocab=90, processors=processors)

    nothing = law(-1)
    assert not np.array_equal(nothing, gumbeljax.processed_log_probs(h, w, valid_vocab=90))  # token 4 counts
    for token in (90, 99, 100, 99_999, -5, 2**31 - 1, -(2**31)):
        np.testing.assert_array_equal(law(token), nothing)


def test_lists_of_the_wrong_kind_are_refused():
    h, w = heads.pinned_head(np.zeros(100), rows=2)
    draw = lambda **p: gumbeljax.sample(h, w, jax.random.key(0), processors=Processors(**p))  # noqa: E731
    for tokens in ([1.5], np.array([True]), ["7"]):
        with pytest.raises(TypeError, match=r"^banned_tokens must be integers"):
            draw(banned_tokens=tokens)
    for tokens in (5, np.zeros((3, 2), int), np.zeros((1, 2), int), np.zeros((2, 1, 2), int)):
        with pytest.raises(ValueError, match=r"^banned_tokens must be \[n\] or \[2, 'n'\]"):
            draw(banned_tokens=tokens)
    with pytest.raises(ValueError, match=r"^bias_tokens and bias_values must be given together"):
        draw(bias_tokens=[1])
    with pytest.raises(ValueError, match=r"^bias_values must have the shape of bias_tokens, \[2\]; got \[3\]"):
        draw(bias_tokens=[1, 2], bias_values=[1.0, 2.0, 3.0])
    with pytest.raises(ValueError, match=r"^end_tokens and min_new_tokens must be given together"):
        draw(end_tokens=[1])
    with pytest.raises(ValueError, match=r"^num_new_tokens must be given with min_new_tokens"):
        draw(end_tokens=[1], min_new_tokens=2)
    with pytest.raises(ValueError, match=r"^counts must be given with penalties"):
        draw(presence_penalty=1.0)
    for width in (99, 101):
        with pytest.raises(ValueError, match=rf"^counts must be \[2, 100\].*got \[2, {width}\]"):
            draw(presence_penalty=1.0, counts=count_tokens(np.zeros((2, 1), int), width))
    with pytest.raises(ValueError, match=r"^counts must be \[2, 100\].*got \[3, 100\]"):
        draw(presence_penalty=1.0, counts=count_tokens(np.zeros((3, 1), int), 100))
    with pytest.raises(TypeError, match=r"^processors must be a gumbeljax.Processors; got dict"):
        gumbeljax.sample(h, w, jax.random.key(0), processors={"banned_tokens": [1]})


# L-4: nothing is allowed


@SAME_TOKEN
@pytest.mark.parametrize("way", ["allowed", "banned", "bias", "ends"])
def test_a_row_that_processors_leave_nothing_is_marked(route, way):
    rows, vocab, everything = 3, 6, [0, 1, 2, 3, 4, 5]
    options = {
        "allowed": Options(allowed=[everything, [], everything]),
        "banned": Options(banned=[[], everything, []]),
        "bias": Options(sparse_bias=[[], [(v, -np.inf) for v in everything], []]),
        "ends": Options(end_tokens=[everything] * 3, min_new=[0, 1, 0]),
    }[way]
    processors = knobs.processors_of(options, vocab, rows)
    for t in (0.0, 1.0):
        token, log_prob = route(
            np.zeros((rows, vocab), np.float32), routes.keys_of(0, rows), jnp.full(rows, t), processors=processors
        )
        np.testing.assert_array_equal(np.asarray(token) == -1, [False, True, False])
        if log_prob is not None:
            np.testing.assert_array_equal(np.isnan(log_prob), [False, True, False])


def test_an_empty_list_of_allowed_tokens_allows_none():
    h, w = heads.pinned_head(np.zeros(20), rows=2)
    draw = lambda **p: gumbeljax.sample(h, w, jax.random.key(0), processors=Processors(**p)).tolist()  # noqa: E731
    assert draw(allowed_tokens=[]) == [-1, -1]
    assert draw(banned_tokens=list(range(19)), end_tokens=[], min_new_tokens=2, num_new_tokens=0) == [19, 19]


# L-8: masks of another width


@pytest.mark.parametrize("shape", [(9,), (11,), (2, 9), (1, 10), (3, 10), (320,), (300,)])
def test_packed_masks_of_another_width_are_refused(shape):
    """A head of 320 tokens takes 10 words; a grammar of 300 tokens has 10 words too, whose last bits forbid the rest."""
    h, w = heads.pinned_head(np.zeros(320), rows=2)
    with pytest.raises(
        ValueError, match=r"^mask of packed bits must be \[10\] or \[2, 10\], one bit for each of the 320 tokens"
    ):
        gumbeljax.sample(h, w, jax.random.key(0), mask=np.full(shape, -1, np.int32))


def test_a_packed_mask_of_a_narrower_grammar_forbids_the_rest():
    h, w = heads.pinned_head(np.zeros(320), rows=2)
    words = np.full(10, -1, np.int32)
    words[9] = (1 << 12) - 1
    assert np.flatnonzero(gumbeljax.kept_tokens(h, w, mask=words)[1]).tolist() == list(range(300))


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int16, np.float32])
def test_a_mask_of_another_kind_is_refused(dtype):
    h, w = heads.pinned_head(np.zeros(32), rows=2)
    with pytest.raises(TypeError, match=r"^mask must be boolean, True for allowed tokens, or packed bits in uint32"):
        gumbeljax.sample(h, w, jax.random.key(0), mask=np.ones(32, dtype))
