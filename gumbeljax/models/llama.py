"""A decoder of the Llama family in Flax NNX: Llama, Mistral (window), SmolLM2, Qwen2 (q/k/v bias) and Qwen3 (q/k norm).

Attribute names are those of Hugging Face checkpoints, so a parameter's path is its name in the file. Layers are
separate modules with one array each and the forward pass unrolls them: on a CPU a scan over stacked layers copies
every layer's weights each step and is several times slower. Kernels are stored ``(in, out)``: the same speed as
``(out, in)`` at batch 1, a quarter faster at batch 8.
"""

from typing import TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from gumbeljax._implementation import device_facts
from gumbeljax.kv_cache import (
    ContiguousCache,
    PagedCache,
    attend,
    init_contiguous,
    init_paged,
    locate,
)
from gumbeljax.models.config import LlamaConfig, rope_frequencies
from gumbeljax.models.rotary import Rope, rms_norm, rotate_and_write
from gumbeljax.nnx import DecodeFn, as_decode_fn

__all__ = ["DecodeFn", "Llama", "as_decode_fn"]

Cache = TypeVar("Cache", ContiguousCache, PagedCache)


def _linear(d_in: int, d_out: int, dtype, rngs: nnx.Rngs, use_bias: bool = False) -> nnx.Linear:
    return nnx.Linear(d_in, d_out, use_bias=use_bias, dtype=dtype, param_dtype=dtype, rngs=rngs)


class RMSNorm(nnx.Module):
    """``x / sqrt(mean(x^2) + eps) * scale``."""

    def __init__(self, size: int, config: LlamaConfig, dtype):
        self.eps = config.rms_eps
        self.scale = nnx.Param(jnp.ones(size, dtype))

    def __call__(self, x):
        return rms_norm(x, self.scale[...], self.eps)


class Attention(nnx.Module):
    """Causal attention with grouped key-value heads over the slots of a cache."""

    def __init__(self, config: LlamaConfig, dtype, *, window: int | None = None, rngs: nnx.Rngs):
        self.head_dim, self.window = config.head_dim, window
        # None: kernels of our own on an NVIDIA GPU. XLA cannot cut those over auto axes of a mesh: there, say "xla".
        self.implementation: str | None = None
        d_q, d_kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = _linear(config.d_model, d_q, dtype, rngs, config.has_qkv_bias)
        self.k_proj = _linear(config.d_model, d_kv, dtype, rngs, config.has_qkv_bias)
        self.v_proj = _linear(config.d_model, d_kv, dtype, rngs, config.has_qkv_bias)
        self.o_proj = _linear(d_q, config.d_model, dtype, rngs)
        self.has_qk_norm, self.eps = config.has_qk_norm, config.rms_eps
        if config.has_qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config, dtype)
            self.k_norm = RMSNorm(config.head_dim, config, dtype)

    def __call__(self, x, rope, slots, keys, values):
        heads = (*x.shape[:2], -1, self.head_dim)
        q, k, v = (layer(x).reshape(heads) for layer in (self.q_proj, self.k_proj, self.v_proj))
        scales = (self.q_norm.scale[...], self.k_norm.scale[...]) if self.has_qk_norm else None
        q, keys, values = rotate_and_write(
            q, k, v, rope, scales, keys, values, slots, eps=self.eps, implementation=self.implementation
        )
        out = attend(q, keys, values, slots, window=self.window, implementation=self.implementation)
        return self.o_proj(out.reshape(*x.shape[:2], -1)), keys, values


class MLP(nnx.Module):
    """SwiGLU: ``down(silu(gate(x)) * up(x))``."""

    def __init__(self, config: LlamaConfig, dtype, *, rngs: nnx.Rngs):
        self.gate_proj = _linear(config.d_model, config.d_ff, dtype, rngs)
        self.up_proj = _linear(config.d_model, config.d_ff, dtype, rngs)
        self.down_proj = _linear(config.d_ff, config.d_model, dtype, rngs)

    def __call__(self, x):
        return self.down_proj(nnx.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nnx.Module):
    """One layer: attention and MLP, each behind a norm and around a residual."""

    def __init__(self, config: LlamaConfig, dtype, *, window: int | None = None, rngs: nnx.Rngs):
        self.input_layernorm = RMSNorm(config.d_model, config, dtype)
        self.self_attn = Attention(config, dtype, window=window, rngs=rngs)
        self.post_attention_layernorm = RMSNorm(config.d_model, config, dtype)
        self.mlp = MLP(config, dtype, rngs=rngs)

    def __call__(self, x, rope, slots, keys, values):
        out, keys, values = self.self_attn(self.input_layernorm(x), rope, slots, keys, values)
        x = x + out
        return x + self.mlp(self.post_attention_layernorm(x)), keys, values


