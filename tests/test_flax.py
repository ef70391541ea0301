"""Flax Linen and NNX modules that sample inside their own __call__, and NNX decoders in the library's loop."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import gumbeljax
from gumbeljax.decode import decode_steps, prefill
from gumbeljax.kv_cache import ContiguousCache, locate
from gumbeljax.models import LlamaConfig, as_decode_fn
from gumbeljax.models.config import rope_frequencies
from gumbeljax.models.llama import Block
from gumbeljax.models.rotary import Rope
from gumbeljax.nnx import Sampler

VOCAB, D_MODEL, BATCH = 67, 16, 32
H = jax.random.normal(jax.random.key(1), (BATCH, D_MODEL))


class LinenHead(nn.Module):
    """A Dense layer, then a draw from the tied table of an Embed."""

    @nn.compact
    def __call__(self, h):
        embed = nn.Embed(VOCAB, D_MODEL, embedding_init=nn.initializers.normal(1.0))
        h = nn.Dense(D_MODEL)(h)
        key = self.make_rng("sample")
        return gumbeljax.sample(h, embed.embedding, key), h, embed.embedding, key


def test_linen_module_samples_under_jit():
    module = LinenHead()
    params = module.init({"params": jax.random.key(0), "sample": jax.random.key(0)}, H)
    apply = jax.jit(lambda params, h, key: module.apply(params, h, rngs={"sample": key}))
    tokens, h, w, key = apply(params, H, jax.random.key(5))
    np.testing.assert_array_equal(tokens, gumbeljax.sample(h, w, key))
    np.testing.assert_array_equal(tokens, apply(params, H, jax.random.key(5))[0])
    assert (tokens != apply(params, H, jax.random.key(6))[0]).any()


class NNXHead(nnx.Module):
    """The head of an untied model: the kernel of a Linear, [d_model, vocab], read in place."""

    def __init__(self, rngs: nnx.Rngs):
        self.dense = nnx.Linear(D_MODEL, D_MODEL, rngs=rngs)
        self.head = nnx.Linear(D_MODEL, VOCAB, use_bias=False, rngs=rngs)
        self.sampler = Sampler(rngs=rngs, vocab_axis=1)

    def __call__(self, h):
        return self.sampler(self.dense(h), self.head.kernel[...])


def test_nnx_module_samples_under_nnx_jit():
    module, eager = NNXHead(nnx.Rngs(0, sample=3)), NNXHead(nnx.Rngs(0, sample=3))
    step = nnx.jit(lambda module, h: module(h))
    draws = [step(module, H) for _ in range(3)]
    # The key of call i is that of the stream's counter i, under jit as without.
    for tokens in draws:
        np.testing.assert_array_equal(tokens, eager(H))
    stream = nnx.Rngs(0, sample=3)
    expected = gumbeljax.sample(eager.dense(H), eager.head.kernel[...], stream.sample(), vocab_axis=1)
    np.testing.assert_array_equal(draws[0], expected)
    assert (draws[0] != draws[1]).any()
    assert (draws[1] != draws[2]).any()


def test_plain_jit_repeats_the_tokens_as_documented():
    graphdef, state = nnx.split(NNXHead(nnx.Rngs(0, sample=3)))
    step = jax.jit(lambda state, h: nnx.merge(graphdef, state)(h))
    np.testing.assert_array_equal(step(state, H), step(state, H))
    assert "jax.jit" in Sampler.__doc__


def test_sampler_options_of_a_call_add_to_those_of_the_module():
    sampler = Sampler(rngs=nnx.Rngs(sample=0), temperature=0.0)
    w = jax.random.normal(jax.random.key(2), (VOCAB, D_MODEL))
    best = np.argmax(np.asarray(H) @ np.asarray(w).T, axis=1)
    np.testing.assert_array_equal(sampler(H, w), best)
    cut = sampler(H, w, valid_vocab=20)
    np.testing.assert_array_equal(cut, np.argmax((np.asarray(H) @ np.asarray(w).T)[:, :20], axis=1))


# CASES D-5: an NNX decoder with nnx.Rngs and a cache Variable, decoded under nnx.jit.

CONFIG = LlamaConfig(vocab=VOCAB, d_model=16, d_ff=24, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8)
LENGTH, STEPS = 20, 16


class Decoder(nnx.Module):
    """Two blocks, run in a Python loop, rematerialised, or scanned with stacked parameters."""

    def __init__(self, form: str, rngs: nnx.Rngs):
        self.form = form
        self.embed = nnx.Embed(VOCAB, CONFIG.d_model, embedding_init=nnx.initializers.normal(1.0), rngs=rngs)
        if form == "scan":

            @nnx.split_rngs(splits=CONFIG.num_layers)
            @nnx.vmap(in_axes=0, out_axes=0)
            def stacked(rngs):
                return Block(CONFIG, jnp.float32, rngs=rngs)

            self.layers = stacked(rngs)
        else:
            self.layers = nnx.List([Block(CONFIG, jnp.float32, rngs=rngs) for _ in range(CONFIG.num_layers)])

    def __call__(self, tokens, positions, cache):
        angles = positions[..., None] * jnp.array(rope_frequencies(CONFIG))
        shared = Rope(jnp.cos(angles), jnp.sin(angles)), locate(cache, positions)
        x = self.embed(tokens)
        if self.form == "scan":

            @nnx.scan(in_axes=(nnx.Carry, 0, 0), out_axes=(nnx.Carry, 0))
            def layers(x, layer, slots):
                x, keys, values = layer(x, *shared, *slots)
                return x, (keys, values)

            x, slots = layers(x, self.layers, tuple(cache))
            return x, ContiguousCache(*slots)

        def run(layer, x, keys, values):
            return layer(x, *shared, keys, values)

        run = nnx.remat(run) if self.form == "remat" else run
        slots = []
        for i, layer in enumerate(self.layers):
            x, keys, values = run(layer, x, cache.keys[i], cache.values[i])
            slots.append((keys, values))
        return x, ContiguousCache(*(jnp.stack(s) for s in zip(*slots, strict=True)))


class Chat(nnx.Module):
    """Owns the decoder, the random streams and the cache, as NNX users write it."""

    def __init__(self, form: str):
        self.decoder = Decoder(form, nnx.Rngs(0))
        self.rngs = nnx.Rngs(sample=7)
        shape = (CONFIG.num_layers, 1, LENGTH, CONFIG.num_kv_heads, CONFIG.head_dim)
        self.cache = nnx.Variable(ContiguousCache(jnp.zeros(shape), jnp.zeros(shape)))

    def w(self):
        return self.decoder.embed.embedding[...] / 2

    def decode(self, prompt):
        decode_fn, params = as_decode_fn(self.decoder)
        key = self.rngs.sample()
        state = _prefill(decode_fn, params, prompt, self.cache.get_value())
        state, tokens = decode_steps(decode_fn, params, self.w(), state, key, num_steps=STEPS)
        self.cache.set_value(state.cache)
        return tokens

    def decode_eagerly(self, prompt):
        """The same by hand: a Python loop, one call of the module and one draw per token."""
        run = nnx.jit(lambda decoder, *arguments: decoder(*arguments))
        key = jax.random.fold_in(self.rngs.sample(), 0)  # one key for a batch: row 0
        cache, text = self.cache.get_value(), [int(token) for token in prompt[0]]
        h, cache = run(self.decoder, prompt, jnp.arange(len(text))[None], cache)
        for _ in range(STEPS):
            token = gumbeljax.sample(h[:, -1], self.w(), jax.random.fold_in(key, len(text))[None])
            h, cache = run(self.decoder, token[:, None], jnp.array([[len(text)]]), cache)
            text.append(int(token[0]))
        self.cache.set_value(cache)
        return np.array([text[prompt.shape[1] :]])


def _prefill(decode_fn, params, prompt, cache):
    # A copy: prefill consumes the cache that it is given, and the module still refers to this one.
    return prefill(decode_fn, params, prompt, jax.tree.map(jnp.copy, cache), max_length=LENGTH)


@pytest.mark.parametrize("form", ["loop", "remat", "scan"])
def test_nnx_decoder_under_nnx_jit_equals_an_eager_loop(form):
    prompt = jnp.array([[5, 11, 3]])
    jitted, eager = Chat(form), Chat(form)
    step = nnx.jit(lambda chat, prompt: chat.decode(prompt))
    for call in range(2):
        np.testing.assert_array_equal(step(jitted, prompt), eager.decode_eagerly(prompt))
        # The caller's module has advanced exactly once: its stream by one key, its cache to the last token.
        assert int(jitted.rngs.sample.count[...]) == int(eager.rngs.sample.count[...]) == call + 1
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), jitted.cache.get_value(), eager.cache.get_value()
        )
