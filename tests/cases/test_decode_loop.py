"""Bugs that others had in their decode loops (CASES K); K-3, K-7 and K-10 are in tests/decode."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gumbeljax import greedy, sample, sample_with_log_probs
from gumbeljax.decode import decode_steps, generate, prefill
from gumbeljax.processing import Processors, count_tokens

VOCAB, EOS = 32, 9


def toy(next_logits):
    """A model whose logits after each token are those of a table."""

    def decode_fn(params, tokens, positions, cache):
        return params[tokens], cache

    return decode_fn, jnp.asarray(next_logits, jnp.float32), jnp.eye(next_logits.shape[1])


def test_an_end_token_that_the_mask_forbids_is_never_drawn():
    """CASES K-5: nothing puts the end token back after the mask, not even where it is the argmax."""
    logits = np.zeros((VOCAB, VOCAB)) + 5.0 * (np.arange(VOCAB) == EOS)
    mask = np.arange(VOCAB) != EOS
    decode_fn, params, w = toy(logits)
    out = generate(
        decode_fn, params, w, np.ones((50, 1), int), (), jax.random.key(0), max_new_tokens=100, eos_tokens=(EOS,), mask=mask
    )
    assert (out.num_tokens == 100).all()
    assert not (out.tokens == EOS).any()


def test_an_end_token_outside_the_top_k_is_never_drawn():
    """CASES K-5: EOS ranked 20th, top_k = 5, 5000 draws; with the filter off it is drawn."""
    decode_fn, params, w = toy(np.tile(-0.05 * ((np.arange(VOCAB) - EOS + 19) % VOCAB), (VOCAB, 1)))
    prompts, top_k = np.ones((50, 1), int), np.full(50, 5)
    for off, is_drawn in ((5, False), (0, True)):
        out = generate(
            decode_fn, params, w, prompts, (), jax.random.key(0), max_new_tokens=100, eos_tokens=(EOS,),
            top_k=np.where(np.arange(50) == 7, off, top_k),
        )  # fmt: skip
        assert bool((out.tokens == EOS).any()) == is_drawn
        assert (out.num_tokens[:7] == 100).all() and (out.num_tokens[8:] == 100).all()


def test_penalties_see_the_text_so_far():
    """Prompt and output for repetition, output alone for presence and frequency; against draws one by one."""
    logits = np.random.default_rng(1).normal(size=(VOCAB, VOCAB))
    decode_fn, params, w = toy(logits)
    prompts, lengths, keys = np.array([[1, 2, 3], [4, 0, 0]]), [3, 1], jax.random.split(jax.random.key(2), 2)
    penalties = {
        "repetition_penalty": np.array([1.3, 1.0], np.float32),
        "presence_penalty": np.array([0.0, 1.5], np.float32),
        "frequency_penalty": 0.5,
    }
    out = generate(
        decode_fn, params, w, prompts, (), keys, lengths=lengths, max_new_tokens=15, chunk_size=4, temperature=0.8, **penalties
    )
    for i in range(2):
        text = prompts[i, : lengths[i]].tolist()
        counts = count_tokens(jnp.array([text]), VOCAB)
        own = {name: value if np.ndim(value) == 0 else value[i] for name, value in penalties.items()}
        for _ in range(15):
            token = sample(
                params[jnp.array(text[-1:])], w, jax.random.fold_in(keys[i], len(text))[None], temperature=0.8,
                processors=Processors(counts=counts, **own),
            )  # fmt: skip
            text.append(int(token[0]))
            counts = counts.add(token)
        assert out.state.tokens[i, : len(text)].tolist() == text


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("chunk_size", [1, 3, 16])
def test_no_end_before_the_least_number_of_tokens_then_at_once(temperature, chunk_size):
    """CASES K-5: min_new_tokens = 4 with the end token as argmax; rows differ, a user's own mask stays."""
    logits = np.zeros((VOCAB, VOCAB)) + 60.0 * (np.arange(VOCAB) == EOS)
    decode_fn, params, w = toy(logits)
    out = generate(
        decode_fn, params, w, np.ones((3, 2), int), (), jax.random.key(0), lengths=[2, 1, 2], max_new_tokens=9,
        min_new_tokens=[4, 0, 8], eos_tokens=(EOS, 3), chunk_size=chunk_size, temperature=temperature,
        mask=np.arange(VOCAB) != 5, pad_token=31,
    )  # fmt: skip
    assert out.num_tokens.tolist() == [5, 1, 9]
    for row, n in zip(np.asarray(out.tokens), (5, 1, 9), strict=True):
        assert not np.isin(row[: n - 1], (EOS, 3, 5)).any()
        assert row[n - 1] == EOS


