"""One answer of a loaded model, streamed as text, with its speed and the hidden states its tokens were drawn from."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gumbeljax.decode import prefill, resume, steps_per_chunk
from gumbeljax.models.llama import as_decode_fn
from gumbeljax.models.tokenizer import TextStream
from gumbeljax.sampling import sample


class Answer(NamedTuple):
    """A streamed answer."""

    tokens: np.ndarray  # int32[num_tokens], the end token included
    h: np.ndarray  # [num_tokens, d_model]: what each token was drawn from
    keys: jax.Array  # [num_tokens]: the key each token was drawn with
    tokens_per_second: float  # of the decode loop, compilation and prompt apart
    start_seconds: float  # compilation and one untimed chunk
    prompt_seconds: float


class Recorder(NamedTuple):
    """A ``decode_fn`` that also keeps the hidden state of every position, beside the cache."""

    decode_fn: Callable

    def __call__(self, params, tokens, positions, cache):
        cache, seen = cache
        h, cache = self.decode_fn(params, tokens, positions, cache)
        return h, (cache, seen.at[jnp.arange(h.shape[0])[:, None], positions].set(h, mode="drop"))


def stream_answer(
    loaded,
    prompt_tokens: Sequence[int],
    key: jax.Array,
    *,
    max_new_tokens: int = 256,
    write_fn: Callable[[str], object],
    chunk_size: int = 8,
    **sampling: Any,
) -> Answer:
    """Continue a prompt with ``gumbeljax.decode``; every token is drawn by ``gumbeljax.sample``.

    Args:
      loaded: what ``gumbeljax.models.load`` returned.
      prompt_tokens: token ids of the prompt, at least one.
      key: the request key; the token at absolute position ``p`` is drawn with ``fold_in(key, p)``.
      max_new_tokens: most tokens to draw.
      write_fn: called with each new piece of text.
      chunk_size: tokens per piece.
      sampling: ``temperature`` and other options of the draw, see ``gumbeljax.decode.generate``.

    Raises:
      ValueError: an empty prompt, or one that with ``max_new_tokens`` exceeds the model's context.
    """
    model, tokenizer = loaded
    width, context = len(prompt_tokens), model.config.max_positions
    if not width:
        raise ValueError("prompt must hold at least one token, got none; write something.")
    if width + max_new_tokens > context:
        raise ValueError(
            f"prompt and max_new_tokens must fit the model's context of {context} tokens, "
            f"got {width} + {max_new_tokens}; shorten one of them."
        )
    decode_fn, params = as_decode_fn(model)
    w, recorder = model.head(), Recorder(decode_fn)
    known = tokenizer.bpe.get_vocab_size()
    sample_fn = sample if known >= w.shape[0] else partial(sample, valid_vocab=known)
    length = width + max_new_tokens

    def start():
        seen = jnp.zeros((1, length, w.shape[1]), model.dtype)
        prompts, cache = np.array([prompt_tokens]), (model.init_cache(1, length), seen)
        state = prefill(recorder, params, prompts, cache, max_length=length, vocab=w.shape[0])
        return jax.block_until_ready(state)

    def go_on(state, num_tokens, on_chunk_fn):
        return resume(
            recorder, params, w, state, key[None], max_new_tokens=num_tokens,
            eos_tokens=tokenizer.eos_tokens, pad_token=tokenizer.eos_tokens[0] if tokenizer.eos_tokens else 0,
            chunk_size=chunk_size, on_chunk_fn=on_chunk_fn, sample_fn=sample_fn,
            **sampling,
        )  # fmt: skip

    times = [time.perf_counter()]
    # One untimed chunk compiles all that the timed run needs.
    go_on(start(), steps_per_chunk(max_new_tokens, chunk_size), None)
    times.append(time.perf_counter())
    state = start()
    times.append(time.perf_counter())
    text = TextStream(tokenizer)
    out = go_on(state, max_new_tokens, lambda tokens, counts: write_fn(text.push(tokens[0, : counts[0]])))
    times.append(time.perf_counter())
    write_fn(text.flush())
    num_tokens = int(out.num_tokens[0])
    _, seen = out.state.cache
    positions = jnp.arange(width, width + num_tokens)
    started, prompted, decoded = np.diff(times)
    # Tokens kept over the whole time: masked steps after an end token are nobody's tokens.
    return Answer(
        np.asarray(out.tokens[0, :num_tokens]),
        np.asarray(seen[0, width - 1 : width - 1 + num_tokens]),
        jax.vmap(jax.random.fold_in, (None, 0))(key, positions),
        num_tokens / decoded,
        started,
        prompted,
    )
