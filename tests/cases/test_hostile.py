"""Inputs that a hostile reader tried: plainly bad ones get one sentence, odd good ones the documented answer."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

import gumbeljax
from gumbeljax import Processors, bandit, groups, kv_cache, reference, smc, speculative
from gumbeljax.decode import Request, decode_steps, generate, prefill, serve
from gumbeljax.decode.requests import checked
from gumbeljax.speculative import Law

KEY = jax.random.key(0)
H, W = jnp.ones((2, 4)), jnp.arange(20.0).reshape(5, 4) / 8
BANDITS = (bandit.ucb1, bandit.thompson, bandit.epsilon_greedy, bandit.kl_ucb, bandit.moss, bandit.discounted_ucb,
           lambda arms: bandit.sliding_window_ucb(arms, window=3),
           lambda arms: bandit.sliding_window_ucb(arms, window=3, over="rounds"))
STATE = smc.init(jnp.zeros(3), jnp.zeros(3))


def seen():
    return gumbeljax.count_tokens(jnp.array([[1, 2], [4, 4]]), vocab=5).add(jnp.array([2, 3]))


def test_gradients_of_penalties():
    counts, tokens = seen(), jnp.array([2, 0])
    given = jnp.array([1.5, 0.3, 0.2])

    def ours(x):
        processors = Processors(repetition_penalty=x[0], frequency_penalty=x[1], presence_penalty=x[2], counts=counts)
        return gumbeljax.log_prob(H, W - 1, tokens, processors=processors).sum()

    def plain(x):
        logits = H @ (W - 1).T
        repeated = jnp.where(logits > 0, logits / x[0], logits * x[0])
        logits = jnp.where(counts.in_prompt | (counts.output > 0), repeated, logits)
        logits = logits - x[1] * counts.output - x[2] * (counts.output > 0)
        return jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, None], axis=1).sum()

    np.testing.assert_allclose(jax.grad(ours)(given), jax.grad(plain)(given), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"top_k": 3}], ids=["plain", "filters"])
def test_a_draft_without_tokens(options):
    target = Law(jnp.zeros((2, 1, 9)), **options)
    assert speculative.verify(target, None, np.zeros((2, 0), int), KEY).tokens.shape == (2, 1)
    assert speculative.verify(target, Law(jnp.zeros((2, 0, 9)), **options), [[], []], KEY).tokens.shape == (2, 1)
    assert speculative.verify_coupled(target, [[], []], KEY).tokens.shape == (2, 1)


@pytest.mark.parametrize("lens", [2**40, np.array([2**33, 7]), np.array([2**32 - 1, 2**31], np.uint32)], ids=str)
def test_draft_lens_that_would_wrap_around(lens):
    logits = jnp.zeros((2, 3, 9))
    out = speculative.verify(Law(logits), Law(logits[:, :2]), jnp.zeros((2, 2), int), KEY, draft_lens=lens)
    assert out.num_accepted.tolist() == [2, 2]


@pytest.mark.parametrize("temperature", [1e-300, 1e-45, 1e-38, 1e39, 1e300])
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.float32], ids=["float16", "float32"])
def test_relaxation_at_temperatures_at_the_ends_of_float32(dtype, temperature):
    out = gumbeljax.gumbel_softmax(jnp.zeros((8, 33), dtype), KEY, temperature=temperature).astype(jnp.float32)
    np.testing.assert_allclose(out.sum(-1), 1, atol=1e-2)


@pytest.mark.parametrize("top_k", [2**31, 10**30, np.int64(2**40), np.uint64(2**63)], ids=str)
def test_top_k_wider_than_32_bits_is_off(top_k):
    assert gumbeljax.kept_tokens(H, W, top_k=top_k).all()


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.uint16, np.int16], ids=lambda d: np.dtype(d).name)
def test_ids_of_narrow_integers(dtype):
    """A vocabulary, or a pool, beyond their range: as the same numbers in int32, traced or known."""
    vocab, ids = 70_000, np.array([[3, 100], [0, -1 if np.dtype(dtype).kind == "i" else 7]])
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(2, vocab)), jnp.float32)
    counts = gumbeljax.count_tokens(ids, vocab)
    cache = kv_cache.append(kv_cache.init_paged(1, 2, 512, 1, 4, page_size=256), jnp.array([100, 10]))

    def calls(ids):
        allowed = gumbeljax.sample_logits(logits, KEY, processors=Processors(allowed_tokens=ids))
        grown = kv_cache.append(cache, ids[:, 1])
        return (gumbeljax.count_tokens(ids, vocab), counts.add(ids), speculative.position_counts(counts, ids), allowed,
                grown, kv_cache.truncate(grown, ids[:, 0]), kv_cache.fork(grown, ids[:, 1]),
                kv_cache.select_rows(grown, ids[:, 1]))

    for run in (calls, jax.jit(calls)):
        jax.tree.map(np.testing.assert_array_equal, run(jnp.asarray(ids, dtype)), run(jnp.asarray(ids, jnp.int32)))


def test_integers_of_64_bits_are_never_cut():
    """NumPy keeps them: beyond 32 bits a token is nothing, a count the largest, and a number that number."""
    hot, wide = np.int64(2**32), np.array([2**32 + 1, 1])
    tokens = gumbeljax.sample(H, 100 * W, jax.random.split(KEY, 2), temperature=hot, num_samples=50)
    assert len(np.unique(tokens)) == 5
    log_probs = [gumbeljax.log_prob(H, W, [1, 1], temperature=t) for t in (wide, wide.astype(np.float32))]
    np.testing.assert_array_equal(*log_probs)
    late = Processors(end_tokens=[4], min_new_tokens=wide, num_new_tokens=1)
    assert gumbeljax.greedy(H, W, processors=late).tolist() == [3, 4]
    counts = gumbeljax.count_tokens([[1], [2]], 5, lengths=wide)
    assert counts.in_prompt.any(axis=1).tolist() == [True, True]
    assert not counts.add(np.array([2**32 + 3, -(2**40)])).output.any()
    assert not speculative.position_counts(counts, np.array([[2**32 + 3], [2**40]])).output.any()
    cache = kv_cache.append(kv_cache.init_paged(1, 2, 8, 1, 4, page_size=4), np.array([2**32 + 3, 1]))
    assert cache.pages.has_overflowed.tolist() == [True, False] and cache.pages.lengths.tolist() == [0, 1]
    assert kv_cache.truncate(cache, wide).pages.lengths.tolist() == [0, 1]
    assert kv_cache.fork(cache, wide).pages.lengths.tolist() == [0, 1]
    assert kv_cache.select_rows(cache, wide).pages.lengths.tolist() == [0, 1]


def test_what_lies_behind_the_length_of_a_prompt_is_not_looked_at():
    for pad in (-100, 99, 2**40):
        def call(lengths, pad=pad):
            return gumbeljax.count_tokens([[3, pad]], 5, lengths=lengths).in_prompt

        for run in (call, lambda lengths, call=call: jax.jit(lambda: call(lengths))(), jax.jit(call)):
            assert run(np.array([1])).tolist() == [[False, False, False, True, False]]
        for run in (call, lambda lengths, call=call: jax.jit(lambda: call(lengths))()):
            with pytest.raises(ValueError, match=rf"^prompt must name token ids from 0 to 4 .* got {pad}"):
                run([2])


@pytest.mark.parametrize("make", BANDITS)
def test_a_round_that_says_nothing_changes_nothing(make):
    arms = bandit.Arms([2, 4])
    new, start = make(arms), make(arms).init()
    for accepted in (jnp.nan, -1):
        jax.tree.map(np.testing.assert_array_equal, new.update(start, 0, accepted, 2), start)


def test_a_window_goes_on_after_2_to_the_30_plays():
    new = bandit.sliding_window_ucb(bandit.Arms([2, 4]), window=3)
    old = new.init()._replace(counts=jnp.array([2**30 - 1, 5], jnp.int32))
    state = new.update(old, 0, 2, 2)
    assert int(state.counts[0]) % 3 == 2**30 % 3 and 2**28 < int(state.counts[0]) < 2**30
    assert float(state.rewards[0, (2**30 - 1) % 3]) > 0


def test_coupled_acceptance_without_a_law():
    assert jnp.isnan(speculative.coupled_acceptance(jnp.full(20, -jnp.inf), jnp.zeros(20)))


def test_promotions_that_users_forbid():
    def results():
        chosen = [(make(bandit.Arms([1, 2])), 0) for make in BANDITS]
        return [gumbeljax.sample(H.astype(jnp.bfloat16), W, KEY, temperature=jnp.ones(2)),
                gumbeljax.gumbel_softmax(H.astype(jnp.bfloat16), KEY, axis=0),
                groups.merge(groups.summarize(H, KEY), groups.summarize(H, KEY, first_id=16)),
                groups.merge_log_mass(groups.Candidate(jnp.zeros((3, 2), int), jnp.zeros((3, 2))), KEY),
                *(new.select(new.update(new.init(), arm, 1, 1), KEY) for new, arm in chosen)]

    plain, positions = results(), jnp.array([[0], [2]])

    def more():
        """What is named in modules of its own: caches, the loop, the readable references."""
        decode_fn, new = lambda params, tokens, _, cache: (params[tokens], cache), lambda: kv_cache.init_paged(1, 2, 8, 1, 4)
        grown = kv_cache.append(new(), jnp.array([3, 1]))
        slots = kv_cache.locate(grown, positions)
        keys = kv_cache.write(grown.keys[0], jnp.ones((2, 1, 1, 4)), slots)
        state = prefill(decode_fn, jnp.eye(5, 4), np.ones((2, 1), int), (), max_length=4)
        requests = [Request([1, 2], KEY, 3, sampling={"temperature": 0.5}),
                    Request([1], KEY, 2, min_new_tokens=1, eos_tokens=3)]
        return [kv_cache.truncate(grown, jnp.array([2, 0])), kv_cache.fork(grown, jnp.array([1, -1])),
                kv_cache.release(grown, jnp.array([True, False])), kv_cache.select_rows(grown, jnp.array([1])),
                kv_cache.attend(jnp.ones((2, 1, 2, 4)), keys, keys, slots, implementation="xla"),
                decode_steps(decode_fn, jnp.eye(5, 4), W, state, KEY, num_steps=3, temperature=0.5)[1],
                generate(decode_fn, jnp.eye(5, 4), W, np.ones((2, 2), int), new(), KEY, max_new_tokens=3,
                         min_new_tokens=1, eos_tokens=[[3, -2], [4, 2]], repetition_penalty=1.5).tokens,
                [out.tokens for out in serve(decode_fn, jnp.eye(5, 4), W, requests, new(), temperature=1.0)],
                *(draw(H @ W.T, KEY) for draw in (reference.inverse_cdf, reference.gumbel_max, reference.grouped_gumbel_max)),
                reference.grouped_gumbel_max(H @ W.T, KEY, temperature=jnp.ones(2))]

    plain += more()
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        strict = results() + more()
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(strict), strict=True):
        np.testing.assert_array_equal(a, b)


def test_lists_that_went_into_jit():
    ban = jax.jit(lambda processors: gumbeljax.greedy(H, W, processors=processors))
    assert ban(Processors(banned_tokens=[4, 3])).tolist() == [2, 2]


def test_a_list_of_traced_thresholds():
    state = smc.init(jnp.zeros((2, 3)), jnp.array([[0.0, -1.0, -1.0]] * 2))
    resampled = jax.jit(lambda x: smc.resample(state, KEY, threshold=[x, 0.0])[1].resampled)(1.0)
    assert resampled.tolist() == [True, False]


def test_a_list_of_traced_numbers():
    law = lambda a: Law(jnp.ones((2, 3, 9)).at[..., 0].set(2), temperature=[a, 0.0])  # noqa: E731
    out = jax.jit(lambda a: speculative.verify(law(a), None, jnp.zeros((2, 2), int), KEY))(0.5)
    want = speculative.verify(law(0.5), None, jnp.zeros((2, 2), int), KEY)
    np.testing.assert_array_equal(out.tokens, want.tokens)
    counts = jax.jit(lambda a: gumbeljax.count_tokens([[a, 1]], 5).add([a]))(3)
    assert counts.output.tolist() == [[0, 0, 0, 1, 0]] and counts.in_prompt[0].tolist() == [False, True, False, True, False]


def test_no_nan_is_made_on_the_way():
    """Groups without mass: whoever looks for NaN with checkify finds none."""
    w, mask = jnp.eye(64, 4) + 0.1, jnp.arange(64) < 20
    for options in ({"mask": mask}, {"mask": mask, "top_k": 3}, {"top_p": 0.3}, {"mask": mask, "temperature": 0.0}):
        draw = functools.partial(gumbeljax.sample_with_log_probs, w=w, key=KEY, **options)
        error, out = checkify.checkify(draw, errors=checkify.float_checks)(H)
        assert error.get() is None and (out.token >= 0).all()


def test_no_nan_is_made_for_groups_that_have_a_law():
    with jax.debug_nans(True):
        assert (groups.summarize(H, KEY).token >= 0).all()
        assert smc.log_evidence(STATE) == 0.0


def test_nothing_to_summarize_and_leaves_of_numpy():
    empty = groups.summarize(jnp.zeros((0, 3, 20)), KEY)
    assert [x.shape for x in empty] == [(0, 3)] * 3 and empty.token.dtype == jnp.int32
    assert jax.jit(lambda i: smc.gather(np.arange(3), i))(jnp.array([2, 0])).tolist() == [2, 0]
    state = smc.init(np.arange(3), jnp.array([-jnp.inf, 0, -jnp.inf]))
    moved = jax.jit(lambda key: smc.resample(state._replace(particles=np.arange(3)), key)[0])(KEY)
    assert moved.particles.tolist() == [1, 1, 1]


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2], ids=lambda d: jnp.dtype(d).name)
def test_relaxation_in_8_bits(dtype):
    logits = jax.random.normal(KEY, (400, 7)).astype(dtype)
    soft, hard = (gumbeljax.gumbel_softmax(logits, KEY, hard=hard) for hard in (False, True))
    assert soft.dtype == dtype
    tokens = gumbeljax.reference.gumbel_max(logits, KEY)
    for x in (soft, hard):
        np.testing.assert_array_equal(x.astype(jnp.float32).argmax(-1), tokens)


TOY = (lambda params, tokens, _, cache: (params[tokens], cache), jnp.eye(50), jnp.eye(50))
WRONG = [({"temperature": -1.0}, "temperature must be finite"), ({"top_p": 1.5}, "top_p must be between"),
         ({"banned_tokens": [99]}, "banned_tokens must name token ids from 0 to 49"), ({"top_k": -2}, "top_k must be at least"),
         ({"repetition_penalty": 0.0}, "repetition_penalty must be finite and positive")]


@pytest.mark.parametrize(("options", "message"), WRONG, ids=lambda x: str(x)[:20])
def test_known_values_are_refused_by_the_loop(options, message):
    """As `sample` refuses them, though the loop traces them; a request's own, too."""
    with pytest.raises(ValueError, match=f"^{message}"):
        generate(*TOY, np.ones((2, 1), int), (), KEY, max_new_tokens=2, **options)
    with pytest.raises(ValueError, match=f"^{message}"):
        serve(*TOY, [], kv_cache.init_paged(1, 2, 8, 1, 4), **options)
    neutral = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "banned_tokens": [-1], "repetition_penalty": 1.0}
    defaults = {name: neutral[name] for name in options}
    good, bad = Request([1], KEY, 2), Request([1], KEY, 2, sampling=options)
    assert list(serve(*TOY, [good], kv_cache.init_paged(1, 2, 8, 1, 4), **defaults))
    with pytest.raises(ValueError, match=f"^sampling of request 1: {message}"):
        list(serve(*TOY, [good, bad], kv_cache.init_paged(1, 2, 8, 1, 4), **defaults))


