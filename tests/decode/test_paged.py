"""``generate`` from a paged cache: the tokens of a contiguous one, pages that come back, an overflow that is said."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gumbeljax import kv_cache, log_prob, sample, sample_with_log_probs
from gumbeljax.decode import decode_steps, generate, prefill, request_keys, resume
from gumbeljax.decode.steps import Rules, run_chunk
from tests.decode.tiny import tiny_llama

PROMPTS = [[3, 1, 4], [3, 1, 4, 1, 5, 9, 2], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8], [3, 1, 4, 1, 5]]
LENGTHS = [len(prompt) for prompt in PROMPTS]
PADDED = np.array([prompt + [0] * (12 - len(prompt)) for prompt in PROMPTS])
KEY = jax.random.key(11)


def run(cache, prompts=PADDED, lengths=LENGTHS, key=KEY, num_tokens=10, **options):
    tiny = tiny_llama()
    options = {"lengths": lengths, "max_new_tokens": num_tokens} | options
    return generate(tiny.decode_fn, tiny.params, tiny.w, prompts, cache, key, **options)


@pytest.fixture(scope="module")
def contiguous():
    return run(tiny_llama().model.init_cache(4, 22))


@pytest.mark.parametrize(
    "page_size,options",
    [(1, {}), (5, {}), (64, {}), (5, {"prefill_size": 5}), (5, {"chunk_size": 3}), (1, {"prefill_size": 1})],
)
def test_paged_is_contiguous(contiguous, page_size, options):
    """Whole and chunked prefill, pages that the chunk of steps ends inside of."""
    out = run(tiny_llama().model.init_paged_cache(4, 22, page_size=page_size), **options)
    np.testing.assert_array_equal(out.tokens, contiguous.tokens)
    np.testing.assert_array_equal(out.state.tokens, contiguous.state.tokens)
    assert out.state.cache.pages.lengths.tolist() == out.state.lengths.tolist()


def test_a_prefix_of_all_prompts_is_shared(contiguous):
    """[3, 1, ...] in every prompt, pages of 1 and 2: the last prompt token of the shortest is not shared."""
    for page_size, shares_prefix, num_shared in ((1, True, 2), (2, True, 1), (1, False, 0), (4, True, 0)):
        tiny, cache = tiny_llama(), tiny_llama().model.init_paged_cache(4, 22, page_size=page_size)
        state = prefill(
            tiny.decode_fn, tiny.params, PADDED, cache, max_length=22, lengths=LENGTHS, shares_prefix=shares_prefix,
            prefill_size=5,
        )  # fmt: skip
        assert (np.asarray(state.cache.pages.ref_counts) == 4).sum() == num_shared
        out = resume(tiny.decode_fn, tiny.params, tiny.w, state, KEY, max_new_tokens=10)
        np.testing.assert_array_equal(out.tokens, contiguous.tokens)


def test_rows_that_end_give_their_pages_back(contiguous):
    # Every row has end tokens of its own: the first and the third theirs, the others none.
    ends = [[int(contiguous.tokens[0, 2])], [-2], [int(contiguous.tokens[2, 1])], [-2]]
    out = run(tiny_llama().model.init_paged_cache(4, 22, page_size=2), eos_tokens=ends)
    pages = out.state.cache.pages
    is_finished = np.asarray(out.state.is_finished)
    assert is_finished.tolist() == [True, False, True, False]
    assert (np.asarray(pages.lengths)[is_finished] == 0).all()
    held = -(-np.asarray(out.state.lengths) // 2)
    shared = 1  # [3, 1] of all rows
    assert int(pages.num_free) == 44 - held[~is_finished].sum() + shared * ((~is_finished).sum() - 1)


def test_a_pool_that_is_too_small_is_an_error_and_overwrites_nothing():
    cache = tiny_llama().model.init_paged_cache(4, 22, page_size=4, num_pages=13)
    with pytest.raises(ValueError, match=r"cache must have room .* got 13 pages of 4 slots, .* rows \[.*\] outgrew"):
        run(cache, shares_prefix=False)
    tiny = tiny_llama()
    cache = tiny.model.init_paged_cache(4, 22, page_size=4, num_pages=9)
    state = prefill(tiny.decode_fn, tiny.params, PADDED, cache, max_length=22, lengths=LENGTHS, shares_prefix=False)
    before = [np.array(x) for x in jax.tree.leaves(state.cache)]
    steps = jax.jit(lambda state: decode_steps(tiny.decode_fn, tiny.params, tiny.w, state, KEY, num_steps=10))
    state, _ = steps(state)
    flagged = np.asarray(state.cache.pages.has_overflowed)
    assert flagged.any()
    # A row without room rests; its tokens and all that the cache held are what they were.
    np.testing.assert_array_equal(state.lengths, np.where(flagged, LENGTHS, np.array(LENGTHS) + 10))
    after, tables = state.cache.keys[0], before[-6]
    for row, length in enumerate(LENGTHS):
        for p in range(length):
            np.testing.assert_array_equal(after[tables[row, p // 4], p % 4], before[0][tables[row, p // 4], p % 4])


@pytest.mark.parametrize("change", [{"batch": 3}, {"max_length": 10}])
def test_a_cache_of_another_shape_is_refused(change):
    with pytest.raises(ValueError, match="cache must have 4 rows of at least 22 slots, got"):
        run(tiny_llama().model.init_paged_cache(**{"batch": 4, "max_length": 22, "page_size": 4} | change))


def test_log_probs_come_out(contiguous):
    """model_log_prob of each token is log_prob of a full pass; after the end NaN."""
    tiny, end = tiny_llama(), int(contiguous.tokens[1, 4])
    out = run(
        tiny.model.init_paged_cache(4, 22), eos_tokens=[end], pad_token=52, temperature=jnp.array([1.0, 0.7, 0.0, 1.0]),
        sample_fn=sample_with_log_probs, chunk_size=3,
    )  # fmt: skip
    np.testing.assert_array_equal(out.draws.token, out.tokens)
    positions = jnp.broadcast_to(jnp.arange(22), (4, 22))
    texts = jnp.maximum(out.state.tokens, 0)
    h, _ = jax.jit(tiny.decode_fn)(tiny.params, texts, positions, tiny.model.init_cache(4, 22))
    expected = log_prob(h[:, :-1], tiny.w, texts[:, 1:])
    for i in range(4):
        n = int(out.num_tokens[i])
        got = np.asarray(out.draws.model_log_prob[i])
        np.testing.assert_allclose(got[:n], expected[i, LENGTHS[i] - 1 :][:n], atol=1e-5)
        assert np.isnan(got[n:]).all()
    assert (np.asarray(out.num_tokens) < 10).any()


def test_options_may_depend_on_the_text(contiguous):
    """A constraint as a function of the state: no token may follow itself or the one before it."""

    def options_fn(state):
        rows = jnp.arange(state.tokens.shape[0])
        mask = jnp.ones((rows.size, 53), bool)
        for back in (1, 2):
            mask = mask.at[rows, state.tokens[rows, state.lengths - back]].set(False)
        return {"mask": mask}

    out = run(tiny_llama().model.init_paged_cache(4, 22), options_fn=options_fn, temperature=0.5)
    for i, length in enumerate(LENGTHS):
        text = out.state.tokens[i, length - 2 : length + 10].tolist()
        assert all(text[j] not in text[j - 2 : j] for j in range(2, 12))


def test_one_trace_for_prompts_and_one_for_steps_in_pages():
    tiny, traces = tiny_llama(), []

    def counted(params, tokens, positions, cache):
        traces.append(tokens.shape)
        return tiny.decode_fn(params, tokens, positions, cache)

    for seed, temperature in ((0, 1.0), (1, 0.0)):
        generate(
            counted, tiny.params, tiny.w, PADDED, tiny.model.init_paged_cache(4, 30, page_size=3), jax.random.key(seed),
            lengths=LENGTHS, max_new_tokens=18, chunk_size=4, prefill_size=4, temperature=temperature, shares_prefix=False,
        )  # fmt: skip
    assert sorted(traces) == [(4, 1), (4, 4)]


@pytest.mark.parametrize("is_paged", [True, False])
def test_a_chunk_copies_no_keys_and_values(is_paged):
    """Donated: the same buffers after the chunk as before it, and no copy of one in what XLA compiled."""
    tiny = tiny_llama()
    cache = tiny.model.init_paged_cache(4, 22, page_size=4) if is_paged else tiny.model.init_cache(4, 22)
    state = prefill(tiny.decode_fn, tiny.params, PADDED, cache, max_length=22, lengths=LENGTHS)
    rules = Rules(jnp.full(4, 22, jnp.int32), None, jnp.zeros(0, jnp.int32))
    arguments = (tiny.decode_fn, tiny.params, tiny.w, state, request_keys(KEY, 4), rules, {})
    fixed = {"num_steps": 6, "pad_token": 0, "sample_fn": sample, "options_fn": None, "frees_pages": True,
             "copies_shared": False}
    text = run_chunk.lower(*arguments, **fixed).compile().as_text()
    shape = f"f32[{','.join(map(str, state.cache.keys[0].shape))}]"
    assert shape in text  # so that the next line can fail
    assert not re.findall(rf"= {re.escape(shape)}\S* copy\S*\(.*", text)

    def buffers(cache):
        return [x.unsafe_buffer_pointer() for x in (*cache.keys, *cache.values)]

    before = buffers(state.cache)
    after, _ = run_chunk(*arguments, **fixed)
    assert buffers(after.cache) == before
    assert all(x.is_deleted() for x in jax.tree.leaves(state))


def test_particles_fork_inside_a_loop():
    """Forked rows go on as copies: the tokens of the ancestor's own keys, whichever row they sit in."""
    tiny = tiny_llama()
    keys = jax.random.split(KEY, 4)
    state = prefill(
        tiny.decode_fn, tiny.params, PADDED, tiny.model.init_paged_cache(4, 22, page_size=4, num_pages=20), max_length=22,
        lengths=LENGTHS,
    )  # fmt: skip
    ancestors = jnp.array([2, 2, 1, 1])

    @jax.jit
    def go(state):
        state, _ = decode_steps(tiny.decode_fn, tiny.params, tiny.w, state, keys, num_steps=3)
        cache = kv_cache.fork(state.cache, ancestors)
        state = jax.tree.map(lambda x: x[ancestors], state._replace(cache=None))._replace(cache=cache)
        return decode_steps(tiny.decode_fn, tiny.params, tiny.w, state, keys[ancestors], num_steps=5)

    state, tokens = go(state)
    kv_cache.check_overflow(state.cache)
    whole = run(tiny.model.init_cache(4, 20), key=keys, num_tokens=8)
    np.testing.assert_array_equal(tokens, whole.tokens[ancestors][:, 3:8])
    # Twins wrote the same tokens into pages of their own.
    tables, lengths = np.asarray(state.cache.pages.block_tables), np.asarray(state.lengths)
    for a, b in ((0, 1), (2, 3)):
        assert tables[a, (lengths[a] - 1) // 4] != tables[b, (lengths[b] - 1) // 4]


@pytest.mark.parametrize("chunk_size", [2, 8])
def test_a_forked_state_is_resumed_like_its_ancestors(chunk_size):
    """The rows share a partly filled page: the first chunk copies it, and only that one has code for copies."""
    tiny = tiny_llama()
    keys = jax.random.split(KEY, 4)
    cache = tiny.model.init_paged_cache(4, 22, page_size=4, num_pages=24)
    state = prefill(tiny.decode_fn, tiny.params, PADDED, cache, max_length=22, lengths=LENGTHS)
    assert not kv_cache.shares_last_page(state.cache)
    ancestors = jnp.array([2, 2, 1, 1])
    forked = jax.tree.map(lambda x: x[ancestors], state._replace(cache=None))
    state = forked._replace(cache=kv_cache.fork(state.cache, ancestors))
    assert kv_cache.shares_last_page(state.cache)
    out = resume(tiny.decode_fn, tiny.params, tiny.w, state, keys[ancestors], max_new_tokens=8, chunk_size=chunk_size)
    assert not kv_cache.shares_last_page(out.state.cache)
    whole = run(tiny.model.init_cache(4, 20), key=keys, num_tokens=8)
    np.testing.assert_array_equal(out.tokens, whole.tokens[ancestors])
