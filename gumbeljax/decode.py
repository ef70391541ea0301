"""The decode loop: chunks of jitted steps, every token drawn by ``gumbeljax.sample``.

A model is a callable ``decode_fn(params, tokens, positions, cache) -> (h, cache)`` with ``tokens`` and ``positions``
``int32[batch, seq]``, ``h [batch, seq, d_model]`` and any pytree as ``cache``. It must be causal: the hidden state at
position ``p`` depends on the tokens at positions ``0..p`` only, and running a position again overwrites it.

The draw of the token at absolute position ``p`` uses the key ``fold_in(request key, p)``, so a request's tokens depend
neither on its neighbours, nor on its slot, nor on where the loop was cut.

Chunks have a known trip count: a ``while_loop`` whose predicate is device data makes XLA copy the predicate to the host
every step. Rows that have ended are masked; the host looks between chunks.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gumbeljax._checks import is_concrete
from gumbeljax._keys import as_threefry, typed_key
from gumbeljax._typing import ArrayLike
from gumbeljax.kv_cache import ContiguousCache
from gumbeljax.sampling import sample


class DecodeState(NamedTuple):
    """Where a batch of requests stands; pass it to ``resume`` to go on."""

    tokens: jax.Array  # int32[batch, max_length]: prompt, output, then pad
    lengths: jax.Array  # int32[batch]: how many of them are real
    is_finished: jax.Array  # bool[batch]: the row has drawn an end token
    h: jax.Array  # [batch, d_model]: hidden state of the last token, from which the next one is drawn
    cache: Any  # the model's cache; has seen every real token


class Generation(NamedTuple):
    """What ``generate`` and ``resume`` return."""

    tokens: jax.Array  # int32[batch, max_new_tokens]: the new tokens, end token included, then pad
    num_tokens: jax.Array  # int32[batch]: how many of them are real
    state: DecodeState


def request_keys(key: jax.Array, batch: int) -> jax.Array:
    """One typed threefry key per row: ``key`` itself when it is an array of them, else ``fold_in(key, row)``.

    Keys of other generators become threefry keys as in ``sample``: their own ``fold_in`` may depend on the batch.
    """
    key = as_threefry(typed_key(key))
    if key.shape == (batch,):
        return key
    if key.shape != ():
        raise ValueError(f"key must be one key or {batch} keys, one per row, got shape {key.shape}; split it per row.")
    return jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(batch, dtype=jnp.uint32))


def steps_per_chunk(max_new_tokens: int, chunk_size: int) -> int:
    """Steps of every chunk of a run: equal ones, at most ``chunk_size``, so that all of them are one trace.

    >>> steps_per_chunk(100, 16), steps_per_chunk(20, 16), steps_per_chunk(5, 16)
    (15, 10, 5)
    """
    num_chunks = -(-max_new_tokens // chunk_size)
    return -(-max_new_tokens // num_chunks) if num_chunks else 0


@partial(jax.jit, static_argnums=0, static_argnames=("max_length", "pad_token"), donate_argnames="cache")
def _prefill(decode_fn, params, prompts, lengths, cache, *, max_length, pad_token):
    batch, width = prompts.shape
    is_real = jnp.arange(width) < lengths[:, None]
    # Pads sit at the positions that follow the prompt: nothing real looks at them, and the real tokens of those
    # positions overwrite them.
    tokens = jnp.where(is_real, prompts, 0)
    positions = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), (batch, width))
    h, cache = decode_fn(params, tokens, positions, cache)
    tokens = jnp.full((batch, max_length), pad_token, jnp.int32)
    tokens = tokens.at[:, :width].set(jnp.where(is_real, prompts, pad_token))
    last = jnp.take_along_axis(h, (lengths - 1)[:, None, None], axis=1)[:, 0]
    return DecodeState(tokens, lengths, jnp.zeros(batch, bool), last, cache)


def _holds(cache: ContiguousCache, batch: int, max_length: int) -> bool:
    rows, slots = cache.keys[0].shape[:2]
    return rows == batch and slots >= max_length


def prefill(
    decode_fn: Callable,
    params: Any,
    prompts: ArrayLike,
    cache: Any,
    *,
    max_length: int,
    lengths: ArrayLike | None = None,
    pad_token: int = 0,
) -> DecodeState:
    """Run the prompts through the model.

    Args:
      decode_fn: the model; hashable.
      params: its parameters.
      prompts: ``int32[batch, width]``, shorter ones padded at the right with anything.
      cache: an empty cache with at least ``max_length`` slots per row; consumed.
      max_length: prompt plus output that a row may reach, at least ``width``.
      lengths: ``int32[batch]``, real tokens of each prompt, at least 1; default ``width`` for all.
      pad_token: what ``state.tokens`` holds after the real tokens.

    Returns:
      The ``DecodeState`` before the first draw.
    """
    prompts = jnp.asarray(prompts, jnp.int32)
    if prompts.ndim != 2 or prompts.shape[1] < 1:
        raise ValueError(f"prompts must have shape [batch, width] with width >= 1, got {prompts.shape}; add an axis.")
    batch, width = prompts.shape
    if max_length < width:
        raise ValueError(f"max_length must be at least the prompts' width {width}, got {max_length}; raise it.")
    for part in jax.tree.leaves(cache, is_leaf=lambda x: isinstance(x, ContiguousCache)):
        # A write past the end is dropped silently: refuse a cache that is too short while its size is known.
        if isinstance(part, ContiguousCache) and not _holds(part, batch, max_length):
            raise ValueError(
                f"cache must have {batch} rows of at least {max_length} slots, got {part.keys[0].shape[:2]}; "
                "make it with model.init_cache(batch, width + max_new_tokens)."
            )
    if lengths is None:
        lengths = np.full(batch, width)
    if is_concrete(lengths):
        checked = np.asarray(lengths)
        if checked.shape != (batch,) or not np.all((checked >= 1) & (checked <= width)):
            raise ValueError(f"lengths must be {batch} numbers from 1 to {width}, got {checked.tolist()}; fix the prompts.")
    lengths = jnp.asarray(lengths, jnp.int32)
    return _prefill(decode_fn, params, prompts, lengths, cache, max_length=max_length, pad_token=pad_token)


def _step(decode_fn, params, w, state: DecodeState, keys, *, limits, temperature, eos_tokens, pad_token, sample_fn):
    is_active = ~state.is_finished & (state.lengths < limits)
    drawn = sample_fn(state.h, w, jax.vmap(jax.random.fold_in)(keys, state.lengths), temperature=temperature)
    rows = jnp.arange(drawn.shape[0])
    # A row at rest runs its last token again, at its own position: same inputs, same cache.
    positions = jnp.where(is_active, state.lengths, state.lengths - 1)
    current = jnp.where(is_active, drawn, state.tokens[rows, positions])
    # -1 marks a row without a law; it ends there, and the model is fed a real id.
    h, cache = decode_fn(params, jnp.maximum(current, 0)[:, None], positions[:, None], state.cache)
    is_end = (drawn < 0) | jnp.any(drawn[:, None] == eos_tokens, axis=1)
    state = DecodeState(
        tokens=state.tokens.at[rows, positions].set(current),
        lengths=state.lengths + is_active,
        is_finished=state.is_finished | (is_active & is_end),
        h=jnp.where(is_active[:, None], h[:, 0], state.h),
        cache=cache,
    )
    return state, jnp.where(is_active, drawn, pad_token)


def decode_steps(
    decode_fn: Callable,
    params: Any,
    w: jax.Array,
    state: DecodeState,
    key: jax.Array,
    *,
    num_steps: int,
    limits: jax.Array | None = None,
    temperature: float | jax.Array = 1.0,
    eos_tokens: Sequence[int] | jax.Array = (),
    pad_token: int = 0,
    sample_fn: Callable = sample,
) -> tuple[DecodeState, jax.Array]:
    """``num_steps`` steps as one scan, for use inside ``jit``: what ``generate`` runs between two looks of the host.

    Args:
      num_steps: a Python int.
      limits: ``int32[batch]``, the length at which a row stops; default what ``state.tokens`` holds.
      (the others: see ``generate``)

    Returns:
      The next state, and ``int32[batch, num_steps]`` with ``pad_token`` where a row at rest drew nothing.
    """
    batch, max_length = state.tokens.shape
    keys = request_keys(key, batch)
    limits = jnp.full(batch, max_length) if limits is None else jnp.minimum(limits, max_length)
    eos_tokens = jnp.asarray(eos_tokens, jnp.int32).reshape(-1)

    def body(state, _):
        return _step(
            decode_fn, params, w, state, keys,
            limits=limits, temperature=temperature, eos_tokens=eos_tokens, pad_token=pad_token, sample_fn=sample_fn,
        )  # fmt: skip

    state, tokens = jax.lax.scan(body, state, length=num_steps)
    return state, tokens.T


@partial(jax.jit, static_argnums=0, static_argnames=("num_steps", "pad_token", "sample_fn"), donate_argnames="state")
def _chunk(decode_fn, params, w, state, keys, limits, temperature, eos_tokens, *, num_steps, pad_token, sample_fn):
    before = state.lengths
    state, tokens = decode_steps(
        decode_fn, params, w, state, keys, num_steps=num_steps, limits=limits, temperature=temperature,
        eos_tokens=eos_tokens, pad_token=pad_token, sample_fn=sample_fn,
    )  # fmt: skip
    is_done = jnp.all(state.is_finished | (state.lengths >= limits))
    return state, (tokens, state.lengths - before, is_done)


def resume(
    decode_fn: Callable,
    params: Any,
    w: jax.Array,
    state: DecodeState,
    key: jax.Array,
    *,
    max_new_tokens: int | Sequence[int],
    temperature: float | jax.Array = 1.0,
    eos_tokens: Sequence[int] = (),
    pad_token: int = 0,
    chunk_size: int = 16,
    on_chunk_fn: Callable[[np.ndarray, np.ndarray], Any] | None = None,
    sample_fn: Callable = sample,
) -> Generation:
    """Go on from ``state``: 5 then 7 more tokens are the tokens of 12 in one call with the same ``key``.

    Consumes ``state`` (its buffers are donated); the returned one takes its place. Other arguments as in ``generate``.
    """
    if chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, got {chunk_size}; 8 to 32 is usual.")
    batch, max_length = state.tokens.shape
    start = np.array(state.lengths)
    room = np.broadcast_to(np.asarray(max_new_tokens), (batch,))
    if not np.all((room >= 0) & (start + room <= max_length)):
        raise ValueError(
            f"max_new_tokens must lie between 0 and what max_length {max_length} leaves, "
            f"got {np.asarray(max_new_tokens).tolist()} after {start.tolist()} tokens; raise max_length."
        )
    most = int(room.max(initial=0))
    keys = request_keys(key, batch)
    limits = jnp.asarray(start + room, jnp.int32)
    temperature = jnp.asarray(temperature, jnp.float32)
    ends = jnp.asarray(eos_tokens, jnp.int32).reshape(-1)
    num_steps = steps_per_chunk(most, chunk_size)
    chunks = [np.zeros((batch, 0), np.int32)]
    for _ in range(-(-most // chunk_size)):
        state, (tokens, counts, is_done) = _chunk(
            decode_fn, params, w, state, keys, limits, temperature, ends,
            num_steps=num_steps, pad_token=pad_token, sample_fn=sample_fn,
        )  # fmt: skip
        chunks.append(np.array(tokens))
        if on_chunk_fn is not None:
            on_chunk_fn(chunks[-1], np.array(counts))
        if is_done:
            break
    tokens = np.concatenate(chunks, axis=1)[:, :most]
    tokens = np.pad(tokens, ((0, 0), (0, most - tokens.shape[1])), constant_values=pad_token)
    return Generation(jnp.asarray(tokens), state.lengths - jnp.asarray(start, jnp.int32), state)


def generate(
    decode_fn: Callable,
    params: Any,
    w: jax.Array,
    prompts: ArrayLike,
    cache: Any,
    key: jax.Array,
    *,
    lengths: ArrayLike | None = None,
    max_new_tokens: int | Sequence[int],
    temperature: float | jax.Array = 1.0,
    eos_tokens: Sequence[int] = (),
    pad_token: int = 0,
    chunk_size: int = 16,
    on_chunk_fn: Callable[[np.ndarray, np.ndarray], Any] | None = None,
    sample_fn: Callable = sample,
) -> Generation:
    r"""Continue prompts token by token, each drawn from ``softmax(h @ w.T / temperature)``.

    Pathwise exact: row ``i``'s token at position ``p`` is ``sample(h_p, w, fold_in(key_i, p))``, so batched, solo,
    chunked and resumed decoding give the same tokens, up to near-ties within the rounding of ``h`` and ``h @ w.T``,
    which may differ in the last bit between batch sizes.

    Args:
      decode_fn: the model, ``(params, tokens, positions, cache) -> (h, cache)``; hashable, kept between calls so that
        they share one trace. ``gumbeljax.models.as_decode_fn`` makes one from an NNX module.
      params: its parameters, a pytree; passed to ``jit`` as an argument.
      w: the head ``[vocab, d_model]``, or what ``sample_fn`` takes.
      prompts: ``int32[batch, width]``, shorter ones padded at the right with anything.
      cache: an empty cache with at least ``width + max_new_tokens`` slots per row; consumed.
      key: one key (row ``i`` gets ``fold_in(key, i)``) or an array of ``batch`` request keys.
      lengths: ``int32[batch]``, real tokens of each prompt; default ``width`` for all.
      max_new_tokens: most tokens to draw, one number or one per row.
      temperature: one number or ``[batch]``; 0 means greedy for that row.
      eos_tokens: ids that end a row; the id itself is kept.
      pad_token: what follows the last token of a row.
      chunk_size: steps between two looks of the host: the grain of streaming and of stopping early.
      on_chunk_fn: called after each chunk with ``(tokens int32[batch, steps], counts int32[batch])`` as NumPy arrays;
        the first ``counts[i]`` of row ``i`` are new.
      sample_fn: ``(h, w, keys, *, temperature) -> tokens``; give a ``functools.partial`` of ``gumbeljax.sample`` for
        other options, and keep it between calls.

    Returns:
      ``Generation(tokens int32[batch, max_new_tokens], num_tokens int32[batch], state)``. A row whose hidden state is
      NaN ends with token -1.

    Raises:
      ValueError: prompts, lengths, keys or limits that do not fit together.
    """
    max_length = (np.shape(prompts) or (0,))[-1] + int(np.max(max_new_tokens, initial=0))
    state = prefill(decode_fn, params, prompts, cache, max_length=max_length, lengths=lengths, pad_token=pad_token)
    return resume(
        decode_fn,
        params,
        w,
        state,
        key,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        eos_tokens=eos_tokens,
        pad_token=pad_token,
        chunk_size=chunk_size,
        on_chunk_fn=on_chunk_fn,
        sample_fn=sample_fn,
    )
