"""A tiny random model and ways to run it, shared by the tests of the decode loop."""

from functools import cache
from typing import NamedTuple

import jax
import numpy as np
from flax import nnx

from gumbeljax import models
from gumbeljax.decode import Request, prefill, resume, serve

VOCAB = 53


class Tiny(NamedTuple):
    model: models.Llama
    decode_fn: models.DecodeFn
    params: nnx.State
    w: jax.Array


@cache
def tiny_llama() -> Tiny:
    config = models.LlamaConfig(
        vocab=VOCAB, d_model=16, d_ff=24, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=4, windows=(None, 7)
    )
    model = models.Llama(config, rngs=nnx.Rngs(5))
    # Random embeddings are small: the scaled head makes the laws less than uniform, with a few nats of entropy.
    return Tiny(model, *models.as_decode_fn(model), 2.0 * model.head())


def solo(request: Request, width: int, max_length: int, **options):
    """The tokens of one request alone, from a contiguous cache; equal shapes, so that all requests share the traces."""
    tiny = tiny_llama()
    prompt = np.zeros((1, width), np.int32)
    prompt[0, : len(request.prompt)] = request.prompt
    ends = np.full((1, 4), -2)
    ends[0, : len(request.eos_tokens)] = request.eos_tokens
    state = prefill(
        tiny.decode_fn, tiny.params, prompt, tiny.model.init_cache(1, max_length), max_length=max_length,
        lengths=[len(request.prompt)],
    )  # fmt: skip
    out = resume(
        tiny.decode_fn, tiny.params, tiny.w, state, request.key[None], max_new_tokens=request.max_new_tokens,
        min_new_tokens=request.min_new_tokens, eos_tokens=ends, chunk_size=1, **{**options, **request.sampling},
    )  # fmt: skip
    return np.asarray(out.tokens[0, : int(out.num_tokens[0])])


def answers(requests, cache, **options):
    """Tokens, pieces and reason of each request, in order."""
    tiny = tiny_llama()
    pieces = {}
    for output in serve(tiny.decode_fn, tiny.params, tiny.w, requests, cache, **options):
        pieces.setdefault(output.index, []).append(output)
    for parts in pieces.values():
        assert [part.reason is None for part in parts] == [True] * (len(parts) - 1) + [False]
    return [(np.concatenate([p.tokens for p in pieces[i]]), pieces[i], pieces[i][-1].reason) for i in range(len(pieces))]
