"""The decode loop: chunks of jitted steps, every token drawn by ``gumbeljax.sample``.

A model is a callable ``decode_fn(params, tokens, positions, cache) -> (h, cache)`` with ``tokens`` and ``positions``
``int32[batch, seq]``, ``h [batch, seq, d_model]`` and any pytree as ``cache``. It must be causal: the hidden state at
position ``p`` depends on the tokens at positions ``0..p`` only, and running a position again overwrites it. Rows at rest and
pads run at positions past the end of the text: these may write only there, or nothing (what JAX's ``.at[].set`` does with an
index out of range), and their hidden states are dropped. ``gumbeljax.nnx.as_decode_fn`` makes one from an NNX module. A
``kv_cache.PagedCache``, alone or inside the pytree, is given pages before each pass and takes back what was not used.

The draw of the token at absolute position ``p`` uses the key ``fold_in(request key, p)``, so a request's tokens depend
neither on its neighbours, nor on its slot, nor on where the loop was cut.

Chunks have a known trip count: a ``while_loop`` whose predicate is device data makes XLA copy the predicate to the host
every step. Rows that have ended are masked; the host looks between chunks.

``generate`` continues a batch of prompts, ``serve`` a stream of requests, each taking the row of one that has ended.
Keyword options that these functions do not name (``temperature``, ``top_k``, ...) go to ``sample_fn`` at every step: each
a number or one per row, traced, so that a change of value compiles nothing. What must be fixed when a function is traced
(``vocab_axis``, ``soft_cap``, ``method``, ...) goes into ``sample_fn=functools.partial(gumbeljax.sample, ...)``.
"""

from gumbeljax.decode.generation import generate, resume
from gumbeljax.decode.prefilling import prefill
from gumbeljax.decode.requests import Output, Request
from gumbeljax.decode.serving import serve
from gumbeljax.decode.state import DecodeState, Generation, request_keys
from gumbeljax.decode.steps import decode_steps, steps_per_chunk

__all__ = [
    "DecodeState",
    "Generation",
    "Output",
    "Request",
    "decode_steps",
    "generate",
    "prefill",
    "request_keys",
    "resume",
    "serve",
    "steps_per_chunk",
]
