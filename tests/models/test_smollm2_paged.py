"""SmolLM2-135M from pages: the golden greedy texts, whatever the pages, alone and in a batch of eight."""

import jax
import numpy as np
import pytest

from gumbeljax import models
from gumbeljax.decode import Request, generate, serve
from tests.models.golden import FOLDER

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def golden():
    with np.load(FOLDER / "smollm2.npz") as file:
        return [(file[f"prompt_{i}"], file[f"tokens_{i}"]) for i in range(3)]


def padded(prompts):
    lengths = np.array([len(prompt) for prompt in prompts])
    return np.stack([np.pad(prompt, (0, lengths.max() - len(prompt)), constant_values=7) for prompt in prompts]), lengths


@pytest.mark.parametrize("page_size,num_tokens", [(16, 200), (1, 32), (64, 32)])
def test_greedy_is_the_reference_token_for_token(loaded, golden, page_size, num_tokens):
    model = loaded.model
    decode_fn, params = models.as_decode_fn(model)
    prompts, lengths = padded([prompt for prompt, _ in golden])
    cache = model.init_paged_cache(3, prompts.shape[1] + num_tokens, page_size=page_size)
    out = generate(
        decode_fn, params, model.head(), prompts, cache, jax.random.key(0), lengths=lengths, max_new_tokens=num_tokens,
        temperature=0.0, shares_prefix=False,
    )  # fmt: skip
    for i, (_, tokens) in enumerate(golden):
        assert out.tokens[i].tolist() == tokens[:num_tokens].tolist()


def test_eight_prompts_of_different_lengths_equal_each_alone(loaded, golden):
    """In one batch, and as requests of a server with three rows, which share the beginning of the chat template."""
    model, num_tokens = loaded.model, 12
    decode_fn, params = models.as_decode_fn(model)
    texts = ["Hi", "Name three colours.", "What is 2 + 2?", "Tell me a very short story about a cat and a river.", "Why?"]
    prompts = [prompt for prompt, _ in golden] + [np.array(loaded.tokenizer.chat(text), np.int32) for text in texts]
    tokens, lengths = padded(prompts)
    assert len(set(lengths.tolist())) > 4
    temperature = np.array([0.0, 1.0, 0.7, 0.0, 1.0, 0.0, 0.7, 1.0])
    keys = jax.random.split(jax.random.key(1), 8)
    length = tokens.shape[1] + num_tokens

    def run(rows):
        cache = model.init_paged_cache(len(rows), length)
        return generate(
            decode_fn, params, model.head(), tokens[rows], cache, keys[np.array(rows)], lengths=lengths[rows],
            max_new_tokens=num_tokens, temperature=temperature[rows],
        ).tokens  # fmt: skip

    batched = np.asarray(run(list(range(8))))
    alone = np.concatenate([run([i]) for i in range(8)])
    np.testing.assert_array_equal(batched, alone)
    requests = [Request(prompts[i], keys[i], num_tokens, sampling={"temperature": temperature[i]}) for i in range(8)]
    served = [[] for _ in range(8)]
    for output in serve(
        decode_fn, params, model.head(), requests, model.init_paged_cache(3, length), temperature=1.0, prefill_size=32
    ):
        served[output.index] += output.tokens.tolist()
    assert served == alone.tolist()
