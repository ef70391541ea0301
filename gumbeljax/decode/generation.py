"""A batch of prompts from start to end."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gumbeljax import _checks, kv_cache
from gumbeljax._call import plain_broadcasting
from gumbeljax._checks import in_32_bits, is_concrete
from gumbeljax._typing import ArrayLike, Key
from gumbeljax.decode.prefilling import prefill
from gumbeljax.decode.requests import check_pad, known_vocab, whole_numbers
from gumbeljax.decode.state import DecodeState, Generation, drawn_tokens, filler, request_keys
from gumbeljax.decode.steps import Rules, check_values, flattened, run_chunk, steps_per_chunk
from gumbeljax.decode.stops import find_stop, stop_strings
from gumbeljax.processing import checked
from gumbeljax.sampling import sample

FIXED = ("vocab_axis", "valid_vocab", "scale", "soft_cap", "num_samples")  # Python numbers of ``sample``


def check_sampling(sampling: Mapping[str, Any]) -> None:
    """Options that no trace can carry get a sentence, not an error from deep inside."""
    if sampling.get("processors") is not None:
        checked(sampling["processors"])
    for name, value in sampling.items():
        is_number = all(hasattr(x, "dtype") or isinstance(x, int | float) for x in jax.tree.leaves(value))
        if isinstance(value, str | bool) or not is_number or name in FIXED:
            rule = "fixed when traced" if name in FIXED else "a number or an array"
            raise TypeError(
                f"{name} must be {rule}, since options of the loop are traced, got {value!r}; "
                f"pass sample_fn=functools.partial(gumbeljax.sample, {name}={value!r})."
            )


@partial(jax.jit, donate_argnums=0, static_argnames="pad_token")
@plain_broadcasting()
def _cut(state: DecodeState, is_cut, lengths, *, pad_token) -> DecodeState:
    """End the rows where ``is_cut`` after ``lengths`` tokens."""
    lengths = jnp.where(is_cut, lengths, state.lengths)
    is_kept = jnp.arange(state.tokens.shape[1]) < lengths[:, None]
    kept = jnp.where(is_cut, 0, lengths)
    return state._replace(
        tokens=jnp.where(is_kept, state.tokens, pad_token),
        lengths=lengths,
        is_finished=state.is_finished | is_cut,
        cache=kv_cache.over_paged(lambda cache: kv_cache.truncate(cache, kept), state.cache),
    )


class _Stops:
    """Where rows end by a stop string: what they have put out so far, as the host knows it."""

    def __init__(self, state: DecodeState, stop: Sequence[str], text_fn: Callable[[Sequence[int]], str]):
        starts, lengths = np.array(state.prompt_lengths), np.array(state.lengths)
        self.stop, self.text_fn = stop, text_fn
        self.output = [row[a:b] for row, a, b in zip(np.array(state.tokens), starts, lengths, strict=True)]

    def kept(self, tokens: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """How many of the ``counts`` new tokens of each row stay, and which rows have a stop string now."""
        kept, is_stopped = counts.copy(), np.zeros(len(counts), bool)
        for i, count in enumerate(counts):
            before = len(self.output[i])
            self.output[i] = np.concatenate([self.output[i], tokens[i, :count]])
            found = find_stop(self.output[i], before, self.stop, self.text_fn) if count else None
            if found is not None:
                kept[i], is_stopped[i] = found - before, True
        return kept, is_stopped


@plain_broadcasting()
def resume(
    decode_fn: Callable,
    params: Any,
    w: Any,
    state: DecodeState,
    key: Key,
    *,
    max_new_tokens: int | Sequence[int],
    min_new_tokens: int | Sequence[int] = 0,
    eos_tokens: ArrayLike | Sequence[int] = (),
    stop: str | Sequence[str] = (),
    text_fn: Callable[[Sequence[int]], str] | None = None,
    pad_token: int = 0,
    chunk_size: int = 16,
    on_chunk_fn: Callable[[np.ndarray, np.ndarray], Any] | None = None,
    sample_fn: Callable = sample,
    options_fn: Callable[[DecodeState], Mapping[str, Any]] | None = None,
    **sampling: Any,
) -> Generation:
    """Go on from ``state``: 5 then 7 more tokens are the tokens of 12 in one call with the same ``key``.

    Consumes ``state`` (its buffers are donated); the returned one takes its place. ``min_new_tokens`` counts from the
    prompt, ``max_new_tokens`` from here. Other arguments as in ``generate``.
    """
    _checks.count(chunk_size, "chunk_size", "8 to 32 is usual")
    check_pad(pad_token)
    if (stop := stop_strings(stop)) and text_fn is None:
        raise ValueError(f"stop must go with text_fn, got {list(stop)} alone; pass text_fn=tokenizer.decode.")
    check_sampling(sampling)
    sampling = jax.tree.map(in_32_bits, sampling)
    batch, max_length = state.tokens.shape
    start = np.array(state.lengths)
    room, least = whole_numbers(max_new_tokens, "max_new_tokens"), whole_numbers(min_new_tokens, "min_new_tokens")
    for name, value in (("max_new_tokens", room), ("min_new_tokens", least)):
        if value.shape not in ((), (batch,)):
            raise ValueError(f"{name} must be one number or {batch}, one per row, got shape {list(value.shape)}; fix it.")
    if np.any(room < 0):
        raise ValueError(f"max_new_tokens must be at least 0, got {room.tolist()}; pass a count.")
    if np.any(room > max_length - start):
        raise ValueError(
            f"max_new_tokens must lie between 0 and what max_length {max_length} leaves, "
            f"got {np.asarray(max_new_tokens).tolist()} after {start.tolist()} tokens; raise max_length."
        )
    room, least = (np.broadcast_to(value, (batch,)) for value in (room, np.minimum(least, max_length)))
    most = int(room.max(initial=0))
    keys = request_keys(key, batch)
    min_lengths = state.prompt_lengths + jnp.asarray(least) if least.any() else None
    ends: Any = whole_numbers(eos_tokens, "eos_tokens") if is_concrete(eos_tokens) or eos_tokens is None else eos_tokens
    if ends.ndim > 1 and (ends.ndim > 2 or len(ends) != batch):
        raise ValueError(f"eos_tokens must be [n] or {[batch, 'n']}, got shape {list(ends.shape)}; give every row its own.")
    rules = Rules(jnp.asarray(start + room, jnp.int32), min_lengths, jnp.asarray(ends, jnp.int32))
    check_values(state, w, keys, rules, sampling, sample_fn, options_fn)
    stops = _Stops(state, stop, text_fn) if stop and text_fn is not None else None
    num_steps = steps_per_chunk(most, chunk_size)
    step = partial(
        run_chunk, *flattened(decode_fn, params), w, keys=keys, rules=rules, sampling=sampling, num_steps=num_steps,
        pad_token=pad_token, sample_fn=sample_fn, options_fn=options_fn, frees_pages=True,
    )  # fmt: skip
    # Where nothing but its length ends a row, the next chunk runs while the host looks at this one. A row without a law may
    # end all rows: then that chunk rests.
    is_ahead = stops is None and isinstance(ends, np.ndarray) and not np.any(ends >= 0)
    chunks, ahead, shares = [], None, kv_cache.shares_last_page(state.cache)
    for num_left in reversed(range(-(-most // chunk_size))):
        state, chunk = ahead or step(state, copies_shared=shares)
        shares = False  # rows that were forked have pages of their own now
        ahead = step(state, copies_shared=False) if is_ahead and num_left else None
        if ahead:
            state = ahead[0]
        draws, counts, is_done, has_overflowed = jax.tree.map(np.array, jax.device_get(tuple(chunk)))
        if has_overflowed:
            kv_cache.check_overflow(state.cache)
        if stops is not None:
            kept, is_stopped = stops.kept(drawn_tokens(draws), counts)
            if is_stopped.any():
                state = _cut(state, is_stopped, np.array(state.lengths) - counts + kept, pad_token=pad_token)
                for x in jax.tree.leaves(draws):
                    x[np.arange(num_steps) >= kept[:, None]] = filler(x, pad_token)
                counts, is_done = kept, bool(np.all(np.asarray(state.is_finished) | (state.lengths >= rules.limits)))
        chunks.append(draws)
        if on_chunk_fn is not None:
            on_chunk_fn(drawn_tokens(draws), counts)
        if is_done:
            break
    if not chunks:
        nothing = np.zeros((batch, 0), np.int32)
        return Generation(jnp.asarray(nothing), jnp.zeros(batch, jnp.int32), state, jnp.asarray(nothing))

    def whole(*parts):
        x = np.concatenate(parts, axis=1)[:, :most]
        widths = [(0, 0), (0, most - x.shape[1]), *[(0, 0)] * (x.ndim - 2)]
        return jnp.asarray(np.pad(x, widths, constant_values=filler(x, pad_token)))

    draws = jax.tree.map(whole, *chunks)
    return Generation(drawn_tokens(draws), state.lengths - jnp.asarray(start, jnp.int32), state, draws)


def generate(
    decode_fn: Callable,
    params: Any,
    w: Any,
    prompts: ArrayLike,
    cache: Any,
    key: Key,
    *,
    lengths: ArrayLike | None = None,
    max_new_tokens: int | Sequence[int],
    max_length: int | None = None,
    pad_token: int = 0,
    prefill_size: int | None = None,
    shares_prefix: bool = True,
    **options: Any,
) -> Generation:
    r"""Continue prompts token by token, each drawn from ``softmax(h @ w.T / temperature)``.

    Pathwise exact: row ``i``'s token at position ``p`` is ``sample(h_p, w, fold_in(key_i, p))``, so batched, solo,
    chunked and resumed decoding, from a contiguous or a paged cache, give the same tokens, up to near-ties within the
    rounding of ``h`` and ``h @ w.T``, which may differ in the last bit between batch sizes and caches.

    Args:
      decode_fn: the model, ``(params, tokens, positions, cache) -> (h, cache)``; hashable, kept between calls so that
        they share one trace. ``gumbeljax.nnx.as_decode_fn`` makes one from an NNX module.
      params: its parameters, a pytree; passed to ``jit`` as an argument.
      w: the head ``[vocab, d_model]``, or what ``sample_fn`` takes.
      prompts: ``int32[batch, width]``, shorter ones padded at the right with anything.
      cache: an empty cache with at least ``max_length`` slots per row; consumed.
      key: one key (row ``i`` gets ``fold_in(key, i)``) or an array of ``batch`` request keys.
      lengths: ``int32[batch]``, real tokens of each prompt; default ``width`` for all.
      max_new_tokens: most tokens to draw, one number or one per row.
      max_length: prompt plus output that a row may reach, with a later ``resume``; default ``width + max_new_tokens``.
      min_new_tokens: no end token before so many tokens of output, one number or one per row (0).
      eos_tokens: ids that end a row, ``[n]``, or ``[batch, n]`` padded with -2; the id itself is kept.
      stop: strings that end a row; the tokens that spell the first of them are kept. Looked for between chunks.
      text_fn: tokens to text, needed for ``stop``: ``tokenizer.decode``.
      pad_token: what follows the last token of a row.
      chunk_size: steps between two looks of the host (16): the grain of streaming and of stopping early. Without
        ``eos_tokens`` and ``stop`` the next chunk runs while the host looks.
      prefill_size, shares_prefix: see ``prefill``.
      on_chunk_fn: called after each chunk with ``(tokens int32[batch, steps], counts int32[batch])`` as NumPy arrays;
        the first ``counts[i]`` of row ``i`` are new.
      sample_fn: ``(h, w, keys, **sampling) -> tokens``, or a NamedTuple with a field ``token``, such as
        ``gumbeljax.sample_with_log_probs`` returns; all of it comes back as ``draws``. Default ``gumbeljax.sample``. Give a
        ``functools.partial`` for options fixed when traced, and keep it between calls.
      options_fn: ``DecodeState -> mapping`` of more options, called in every step while tracing: penalties, constraints.
      any other option: goes to ``sample_fn`` in every step, a number or one per row: ``temperature``, ``top_k``, ... Those of
        ``gumbeljax.Processors``, such as ``repetition_penalty``, may be given by name; the loop counts tokens for them.

    A row ends at the first token for which one of these holds: it is an end token, its text holds a stop string, the row has
    its most tokens, or the row has no law (token -1). What was drawn after that in the same chunk is dropped. Only rows
    that reached ``max_new_tokens`` can be resumed; with a paged cache the others have given back their pages.

    Returns:
      ``Generation(tokens int32[batch, max_new_tokens], num_tokens int32[batch], state, draws)``. A row whose hidden state
      is NaN ends with token -1.

    Raises:
      ValueError: prompts, lengths, keys or limits that do not fit together; a token id that the head does not have; a paged
        cache that is too small.
    """
    if is_concrete(prompts):
        prompts = whole_numbers(prompts, "prompts")
    least = (np.shape(prompts) or (0,))[-1] + int(np.max(whole_numbers(max_new_tokens, "max_new_tokens"), initial=0))
    state = prefill(
        decode_fn, params, prompts, cache, max_length=least if max_length is None else max_length, lengths=lengths,
        pad_token=pad_token, prefill_size=prefill_size, shares_prefix=shares_prefix,
        vocab=known_vocab(w, options.get("sample_fn", sample)),
    )  # fmt: skip
    return resume(decode_fn, params, w, state, key, max_new_tokens=max_new_tokens, pad_token=pad_token, **options)
