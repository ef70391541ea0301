"""Continuous batching: whatever comes before, beside and after a request, its tokens are those it gets alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gumbeljax import sample_with_log_probs
from gumbeljax.decode import Request, serve
from tests.decode.tiny import VOCAB, answers, solo, tiny_llama

DEFAULT = 1.2  # temperature of requests that name none
WIDTH, MOST = 24, 20  # longest prompt and output
NUM_REQUESTS = 1000


def random_requests(count, seed=0):
    """Prompts that often begin alike, per-request temperatures, lengths and end tokens."""
    rng = np.random.default_rng(seed)
    systems = [rng.integers(0, VOCAB, size) for size in (0, 5, 9, 13)]
    keys = jax.random.split(jax.random.key(seed), count)
    for i in range(count):
        prompt = np.concatenate([systems[rng.integers(4)], rng.integers(0, VOCAB, rng.integers(1, 12))])
        yield Request(
            prompt.tolist(), keys[i], int(rng.integers(1, MOST + 1)), min_new_tokens=int(rng.integers(0, 3)) * 2,
            eos_tokens=rng.integers(0, VOCAB, rng.integers(0, 4)).tolist(),
            sampling={"temperature": float(rng.choice([0.0, 0.7, 1.0, 1.5]))} if rng.random() < 0.8 else {},
        )  # fmt: skip


@pytest.fixture(scope="module")
def requests():
    return list(random_requests(NUM_REQUESTS))


@pytest.fixture(scope="module")
def alone(requests):
    return [solo(r, WIDTH, WIDTH + MOST, temperature=DEFAULT) for r in requests]


@pytest.mark.parametrize("shares_prefix,page_size,num_pages", [(True, 4, 60), (False, 4, 60), (True, 1, 352), (True, 8, 20)])
def test_a_thousand_random_requests_each_equal_their_solo_run(requests, alone, shares_prefix, page_size, num_pages):
    """Tight pools (a full batch would be 88 pages of 4), so that requests also wait for pages."""
    cache = tiny_llama().model.init_paged_cache(8, WIDTH + MOST, page_size=page_size, num_pages=num_pages)
    served = answers(requests, cache, temperature=DEFAULT, chunk_size=5, shares_prefix=shares_prefix, prefill_size=16)
    assert len(served) == NUM_REQUESTS
    different = [i for i, (tokens, _, _) in enumerate(served) if tokens.tolist() != alone[i].tolist()]
    assert different == []
    for request, (tokens, _, reason) in zip(requests, served, strict=True):
        is_end = tokens[-1] in request.eos_tokens
        assert reason == ("eos" if is_end else "length")
        assert is_end or tokens.size == request.max_new_tokens


def test_a_shared_prefix_is_run_once():
    """Prompt tokens that pass through the model, counted on the host; also within one admission round."""
    tiny, counts = tiny_llama(), []

    def counted(params, tokens, positions, cache):
        if tokens.shape[1] > 1:  # a prompt: real positions are those the cache has slots for
            jax.debug.callback(lambda n: counts.append(int(n)), jnp.sum(positions < cache.pages.lengths[:, None]))
        return tiny.decode_fn(params, tokens, positions, cache)

    system = list(range(17))
    keys = jax.random.split(jax.random.key(3), 9)
    requests = [Request([*system, i, i + 1], keys[i], 3) for i in range(9)]
    total = {}
    for shares_prefix in (True, False):
        counts.clear()
        cache = tiny.model.init_paged_cache(3, 32, page_size=4)
        list(serve(counted, tiny.params, tiny.w, requests, cache, shares_prefix=shares_prefix))
        jax.effects_barrier()
        total[shares_prefix] = sum(counts)
    assert total[False] == 9 * 19
    assert total[True] == 19 + 8 * 3  # four full pages, 16 tokens, are shared


def test_pieces_come_after_every_chunk_and_bring_log_probs():
    request = Request([1, 2, 3], jax.random.key(0), 7)
    cache = tiny_llama().model.init_paged_cache(2, 32)
    ((tokens, pieces, reason),) = answers([request], cache, sample_fn=sample_with_log_probs, chunk_size=3, temperature=0.7)
    assert [piece.tokens.size for piece in pieces] == [3, 3, 1]
    assert (tokens.size, reason) == (7, "length")
    for piece in pieces:
        np.testing.assert_array_equal(piece.draws.token, piece.tokens)
        assert piece.draws.model_log_prob.shape == piece.tokens.shape
        assert np.isfinite(piece.draws.model_log_prob).all()


def test_requests_are_taken_as_rows_become_free():
    taken = []

    def endless():
        for i in range(10**9):
            taken.append(i)
            yield Request([i % VOCAB], jax.random.key(i), 2)

    tiny, seen = tiny_llama(), []
    for output in serve(tiny.decode_fn, tiny.params, tiny.w, endless(), tiny.model.init_paged_cache(2, 8), chunk_size=2):
        seen.append(output.index)
        assert len(taken) <= seen[-1] // 2 * 2 + 2  # no more than have had a row: the next may not be there yet
        if len(seen) == 6:
            break
    assert seen == list(range(6))


def test_a_whole_number_as_default_does_not_round_the_options_of_requests():
    """And None as a default is no option at all."""
    model = tiny_llama().model

    def run(sampling, **defaults):
        request = Request([5, 6, 7], jax.random.key(7), 6, sampling=sampling)
        return answers([request], model.init_paged_cache(1, 32), chunk_size=6, top_k=None, **defaults)[0][0].tolist()

    assert run({"temperature": 0.75}, temperature=1) == run({}, temperature=0.75) != run({}, temperature=0)


def test_what_ends_a_request_first_wins():
    """A user's end token, length cap and stop string in one step, and each of them a step before the others."""
    key, prompt, letters = jax.random.key(9), [5, 6, 7], [chr(33 + i) for i in range(VOCAB)]
    model = tiny_llama().model

    def text_fn(tokens):
        return "".join(letters[t] for t in tokens)

    def run(most, eos_tokens, stop):
        request = Request(prompt, key, most, eos_tokens=eos_tokens, stop=stop)
        cache = model.init_paged_cache(1, 32)
        ((tokens, _, reason),) = answers([request], cache, text_fn=text_fn, chunk_size=4, temperature=5.0)
        return tokens.tolist(), reason

    whole, _ = run(12, (), ())
    assert len(set(whole[:7])) == 7  # the case needs distinct tokens
    ends, strings = [(whole[i],) for i in range(7)], [text_fn(whole[i - 1 : i + 1]) for i in range(1, 7)]
    string = dict(enumerate(strings, 1))
    # All three at the sixth token: it is an end token.
    assert run(6, ends[5], [string[5]]) == (whole[:6], "eos")
    assert run(6, (), [string[5]]) == (whole[:6], "stop")
    assert run(6, (), [string[6]]) == (whole[:6], "length")
    # One earlier than the two others; they meet in the chunk that follows the first.
    assert run(6, ends[4], [string[5]]) == (whole[:5], "eos")
    assert run(6, ends[5], [string[4], string[5]]) == (whole[:5], "stop")
    assert run(5, ends[5], [string[5]]) == (whole[:5], "length")
    # A stop string may begin in one chunk and end in the next.
    assert run(12, (), [string[4]]) == (whole[:5], "stop")