class Llama(nnx.Module):
    """Token ids to hidden states; the head is left to ``gumbeljax.sample``.

    ``model(tokens, positions, cache) -> (h, cache)`` with ``tokens`` and ``positions`` ``int32[batch, seq]``, a
    ``ContiguousCache`` or a ``PagedCache`` with room for them, and ``h [batch, seq, d_model]``, the output of the final
    norm. ``model.head()`` is ``w``.

    >>> config = LlamaConfig(vocab=32, d_model=8, d_ff=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=4)
    >>> model = Llama(config, rngs=nnx.Rngs(0))
    >>> tokens = jnp.array([[3, 5, 7]])
    >>> h, cache = model(tokens, jnp.arange(3)[None], model.init_cache(1, 16))
    >>> h.shape, model.head().shape
    ((1, 3, 8), (32, 8))
    """

    def __init__(self, config: LlamaConfig, dtype=jnp.float32, *, rngs: nnx.Rngs):
        self.config = config
        self.dtype = dtype
        self.embed_tokens = nnx.Embed(config.vocab, config.d_model, dtype=dtype, param_dtype=dtype, rngs=rngs)
        windows = config.windows or (None,) * config.num_layers
        self.layers = nnx.List([Block(config, dtype, window=window, rngs=rngs) for window in windows])
        self.norm = RMSNorm(config.d_model, config, dtype)
        if not config.is_tied:
            # [vocab, d_model], as the checkpoint stores it and as the sampler reads it.
            self.lm_head = nnx.Embed(config.vocab, config.d_model, dtype=dtype, param_dtype=dtype, rngs=rngs)

    def __call__(self, tokens: jax.Array, positions: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        if tokens.size == 1 and device_facts(tokens).platform == "gpu":
            # XLA turns products of one row into sums over a table of products that it writes to memory; two rows are a matmul.
            # A position of -1 writes nothing and sees nothing.
            h, cache = self(jnp.pad(tokens, ((0, 0), (0, 1))), jnp.pad(positions, ((0, 0), (0, 1)), constant_values=-1), cache)
            return h[:, :1], cache
        x = self.embed_tokens(tokens)
        angles = positions[..., None].astype(jnp.float32) * jnp.asarray(rope_frequencies(self.config), jnp.float32)
        rope = Rope(jnp.cos(angles), jnp.sin(angles))
        slots = locate(cache, positions)
        sides = []
        for layer, keys, values in zip(self.layers, cache.keys, cache.values, strict=True):
            x, keys, values = layer(x, rope, slots, keys, values)
            sides.append((keys, values))
        keys, values = zip(*sides, strict=True)
        return self.norm(x), cache._replace(keys=keys, values=values)

    def head(self) -> jax.Array:
        """The head ``w [vocab, d_model]``: the embedding table itself when the checkpoint ties them."""
        return (self.embed_tokens if self.config.is_tied else self.lm_head).embedding[...]

    def init_cache(self, batch: int, max_length: int) -> ContiguousCache:
        """An empty cache for ``batch`` rows of at most ``max_length`` tokens each."""
        config = self.config
        return init_contiguous(config.num_layers, batch, max_length, config.num_kv_heads, config.head_dim, self.dtype)

    def init_paged_cache(
        self, batch: int, max_length: int, *, page_size: int = 16, num_pages: int | None = None
    ) -> PagedCache:
        """An empty paged cache for ``batch`` rows of at most ``max_length`` tokens each; see ``kv_cache.init_paged``."""
        config = self.config
        return init_paged(
            config.num_layers, batch, max_length, config.num_kv_heads, config.head_dim, self.dtype,
            page_size=page_size, num_pages=num_pages,
        )  # fmt: skip
