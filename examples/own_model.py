"""A Flax model of your own in the library's decode loop: two layers, 60 lines, one paged cache, and a check of its law.

The module's __call__ takes tokens, positions and a cache, and returns hidden states and the cache; as_decode_fn does the rest.
"""

import os
import sys
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from gumbeljax.decode import generate
from gumbeljax.kv_cache import append, attend, init_paged, locate, write
from gumbeljax.nnx import as_decode_fn

VOCAB, D_MODEL, NUM_HEADS, LENGTH = 6, 32, 4, 16


class Layer(nnx.Module):
    """Attention over the cache, then two dense layers."""

    def __init__(self, rngs: nnx.Rngs):
        self.qkv = nnx.Linear(D_MODEL, 3 * D_MODEL, rngs=rngs)
        self.out = nnx.Linear(D_MODEL, D_MODEL, rngs=rngs)
        self.up = nnx.Linear(D_MODEL, 2 * D_MODEL, rngs=rngs)
        self.down = nnx.Linear(2 * D_MODEL, D_MODEL, rngs=rngs)
        self.norms = nnx.List([nnx.LayerNorm(D_MODEL, rngs=rngs) for _ in range(2)])

    def __call__(self, x, slots, keys, values):
        heads = (*x.shape[:2], NUM_HEADS, -1)
        q, k, v = (part.reshape(heads) for part in jnp.split(self.qkv(self.norms[0](x)), 3, axis=-1))
        keys, values = write(keys, k, slots), write(values, v, slots)
        x = x + self.out(attend(q, keys, values, slots).reshape(x.shape))
        return x + self.down(nnx.gelu(self.up(self.norms[1](x)))), keys, values


class Model(nnx.Module):
    """Token and position embeddings, two layers, a final norm. The head is left to gumbeljax.sample."""

    def __init__(self, rngs: nnx.Rngs):
        self.tokens = nnx.Embed(VOCAB, D_MODEL, rngs=rngs)
        self.positions = nnx.Embed(LENGTH, D_MODEL, rngs=rngs)
        self.layers = nnx.List([Layer(rngs) for _ in range(2)])
        self.norm = nnx.LayerNorm(D_MODEL, rngs=rngs)

    def __call__(self, tokens, positions, cache):
        slots = locate(cache, positions)
        x = self.tokens(tokens) + self.positions(jnp.clip(positions, 0, LENGTH - 1))
        sides = []
        for layer, keys, values in zip(self.layers, cache.keys, cache.values, strict=True):
            x, keys, values = layer(x, slots, keys, values)
            sides.append((keys, values))
        keys, values = zip(*sides, strict=True)
        return self.norm(x), cache._replace(keys=keys, values=values)


def exact_law(decode_fn, params, w, prompt):
    """Probability of every pair of next tokens, by enumeration in one batch."""
    pairs = np.array([(a, b) for a in range(VOCAB) for b in range(VOCAB)])
    texts = np.concatenate([np.tile(prompt, (len(pairs), 1)), pairs], axis=1)
    positions = jnp.broadcast_to(jnp.arange(texts.shape[1]), texts.shape)
    cache = paged(len(pairs), texts.shape[1], filled=True)
    h, _ = decode_fn(params, jnp.asarray(texts), positions, cache)
    log_probs = jax.nn.log_softmax(h[:, len(prompt) - 1 : -1] @ w.T)
    of_pairs = np.take_along_axis(np.asarray(log_probs), pairs[..., None], axis=-1)
    return np.exp(of_pairs.sum(axis=(1, 2))).reshape(VOCAB, VOCAB)


def paged(batch, length, filled=False):
    """A paged cache for the model; filled: with room for `length` tokens a row already taken."""
    cache = init_paged(2, batch, LENGTH, NUM_HEADS, D_MODEL // NUM_HEADS, page_size=4)
    return append(cache, jnp.full(batch, length)) if filled else cache


def main() -> int:
    decode_fn, params = as_decode_fn(Model(nnx.Rngs(0)))
    w, prompt, num_rows = 0.25 * jax.random.normal(jax.random.key(1), (VOCAB, D_MODEL)), [3, 1, 4, 1, 5], 2_000
    law = exact_law(decode_fn, params, w, prompt)
    counts, num_rounds = np.zeros((VOCAB, VOCAB)), 10
    for seed in range(num_rounds):
        # One request per row: the same prompt, its full page shared by all rows, a key for each.
        key, prompts = jax.random.key(seed), np.tile(prompt, (num_rows, 1))
        out = generate(decode_fn, params, w, prompts, paged(num_rows, LENGTH), key, max_new_tokens=2)
        np.add.at(counts, tuple(np.asarray(out.tokens).T), 1)
    num_draws = num_rows * num_rounds
    chi2 = ((counts - num_draws * law) ** 2 / (num_draws * law)).sum()
    pages = out.state.cache.pages
    print(f"{num_rows} rows share {int((pages.ref_counts == num_rows).sum())} page of the prompt")
    for a, b in ((0, 0), (2, 3), (5, 1)):
        print(f"P(next two tokens = {a}, {b}): theory {law[a, b]:.4f}, drawn {counts[a, b] / num_draws:.4f}")
    freedom = VOCAB**2 - 1
    sigma = (chi2 - freedom) / np.sqrt(2 * freedom)
    has_passed = abs(sigma) < 4
    print(f"chi-square {chi2:.1f} with {freedom} degrees of freedom ({sigma:+.1f} sigma): {'PASS' if has_passed else 'FAIL'}")
    return 0 if has_passed else 1


if __name__ == "__main__":
    sys.exit(main())