@pytest.mark.parametrize(
    "request_change,options,error,match",
    [
        ({"prompt": []}, {}, ValueError, "request 0 must have a prompt and max_new_tokens of at least 1, got 0 tokens"),
        ({"max_new_tokens": 0}, {}, ValueError, "request 0 must have a prompt .* and 0"),
        ({"max_new_tokens": 40}, {}, ValueError, r"request 0 must fit a row of 32 slots and 3 pages of 16, got 1 \+ 40"),
        ({"prompt": [1, 53]}, {}, ValueError, "prompt of request 0 must hold token ids from 0 to 52, got 53; encode it with"),
        ({"prompt": [1, -1]}, {}, ValueError, "prompt of request 0 must hold token ids from 0 to 52, got -1"),
        ({"stop": ["a"]}, {}, ValueError, "stop of request 0 must go with text_fn"),
        ({"sampling": {"top_q": 1}}, {"temperature": 1.0}, ValueError, "got 'top_q'; pass serve"),
        ({}, {"method": "categorical"}, TypeError, "method must be a number or an array"),
        ({}, {"vocab_axis": 1}, TypeError, "vocab_axis must be fixed when traced, .*; pass sample_fn"),
        ({}, {"logit_bias": {1: 2.0}}, TypeError, "logit_bias must be a number or an array, .* got dict"),
        ({"max_new_tokens": 2.5}, {}, TypeError, "max_new_tokens of request 0 must be whole numbers"),
        ({}, {"chunk_size": 0}, ValueError, "chunk_size must be at least 1; got 0"),
        ({}, {"cache": "contiguous"}, TypeError, "cache must be a PagedCache, got ContiguousCache"),
    ],
)
def test_errors_name_the_request(request_change, options, error, match):
    tiny = tiny_llama()
    cache = tiny.model.init_paged_cache(2, 32, num_pages=3)
    if options.pop("cache", None):
        cache = tiny.model.init_cache(2, 32)
    request = Request([1], jax.random.key(0), 2)._replace(**request_change)
    with pytest.raises(error, match=match) as caught:
        list(serve(tiny.decode_fn, tiny.params, tiny.w, [request], cache, **options))
    assert "\n" not in str(caught.value)