@pytest.mark.parametrize("top_k", [2**31, 2**32 + 1, np.int64(2**32 + 1)], ids=str)
def test_top_k_wider_than_32_bits_is_off_in_the_loop(top_k):
    def drawn(**options):
        return generate(*TOY, np.ones((2, 1), int), (), KEY, max_new_tokens=9, **options).tokens

    def served(default, own):
        request = Request([1], KEY, 9, sampling={"top_k": own} if own is not None else {})
        outs = serve(*TOY, [request], kv_cache.init_paged(1, 2, 16, 1, 4), top_k=default)
        return np.concatenate([out.tokens for out in outs])

    np.testing.assert_array_equal(drawn(top_k=top_k), drawn())
    for default, own in ((top_k, None), (0, top_k)):
        np.testing.assert_array_equal(served(default, own), served(0, None))


def test_padded_end_tokens_in_an_eager_loop():
    """The documented padding, -2, beside a minimum length."""
    state = prefill(*TOY[:2], np.ones((2, 1), int), (), max_length=9)
    run = functools.partial(decode_steps, *TOY, key=KEY, num_steps=5, eos_tokens=[[5, -2], [6, 7]],
                            min_lengths=jnp.array([3, 3]))
    with jax.disable_jit():
        eager = run(state)[1]
    np.testing.assert_array_equal(eager, jax.jit(run)(state)[1])


