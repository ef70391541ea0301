"""Gemma, Google DeepMind's JAX library, in gumbeljax's decode loop: greedy tokens equal to its own sampler's.

    pip install gemma 'sentencepiece<0.2.2'    # the newer one wants a newer protobuf than gemma's other dependencies allow

Two things of the library are used, its model's hidden states (`return_hidden_states=True`) and its head (the embedding table,
with a soft cap on the logits). The model is tiny and random: nothing is downloaded, and the words mean nothing.
"""

import os
import sys
from functools import partial
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
from gemma import gm

from gumbeljax import log_prob, sample
from gumbeljax.decode import generate

PROMPTS = ["Hello world", "My name is", "hello there ! Hello world ! My name"]  # words of the library's dummy tokenizer
NEW_TOKENS, SOFT_CAP, VOCAB = 24, 30.0, 14


def tiny_gemma():
    """A model of Gemma 2's kind: local and global layers, grouped heads, soft caps; and random parameters."""
    kinds = gm.nn.AttentionType
    config = gm.nn.config.TransformerConfig(
        num_embed=VOCAB, embed_dim=32, hidden_dim=64, num_heads=4, num_kv_heads=2, head_dim=16,
        final_logit_softcap=SOFT_CAP, attn_logits_soft_cap=50.0, use_post_attn_norm=True, use_post_ffw_norm=True,
        attention_types=(kinds.LOCAL_SLIDING, kinds.GLOBAL), sliding_window_size=8,
    )  # fmt: skip
    model = gm.nn.Transformer(config=config, dtype=jnp.float32)
    like = jax.eval_shape(lambda: model.init(jax.random.key(0), jnp.zeros(4, jnp.int32))["params"])
    leaves, tree = jax.tree.flatten(like)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    params = jax.tree.unflatten(tree, [jax.random.normal(key, x.shape, x.dtype) for key, x in zip(keys, leaves, strict=True)])
    # A table as large as the layers' outputs would, being the head too, say each word again.
    return model, params | {"embedder": jax.tree.map(lambda x: 0.2 * x, params["embedder"])}


def as_decode_fn(model, length):
    """The library's model as gumbeljax.decode wants it, for rows of at most ``length`` tokens.

    Its cache has one place to write for all rows of a batch, and ours stand at different ones: so row by row, under vmap.
    Slot ``length``, behind every text, is where rows at rest write. Prompts go in whole: no ``prefill_size``.
    """

    def one_row(params, tokens, positions, cache):
        positions = jnp.minimum(positions, length)
        cache = {name: jax.tree.map(lambda x: x[None], layer) | {"end_index": positions[:1]} for name, layer in cache.items()}
        sees = jnp.arange(length + 1) <= positions[:, None]
        out = model.apply(
            {"params": params}, tokens[None], positions=positions[None], cache=cache, attention_mask=sees[None],
            return_hidden_states=True,
        )  # fmt: skip
        return out.hidden_states[0], jax.tree.map(lambda x: x[0], out.cache)

    return jax.vmap(one_row, (None, 0, 0, 0))


def main() -> int:
    model, params = tiny_gemma()
    tokenizer = gm.testing.DummyTokenizer()
    ends = (tokenizer.special_tokens.EOS, tokenizer.special_tokens.END_OF_TURN)
    sampler = gm.text.Sampler(
        model=model, params=params, tokenizer=tokenizer, cache_length=64, max_out_length=NEW_TOKENS, pad_length=16
    )
    theirs = sampler.sample(PROMPTS, max_new_tokens=NEW_TOKENS, sampling=gm.text.Greedy(), return_state=True)

    encoded = [tokenizer.encode(prompt, add_bos=True) for prompt in PROMPTS]
    lengths = [len(tokens) for tokens in encoded]
    prompts = np.array([tokens + [0] * (max(lengths) - len(tokens)) for tokens in encoded])
    length = max(lengths) + NEW_TOKENS
    decode_fn, w = as_decode_fn(model, length), params["embedder"]["input_embedding"]

    def run(key, temperature):
        cache = model.init_cache(batch_size=len(PROMPTS), dtype=jnp.float32, cache_length=length + 1)
        return generate(
            decode_fn, params, w, prompts, cache, key, lengths=lengths, max_new_tokens=NEW_TOKENS, eos_tokens=ends,
            temperature=temperature, sample_fn=partial(sample, soft_cap=SOFT_CAP),
        )  # fmt: skip

    ours = run(jax.random.key(0), 0.0)
    is_equal = bool((ours.tokens == theirs.state.predicted_tokens).all())
    for prompt, tokens, count in zip(PROMPTS, ours.tokens, ours.num_tokens, strict=True):
        print(f"{prompt} -> {tokenizer.decode(tokens[:count].tolist())}")
    print(f"{int(ours.num_tokens.sum())} greedy tokens, equal to those of gm.text.Sampler: {is_equal}")

    # Sampled at temperature 1: log-probabilities from hidden states and table against the library's own logits.
    drawn = run(jax.random.key(1), 1.0).state.tokens
    out = model.apply({"params": params}, drawn, return_hidden_states=True)
    mine = log_prob(out.hidden_states[:, :-1], w, drawn[:, 1:], soft_cap=SOFT_CAP)
    own = jnp.take_along_axis(jax.nn.log_softmax(out.logits[:, :-1]), drawn[:, 1:, None], axis=-1)[..., 0]
    error = float(jnp.abs(mine - own).max())
    print(f"log-probabilities of sampled texts, ours less the library's: at most {error:.1e}")
    has_passed = is_equal and error < 1e-4
    print("PASS" if has_passed else "FAIL")
    return 0 if has_passed else 1


if __name__ == "__main__":
    sys.exit(main())
