"""SmolLM2-135M against transformers on the same weights (tests/golden/make_golden.py), token for token."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gumbeljax import models
from gumbeljax.decode import generate
from tests.models.golden import FOLDER


@pytest.fixture(scope="module")
def golden():
    with np.load(FOLDER / "smollm2.npz") as file:
        return dict(file)


def test_configuration(loaded):
    config = loaded.model.config
    assert (config.num_layers, config.d_model, config.d_ff, config.vocab) == (30, 576, 1536, 49152)
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.is_tied) == (9, 3, 64, True)
    assert config.rope_theta == 100_000.0
    assert config.rms_eps == pytest.approx(1e-5)


def test_logits_to_1e_3_and_greedy_text_token_for_token(loaded, golden):
    """All prompts in one right-padded batch: their lengths differ, and each must come out as it did alone."""
    model = loaded.model
    decode_fn, params = models.as_decode_fn(model)
    prompts = [golden[f"prompt_{i}"] for i in range(len(json.loads(str(golden["prompts"]))))]
    lengths = np.array([len(prompt) for prompt in prompts])
    assert len(set(lengths)) > 1
    num_tokens = 64
    padded = np.stack([np.pad(prompt, (0, lengths.max() - len(prompt)), constant_values=7) for prompt in prompts])

    positions = jnp.broadcast_to(jnp.arange(padded.shape[1]), padded.shape)
    h, _ = jax.jit(decode_fn)(params, padded, positions, model.init_cache(*padded.shape))
    for i, length in enumerate(lengths):
        logits = np.asarray(h[i, length - 1] @ model.head().T)
        np.testing.assert_allclose(logits, golden[f"logits_{i}"], atol=1e-3)

    out = generate(
        decode_fn, params, model.head(), padded, model.init_cache(len(prompts), padded.shape[1] + num_tokens),
        jax.random.key(0), lengths=lengths, max_new_tokens=num_tokens, temperature=0.0,
    )  # fmt: skip
    for i in range(len(prompts)):
        assert out.tokens[i].tolist() == golden[f"tokens_{i}"][:num_tokens].tolist()
    answer = loaded.tokenizer.decode(out.tokens[0][:8].tolist())
    assert answer.startswith("The capital of France is Paris.")