def looped(**options):
    return lambda: generate(*TOY, np.ones((2, 3), int), (), KEY, **{"max_new_tokens": 2, **options})


def processed(**fields):
    return lambda: gumbeljax.greedy(H, W, processors=Processors(**fields))


BAD = [
    (processed(banned_tokens=[[1], [1, 2]]), "banned_tokens must be lists of one"),
    (processed(repetition_penalty=2.0, counts=[1]), "counts must be a"),
    (lambda: gumbeljax.count_tokens(jnp.zeros((2, 3), int), vocab=5, lengths=[1, 2, 3]), "lengths must be a scalar or"),
    (lambda: gumbeljax.count_tokens(jnp.zeros((2, 3), int), vocab=5.0), "vocab must be a Python int"),
    (lambda: gumbeljax.greedy(H, W, mask=np.array([31])), "mask must be boolean.* int64"),
    (lambda: gumbeljax.count_tokens([[1, 2]], vocab=5, lengths=[1.5]), "lengths must be integers"),
    (processed(repetition_penalty=1e39, counts=seen()), "repetition_penalty must be"),
    (processed(repetition_penalty=1e-40, counts=seen()), "repetition_penalty must be"),
    (processed(presence_penalty=1e39, counts=seen()), "presence_penalty must be"),
    (processed(presence_penalty=1.0, counts=seen()._replace(output=H)),
     "counts must be .*; got .2, 5., .2, 4."),
    (processed(presence_penalty=1.0, counts=seen()._replace(output=jnp.ones((2, 5)))),
     "counts must be boolean .in_prompt. and integers"),
    (processed(end_tokens=[1], min_new_tokens=2, counts=gumbeljax.count_tokens([1], 5)),
     r"counts must be \[2, 5\]"),  # one row's would be everybody's
    (processed(end_tokens=[1], min_new_tokens=np.nan, num_new_tokens=0),
     "min_new_tokens must be an integer"),
    (lambda: gumbeljax.kept_tokens(H, W, groups=True), "a law over the vocabulary takes the options"),
    (lambda: gumbeljax.choose_implementation(H, W, foo=1), "choose_implementation takes the options"),
    (lambda: reference.grouped_gumbel_max(H, KEY, temperature="a"), "temperature must be a number"),
    (lambda: reference.gumbel_max(None, KEY), "logits must be an array"),
    (lambda: speculative.verify(Law(H, W), None, [1.0], KEY), "draft_tokens must be integers"),
    (lambda: speculative.verify(Law(H, W, temperature=[[1], [1, 2]]), None, [1], KEY), "temperature must be .*; got list"),
    (lambda: speculative.verify(Law(H[None], W, temperature=[[1], [1, 2]]), None, [[1]], KEY), "temperature must be lists of"),
    (lambda: speculative.verify(Law(H, implementation="triton"), None, [1], KEY), "target must have no vocab_axis and no"),
    (lambda: smc.log_weight(jnp.zeros(3), jnp.zeros(3), alpha=-1.0), "alpha must be positive and finite; got -1"),
    (lambda: smc.first_token_keys(KEY, 2, alpha=[1.0, 2.0]), "alpha must be one number or"),
    (lambda: smc.cut_tokens(jnp.zeros((2, 3), int), jnp.zeros(2, bool), 9, eos=2.0), "eos must be integers"),
    (lambda: smc.resample(STATE, KEY, resample_fn=lambda x, key, mask: jnp.zeros(2, int)), "resample_fn must return integers"),
    (lambda: bandit.ucb1(bandit.Arms([[1], [1, 2]])), "arms.draft_len must be lists of one length"),
    (lambda: kv_cache.init_contiguous(1, 2, -8, 1, 2), "max_length must be at least 1"),
    (lambda: kv_cache.select_rows(kv_cache.init_paged(1, 2, 8, 1, 2), [0.0]), "rows must be integers"),
    (lambda: kv_cache.locate(kv_cache.init_paged(1, 2, 8, 1, 2), jnp.zeros(2, int)), "positions must be integers"),
    (looped(lengths=[1.5, 2]), "lengths must be whole numbers"),
    (looped(max_new_tokens="2"), "max_new_tokens must be whole numbers"),
    (looped(eos_tokens=[[[1], [2]]]), "eos_tokens must be"),
    (looped(eos_tokens=[[1]] * 3), "eos_tokens must be"),
    (looped(stop=3, text_fn=str), "stop must be texts"),
    (looped(pad_token=1.5), "pad_token must be a Python int"),
    (looped(chunk_size=1.5), "chunk_size must be a Python int"),
    (looped(processors=3), "processors must be a"),
    (looped(precision=jax.lax.Precision.HIGH), "precision must be a number or an array"),
    (lambda: checked(Request([1], KEY, 3, sampling=None), 7), "sampling of request 7 must be a mapping"),
    (lambda: gumbeljax.gumbel_softmax(jnp.zeros((2, 0)), KEY), "logits must have at least one choice"),
    (lambda: gumbeljax.gumbel_softmax(H, KEY, axis=(0, 1)), "axis must name an axis"),
    (lambda: gumbeljax.gumbel_softmax(H, KEY, hard=1), "hard must be True or False"),
    (lambda: gumbeljax.gumbel_softmax(H, KEY, temperature="a"), "temperature must be an array or a number"),
    (lambda: speculative.position_keys(KEY, jnp.array([1, 2]), 3), "start must be integers"),
    (lambda: speculative.position_counts(seen(), jnp.zeros((3, 2), int)), "draft_tokens must be integers"),
    (lambda: speculative.acceptance(1.0, 1.0), "target_logits must be .*: put the vocabulary on the last axis"),
    (lambda: smc.resample(STATE, KEY, threshold=jnp.ones(3)), "threshold must be a scalar or"),
    (lambda: smc.resample(STATE, KEY, threshold=np.nan), "threshold must be a number; got nan"),
    (lambda: smc.log_weight(jnp.zeros((2, 3)), jnp.zeros((2, 3)), alpha=jnp.ones(3)), "alpha must be one number or"),
    (lambda: smc.log_weight(jnp.zeros((2, 4, 3)), jnp.zeros((2, 4, 3)), alpha=jnp.ones((2, 1))), "alpha must be one number or"),
    (lambda: smc.log_weight(jnp.zeros((2, 3)), jnp.zeros((2, 3)), kept=jnp.ones((2, 3))), "kept must be boolean"),
    (lambda: smc.log_weight(jnp.zeros((2, 3)), jnp.zeros((2, 3)), kept=jnp.ones((2, 1), bool)), "kept must be boolean"),
    (lambda: smc.log_weight(jnp.zeros(3), jnp.zeros(3), kept=jnp.ones((2, 3), bool)), "kept must be boolean"),
    (lambda: smc.cut_tokens(jnp.zeros((2, 3), int), jnp.zeros(2, int), 9), "is_done must be boolean"),
    (lambda: smc.cut_tokens(jnp.zeros((2, 3), int), jnp.zeros(2, bool), 1.5), "remaining must be integers"),
    (lambda: groups.merge_log_mass(groups.Candidate(jnp.zeros(0, int), jnp.zeros(0)), KEY), "candidates must have"),
    (lambda: checked(Request([1], KEY, 3.5), 7), "max_new_tokens of request 7 must be whole numbers"),
    (lambda: checked(Request([[1]], KEY, 3), 7), "prompt of request 7 must be one list"),
    (lambda: checked(Request([1], jax.random.split(KEY), 3), 7), "key of request 7 must be one key"),
    (lambda: checked(Request([1], KEY, 3, stop=[""]), 7), "stop of request 7 must be texts"),
    (lambda: checked(Request([1], KEY, 3, eos_tokens=[2**40]), 7), "eos_tokens of request 7 must be whole numbers of 32"),
    (lambda: checked(Request([1], KEY, 3, sampling={"temperature": "hot"}), 7), "temperature of request 7 must be numbers"),
]


