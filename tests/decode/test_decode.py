"""The decode loop: batched is solo, resumed is whole, rows end on their own, one trace for everything."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from gumbeljax import models
from gumbeljax.decode import decode_steps, generate, generation, prefill, resume, steps
from gumbeljax.sampling import sample

VOCAB, D_MODEL = 53, 16
PROMPTS = [[3, 1, 4], [1, 5, 9, 2, 6, 5, 3], [5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2], [0]]
WIDTH = 12
KEY = jax.random.key(11)


@pytest.fixture(scope="module")
def llama():
    config = models.LlamaConfig(
        vocab=VOCAB, d_model=D_MODEL, d_ff=24, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=4
    )
    model = models.Llama(config, rngs=nnx.Rngs(5))
    # Random embeddings are small: the scaled head makes the laws less than uniform, with a few nats of entropy.
    return model, *models.as_decode_fn(model), 2.0 * model.head()


def padded(prompts, pad=0, width=WIDTH):
    return np.array([prompt + [pad] * (width - len(prompt)) for prompt in prompts]), [len(prompt) for prompt in prompts]


def run(llama, prompts, keys, num_tokens=10, width=WIDTH, pad=0, **options):
    model, decode_fn, params, w = llama
    tokens, lengths = padded(prompts, pad, width)
    cache = model.init_cache(len(prompts), width + num_tokens)
    return generate(
        decode_fn, params, w, tokens, cache, keys, lengths=lengths, max_new_tokens=num_tokens, **options
    )  # fmt: skip


def test_every_token_is_the_sample_of_its_position(llama):
    """The law of the loop: token p of a request is sample(h, w, fold_in(request key, p)), h from a full pass."""
    model, decode_fn, params, w = llama
    keys = jax.random.split(KEY, len(PROMPTS))
    temperature = jnp.array([1.0, 0.7, 0.0, 1.5])
    out = run(llama, PROMPTS, keys, temperature=temperature)
    texts = out.state.tokens
    positions = jnp.broadcast_to(jnp.arange(texts.shape[1]), texts.shape)
    h, _ = jax.jit(decode_fn)(params, texts, positions, model.init_cache(*texts.shape))
    for step in range(10):
        rows, at = jnp.arange(len(PROMPTS)), out.state.lengths - 10 + step
        expected = sample(h[rows, at - 1], w, jax.vmap(jax.random.fold_in)(keys, at), temperature=temperature)
        np.testing.assert_array_equal(out.tokens[:, step], expected)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_batched_row_is_the_solo_row(llama, temperature):
    """CASES K-7: lengths 3, 7, 12 and 1; the pad id is also a real token and its value does not matter."""
    keys = jax.random.split(KEY, len(PROMPTS))
    batched = run(llama, PROMPTS, keys, temperature=temperature)
    assert batched.num_tokens.tolist() == [10] * len(PROMPTS)
    other_pad = run(llama, PROMPTS, keys, temperature=temperature, pad=9)
    np.testing.assert_array_equal(batched.tokens, other_pad.tokens)
    for i, prompt in enumerate(PROMPTS):
        solo = run(llama, [prompt], keys[i : i + 1], width=len(prompt), temperature=temperature)
        np.testing.assert_array_equal(solo.tokens[0], batched.tokens[i])
    # Another slot, other neighbours.
    order = np.array([2, 0, 3, 1])
    moved = run(llama, [PROMPTS[i] for i in order], keys[order], temperature=temperature)
    np.testing.assert_array_equal(moved.tokens, batched.tokens[order])


def test_temperature_is_per_row(llama):
    keys = jax.random.split(KEY, len(PROMPTS))
    mixed = run(llama, PROMPTS, keys, temperature=jnp.array([0.0, 1.0, 0.0, 1.0]))
    cold, warm = run(llama, PROMPTS, keys, temperature=0.0), run(llama, PROMPTS, keys, temperature=1.0)
    np.testing.assert_array_equal(mixed.tokens[0::2], cold.tokens[0::2])
    np.testing.assert_array_equal(mixed.tokens[1::2], warm.tokens[1::2])
    assert (cold.tokens != warm.tokens).any()


def test_one_key_for_a_batch_is_folded_with_the_row(llama):
    folded = jnp.stack([jax.random.fold_in(KEY, i) for i in range(len(PROMPTS))])
    one, many = run(llama, PROMPTS, KEY), run(llama, PROMPTS, folded)
    np.testing.assert_array_equal(one.tokens, many.tokens)
    raw = run(llama, PROMPTS, jax.random.key_data(folded))
    np.testing.assert_array_equal(raw.tokens, many.tokens)
    # Rows with equal prompts do not repeat each other (CASES C-4).
    same = run(llama, [PROMPTS[1]] * 4, KEY).tokens
    assert len({tuple(row) for row in same.tolist()}) == 4


@pytest.mark.parametrize("chunk_size", [1, 3, 16])
@pytest.mark.parametrize("split", [(12,), (5, 7), (1,) * 12])
def test_stopping_and_resuming_gives_the_same_tokens(llama, chunk_size, split):
    """CASES K-10: whole, 5 + 7, step by step, whatever the chunks."""
    model, decode_fn, params, w = llama
    tokens, lengths = padded(PROMPTS)
    state = prefill(decode_fn, params, tokens, model.init_cache(4, WIDTH + 12), max_length=WIDTH + 12, lengths=lengths)
    parts = []
    for num_tokens in split:
        out = resume(decode_fn, params, w, state, KEY, max_new_tokens=num_tokens, chunk_size=chunk_size)
        parts.append(out.tokens)
        state = out.state
    whole = run(llama, PROMPTS, KEY, num_tokens=12)
    np.testing.assert_array_equal(np.concatenate(parts, axis=1), whole.tokens)
    for i, prompt in enumerate(PROMPTS):
        kept = state.tokens[i, : state.lengths[i]].tolist()
        assert kept == prompt + whole.tokens[i].tolist()


@pytest.mark.parametrize("paged", [False, True])
def test_what_generate_leaves_room_for_is_resumed(llama, paged):
    model, decode_fn, params, w = llama
    tokens, lengths = padded(PROMPTS)
    cache = (model.init_paged_cache if paged else model.init_cache)(4, WIDTH + 12)
    first = generate(decode_fn, params, w, tokens, cache, KEY, lengths=lengths, max_new_tokens=5, max_length=WIDTH + 12)
    more = resume(decode_fn, params, w, first.state, KEY, max_new_tokens=7)
    both = np.concatenate([first.tokens, more.tokens], axis=1)
    np.testing.assert_array_equal(both, run(llama, PROMPTS, KEY, num_tokens=12).tokens)
    for bad in (WIDTH - 1, WIDTH + 4):
        with pytest.raises(ValueError, match=r"raise (it|max_length)\.$"):
            generate(decode_fn, params, w, tokens, model.init_cache(4, 32), KEY, max_new_tokens=5, max_length=bad)


def counting_model(vocab=32):
    """A model that says n + 1 after n: its hidden state is the one-hot of the next token."""

    def decode_fn(params, tokens, positions, cache):
        seen, calls = cache
        seen = seen.at[jnp.arange(tokens.shape[0])[:, None], positions].set(tokens, mode="drop")
        return params[(tokens + 1) % vocab], (seen, calls + 1)

    return decode_fn, 100.0 * jnp.eye(vocab), jnp.eye(vocab)


def counting_cache(batch, max_length):
    return jnp.full((batch, max_length), -7), jnp.int32(0)


@pytest.mark.parametrize("chunk_size", [1, 2, 4, 16])
def test_rows_end_independently_and_exactly(chunk_size):
    """CASES K-3: rows that end at steps 2, 7 and never; K-1: the end token is kept, pads follow."""
    decode_fn, params, w = counting_model()
    prompts = np.array([[17], [12], [1]])
    out = generate(
        decode_fn, params, w, prompts, counting_cache(3, 11), KEY,
        max_new_tokens=10, eos_tokens=(19, 30), pad_token=31, chunk_size=chunk_size,
    )  # fmt: skip
    assert out.num_tokens.tolist() == [2, 7, 10]
    assert out.tokens.tolist() == [
        [18, 19] + [31] * 8,
        [13, 14, 15, 16, 17, 18, 19] + [31] * 3,
        list(range(2, 12)),
    ]
    assert out.state.is_finished.tolist() == [True, True, False]
    # What the model has seen is what the row holds, no more.
    seen, _ = out.state.cache
    for i in range(3):
        length = int(out.state.lengths[i])
        assert seen[i, :length].tolist() == out.state.tokens[i, :length].tolist()
        assert (seen[i, length:] == -7).all()


def test_the_loop_stops_at_the_first_chunk_end_after_the_last_row():
    decode_fn, params, w = counting_model()
    calls = []
    out = generate(
        decode_fn, params, w, np.array([[17], [12]]), counting_cache(2, 101), KEY, max_new_tokens=100,
        eos_tokens=(19,), chunk_size=5, on_chunk_fn=lambda tokens, counts: calls.append((tokens, counts)),
    )  # fmt: skip
    assert out.tokens.shape == (2, 100)
    assert out.num_tokens.tolist() == [2, 7]
    assert len(calls) == 2  # 7 steps are two chunks of 5
    assert int(out.state.cache[1]) == 1 + 10
    assert [counts.tolist() for _, counts in calls] == [[2, 5], [0, 2]]
    streamed = [np.concatenate([t[i, : c[i]] for t, c in calls]).tolist() for i in range(2)]
    assert streamed == [out.tokens[i, :n].tolist() for i, n in enumerate([2, 7])]


def test_token_limits_per_row():
    decode_fn, params, w = counting_model()
    out = generate(
        decode_fn, params, w, np.array([[1], [1], [1]]), counting_cache(3, 6), KEY, max_new_tokens=[0, 2, 5]
    )  # fmt: skip
    assert out.num_tokens.tolist() == [0, 2, 5]
    assert out.tokens.tolist() == [[0] * 5, [2, 3, 0, 0, 0], [2, 3, 4, 5, 6]]
    # A limit is no end: the row goes on when asked to.
    more = resume(decode_fn, params, w, out.state, KEY, max_new_tokens=[3, 3, 0])
    assert more.tokens.tolist() == [[2, 3, 4], [4, 5, 6], [0, 0, 0]]


def test_lengths_and_positions_after_prefill_and_each_step():
    """CASES J-6: prompt of 6; lengths 6, 7, ... and positions 6, 7, ..."""
    decode_fn, params, w = counting_model()
    positions = []

    def watched(params, tokens, at, cache):
        jax.debug.callback(lambda p: positions.append(p.tolist()), at, ordered=True)
        return decode_fn(params, tokens, at, cache)

    prompt = np.arange(6)[None]
    state = prefill(watched, params, prompt, counting_cache(1, 11), max_length=11)
    lengths = [int(state.lengths[0])]
    for _ in range(5):
        state = resume(watched, params, w, state, KEY, max_new_tokens=1).state
        lengths.append(int(state.lengths[0]))
    jax.effects_barrier()
    assert lengths == [6, 7, 8, 9, 10, 11]
    assert positions == [[[0, 1, 2, 3, 4, 5]], [[6]], [[7]], [[8]], [[9]], [[10]]]


def test_one_trace_for_a_whole_generate_and_for_the_next():
    decode_fn, params, w = counting_model()
    traces = []

    def counted(params, tokens, positions, cache):
        traces.append(tokens.shape)
        return decode_fn(params, tokens, positions, cache)

    for seed, temperature in ((0, 1.0), (1, 0.0)):
        generate(
            counted, params, w, np.array([[1, 2], [3, 4]]), counting_cache(2, 30), jax.random.key(seed),
            max_new_tokens=28, temperature=temperature, chunk_size=8,
        )  # fmt: skip
    assert sorted(traces) == [(2, 1), (2, 2)]


def test_equal_modules_share_one_trace(llama):
    model, decode_fn, *_ = llama
    again, _ = models.as_decode_fn(model)
    assert again == decode_fn
    assert hash(again) == hash(decode_fn)
    run(llama, PROMPTS[:1], KEY, num_tokens=3)
    count = steps.run_chunk._cache_size()
    run((model, again, *llama[2:]), PROMPTS[1:2], KEY, num_tokens=3)
    assert steps.run_chunk._cache_size() == count


def test_a_row_without_a_law_ends_with_the_marker():
    decode_fn, params, w = counting_model()
    params = params.at[5, 0].set(jnp.nan)  # after token 4 the hidden state is NaN
    out = generate(
        decode_fn, params, w, np.array([[2], [10]]), counting_cache(2, 7), KEY, max_new_tokens=6, pad_token=31
    )  # fmt: skip
    assert out.tokens.tolist() == [[3, 4, -1, 31, 31, 31], [11, 12, 13, 14, 15, 16]]
    assert out.num_tokens.tolist() == [3, 6]


@pytest.mark.parametrize("is_paged", [False, True])
def test_all_rows_without_a_law_end_the_loop_while_the_next_chunk_runs(llama, is_paged):
    model, decode_fn, params, w = llama
    cache = model.init_paged_cache(2, 15, page_size=4) if is_paged else model.init_cache(2, 15)
    chunks = []
    options = {"max_new_tokens": 12, "chunk_size": 3, "on_chunk_fn": lambda tokens, counts: chunks.append(counts.tolist())}
    nothing = jnp.full_like(w, jnp.nan)
    out = generate(decode_fn, params, nothing, np.array([[2, 3], [7, 1]]), cache, KEY, pad_token=31, **options)
    assert chunks == [[1, 1]]
    assert out.tokens.tolist() == [[-1] + 11 * [31]] * 2
    assert out.state.lengths.tolist() == [3, 3] and out.state.is_finished.all()
    assert not is_paged or int(out.state.cache.pages.num_free) == out.state.cache.pages.ref_counts.size


def test_the_next_chunk_runs_while_the_host_looks_where_only_lengths_end_rows(llama, monkeypatch):
    launched, seen = [], []
    monkeypatch.setattr(generation, "run_chunk", lambda *x, **y: (launched.append(1), steps.run_chunk(*x, **y))[1])
    options = {"num_tokens": 9, "chunk_size": 3, "on_chunk_fn": lambda *_: seen.append(len(launched))}
    ahead = run(llama, PROMPTS, KEY, **options)
    assert seen == [2, 3, 3]
    seen.clear()
    launched.clear()
    after = run(llama, PROMPTS, KEY, eos_tokens=[VOCAB + 1], **options)
    assert seen == [1, 2, 3]
    np.testing.assert_array_equal(ahead.tokens, after.tokens)


def test_more_tokens_than_int32_holds_do_not_wrap(llama):
    model, decode_fn, params, w = llama
    state = prefill(decode_fn, params, [[1, 2]], model.init_cache(1, 8), max_length=8)
    with pytest.raises(ValueError, match="max_new_tokens must lie between 0 and what max_length 8 leaves, got 2147483647"):
        resume(decode_fn, params, w, state, KEY, max_new_tokens=2**31 - 1)


@pytest.mark.parametrize("is_paged", [False, True])
def test_the_loop_has_a_known_trip_count(llama, is_paged):
    """No `while` or branch on device data: only scans, counted loops and choices by platform are left in the chunk."""
    model, decode_fn, params, w = llama
    cache = model.init_paged_cache(1, 8, page_size=4) if is_paged else model.init_cache(1, 8)
    state = prefill(decode_fn, params, np.array([[1, 2]]), cache, max_length=8)
    jaxpr = jax.make_jaxpr(lambda state: decode_steps(decode_fn, params, w, state, KEY, num_steps=4, eos_tokens=(0,)))(
        state
    )
    names = set()

    def walk(jaxpr):
        for equation in jaxpr.eqns:
            if equation.params.get("branches_platforms") is None:  # chosen when compiled, not when run
                names.add(equation.primitive.name)
            for value in jax.tree.leaves(
                list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")
            ):
                inner = getattr(value, "jaxpr", value)
                if hasattr(inner, "eqns"):
                    walk(inner)

    walk(jaxpr.jaxpr)
    assert "dot_general" in names
    assert not names & {"while", "cond"}


def test_a_pad_may_be_anything(llama):
    """Behind a row's length, ids that the model does not have; a sampler of the user's own says what its head is."""
    model, decode_fn, params, w = llama
    prompts = np.array([[1, 2, 3, 4], [5, 6, -1, 10**6]])
    out = generate(decode_fn, params, w, prompts, model.init_cache(2, 8), KEY, lengths=[4, 2], max_new_tokens=4)
    own = generate(
        decode_fn, params, w.T, prompts, model.init_cache(2, 8), KEY, lengths=[4, 2], max_new_tokens=4,
        sample_fn=lambda h, w, keys: sample(h, w, keys, vocab_axis=1),
    )  # fmt: skip
    np.testing.assert_array_equal(out.tokens, own.tokens)
    solo = generate(decode_fn, params, w, [[5, 6]], model.init_cache(1, 6), jax.random.fold_in(KEY, 1)[None], max_new_tokens=4)
    np.testing.assert_array_equal(out.tokens[1], solo.tokens[0])


@pytest.mark.parametrize(
    "change,match",
    [
        ({"prompts": np.array([1, 2])}, "prompts must have shape"),
        ({"prompts": np.zeros((1, 0), int)}, "prompts must have shape"),
        ({"prompts": np.array([[1, VOCAB]])}, "prompts must hold token ids from 0 to 52, got 53; encode it with"),
        ({"prompts": np.array([[-1, 2]])}, "prompts must hold token ids from 0 to 52, got -1"),
        ({"prompts": np.array([[-1, 2]]), "sample_fn": lambda h, w, keys: None}, "prompts must hold token ids of at least 0"),
        ({"lengths": [3]}, "lengths must be 1 numbers from 1 to 2"),
        ({"lengths": [0]}, "lengths must be 1 numbers from 1 to 2"),
        ({"prompts": [[1, 2, 3], [1]]}, "prompts must be of one length, got lists of several; fill shorter ones up"),
        ({"max_new_tokens": -3}, "max_new_tokens must be at least 0, got -3; pass a count"),
        ({"key": jax.random.split(KEY, 3)}, "key must be one key or 1 keys"),
        ({"chunk_size": 0}, "chunk_size must be at least 1"),
        ({"cache_length": 5}, "cache must have 1 rows of at least 6 slots"),
    ],
)
def test_errors_name_the_argument(llama, change, match):
    model, decode_fn, params, w = llama
    options = {"prompts": np.array([[1, 2]]), "key": KEY, "max_new_tokens": 4, "cache_length": 6} | change
    prompts, key, cache_length = (options.pop(name) for name in ("prompts", "key", "cache_length"))
    with pytest.raises(ValueError, match=match) as error:
        generate(decode_fn, params, w, prompts, model.init_cache(1, cache_length), key, **options)
    assert "\n" not in str(error.value)