def test_stop_strings_in_a_batch():
    """The host finds them between chunks: what the chunk drew after them is dropped, from tokens and draws."""
    logits = 60.0 * np.eye(VOCAB)[(np.arange(VOCAB) + 1) % VOCAB]  # n + 1 follows n
    decode_fn, params, w = toy(logits)

    def text_fn(tokens):
        return "".join(f"{token}," for token in tokens)

    for chunk_size in (1, 4, 16):
        calls = []
        out = generate(
            decode_fn, params, w, np.array([[1], [4], [20]]), (), jax.random.key(0), max_new_tokens=12, eos_tokens=(27,),
            stop=["6,7,", ",13"], text_fn=text_fn, sample_fn=sample_with_log_probs, pad_token=31, chunk_size=chunk_size,
            on_chunk_fn=lambda tokens, counts, calls=calls: calls.append((tokens, counts)),
        )  # fmt: skip
        # The prompt is not searched: "4," then 5, 6, 7; the third row meets its end token.
        assert out.num_tokens.tolist() == [6, 3, 7]
        assert out.tokens[:, :8].tolist() == [[2, 3, 4, 5, 6, 7, 31, 31], [5, 6, 7] + [31] * 5, [*range(21, 28), 31]]
        assert out.state.lengths.tolist() == [7, 4, 8]
        assert out.state.is_finished.all()
        assert np.isnan(out.draws.model_log_prob[0, 6:]).all() and np.isfinite(out.draws.model_log_prob[0, :6]).all()
        streamed = [np.concatenate([t[i, : c[i]] for t, c in calls]).tolist() for i in range(3)]
        assert streamed == [out.tokens[i, :n].tolist() for i, n in enumerate([6, 3, 7])]
        assert len(calls) == {1: 7, 4: 2, 16: 1}[chunk_size]


@pytest.mark.parametrize("chunk_size", [1, 2, 3, 16])
def test_end_token_stop_string_and_limit_meet_in_one_step(chunk_size):
    """And each of them a step before the two others: the row ends there, once, whatever the chunks."""
    decode_fn, params, w = toy(60.0 * np.eye(VOCAB)[(np.arange(VOCAB) + 1) % VOCAB])  # n + 1 follows n

    def text_fn(tokens):
        return "".join(chr(65 + token) for token in tokens)

    def run(limit, end, last_of_stop):
        return generate(
            decode_fn, params, w, np.array([[10], [1]]), (), jax.random.key(0), max_new_tokens=[limit, 9], eos_tokens=[end],
            stop=[text_fn([last_of_stop - 1, last_of_stop])], text_fn=text_fn,
            chunk_size=chunk_size, pad_token=31,
        )  # fmt: skip

    for limit, end, last, num_tokens, is_finished in (
        (4, 14, 14, 4, True),  # all three at the fourth token, 14
        (4, 14, 20, 4, True),
        (4, 20, 14, 4, True),
        (4, 20, 21, 4, False),  # a limit is no end: the row can be resumed
        (4, 13, 14, 3, True),
        (4, 14, 13, 3, True),
        (3, 14, 14, 3, False),
    ):
        out = run(limit, end, last)
        assert out.num_tokens.tolist() == [num_tokens, 9]
        assert out.tokens[0].tolist() == [*range(11, 11 + num_tokens), *[31] * (9 - num_tokens)]
        assert out.state.is_finished.tolist() == [is_finished, False]
        assert out.state.lengths.tolist() == [1 + num_tokens, 10]


def test_stop_needs_text():
    decode_fn, params, w = toy(np.eye(4))
    with pytest.raises(ValueError, match=r"stop must go with text_fn, got \['a'\] alone"):
        generate(decode_fn, params, w, np.ones((1, 1), int), (), jax.random.key(0), max_new_tokens=2, stop=["a"])


@pytest.mark.parametrize("form", ["jit", "scan", "fori_loop", "while_loop"])
def test_the_loop_may_sit_inside_other_loops(form):
    """CASES K-10: one call, and step by step inside JAX's own loops."""
    logits = np.random.default_rng(0).normal(size=(VOCAB, VOCAB))
    decode_fn, params, w = toy(logits)
    key, prompts = jax.random.key(5), np.array([[1, 2], [3, 4]])
    whole = generate(decode_fn, params, w, prompts, (), key, max_new_tokens=12)
    state = prefill(decode_fn, params, prompts, (), max_length=14)

    def step(state, _=None):
        return decode_steps(decode_fn, params, w, state, key, num_steps=1)[0], None

    if form == "jit":
        for _ in range(12):
            state, _ = jax.jit(step)(state)
    elif form == "scan":
        state, _ = jax.lax.scan(step, state, length=12)
    elif form == "fori_loop":
        state = jax.lax.fori_loop(0, 12, lambda i, state: step(state)[0], state)
    else:
        state = jax.lax.while_loop(lambda state: jnp.all(state.lengths < 14), lambda state: step(state)[0], state)
    np.testing.assert_array_equal(state.tokens[:, 2:], whole.tokens)


def test_options_that_cannot_be_traced_say_where_they_go():
    decode_fn, params, w = toy(np.eye(4))
    with pytest.raises(TypeError, match=r"method must be a number .* pass sample_fn=functools\.partial") as error:
        generate(decode_fn, params, w, np.ones((1, 1), int), (), jax.random.key(0), max_new_tokens=2, method="categorical")
    assert "\n" not in str(error.value)
    with pytest.raises(TypeError, match="temprature"):
        generate(decode_fn, params, w, np.ones((1, 1), int), (), jax.random.key(0), max_new_tokens=2, temprature=1.0)


def test_any_sampler_of_the_same_form_will_do():
    """greedy has no key and no temperature: a lambda gives it the form."""
    logits = 3.0 * np.eye(VOCAB)[(np.arange(VOCAB) + 1) % VOCAB]
    decode_fn, params, w = toy(logits)
    out = generate(
        decode_fn, params, w, np.array([[1]]), (), jax.random.key(0), max_new_tokens=3,
        sample_fn=lambda h, w, keys: greedy(h, w),
    )  # fmt: skip
    assert out.tokens.tolist() == [[2, 3, 4]]