@pytest.mark.parametrize(("call", "message"), BAD, ids=range(len(BAD)))
def test_one_sentence(call, message):
    with pytest.raises((ValueError, TypeError), match=f"^{message}"):
        call()


def test_counts_beyond_the_integers_of_float32():
    late = Processors(end_tokens=[4], min_new_tokens=2**24 + 1, num_new_tokens=2**24)
    assert gumbeljax.greedy(H, W).tolist() == [4, 4] and gumbeljax.greedy(H, W, processors=late).tolist() == [3, 3]


def test_more_accepted_than_drafted_is_all():
    arms = bandit.thompson(bandit.Arms([4, 4]))
    assert arms.update(arms.init(), 1, np.inf, 4).a.tolist() == [1.0, 5.0]


def test_a_dead_particle_stays_dead_whatever_its_potential():
    state = smc.init(jnp.zeros(2), jnp.array([0.0, -jnp.inf]), potential_fn=lambda x: jnp.array([0.0, jnp.inf]))
    assert state.log_weights.tolist() == [0.0, -np.inf]


def test_the_choice_takes_all_options_of_a_draw():
    assert gumbeljax.choose_implementation(H, W, num_samples=2, replace=False, row_offset=1) == "xla"
    assert gumbeljax.choose_implementation(H, W, method="categorical", mode="high") == "xla"


def test_one_end_token_and_one_stop_string_need_no_list():
    request = checked(Request([1, 2], KEY, 3, eos_tokens=2, stop="END"), 0)
    assert request.eos_tokens == (2,) and request.stop == ("END",)
