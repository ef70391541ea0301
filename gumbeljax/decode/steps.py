"""Steps of the loop as one scan: draw from ``h``, run the model on the token, go on."""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gumbeljax import _checks, kv_cache
from gumbeljax._call import plain_broadcasting
from gumbeljax._typing import Key
from gumbeljax.decode.requests import known_vocab
from gumbeljax.decode.state import DecodeState, drawn_tokens, filler, request_keys
from gumbeljax.processing import Processors, TokenCounts, occurrences
from gumbeljax.sampling import sample


class Rules(NamedTuple):
    """When rows end; all int32, and never -1: no token is lower but the marker."""

    limits: Any  # [batch]: length at which a row stops
    min_lengths: Any  # [batch]: length below which no end token may be drawn; None: no such rule
    eos_tokens: Any  # [n] or [batch, n]: ids that end a row; negative ones are padding


class Chunk(NamedTuple):
    """What the host looks at after a chunk."""

    draws: Any  # leaves [batch, num_steps, ...]
    counts: jax.Array  # int32[batch]: the first so many of them are real
    is_done: jax.Array  # bool: every row has ended
    has_overflowed: jax.Array  # bool: some row found no room in a paged cache


def steps_per_chunk(max_new_tokens: int, chunk_size: int) -> int:
    """Steps of every chunk of a run: equal ones, at most ``chunk_size``, so that all of them are one trace.

    >>> steps_per_chunk(100, 16), steps_per_chunk(20, 16), steps_per_chunk(5, 16)
    (15, 10, 5)
    """
    num_chunks = -(-max_new_tokens // chunk_size)
    return -(-max_new_tokens // num_chunks) if num_chunks else 0


def _counts(state: DecodeState, vocab: int) -> TokenCounts:
    """What each row has seen, from its text."""
    at, shape = jnp.arange(state.tokens.shape[1]), (state.tokens.shape[0], vocab)
    is_prompt, is_real = at < state.prompt_lengths[:, None], at < state.lengths[:, None]
    in_prompt = occurrences(jnp.where(is_prompt, state.tokens, -1), shape) > 0
    return TokenCounts(in_prompt, occurrences(jnp.where(is_real & ~is_prompt, state.tokens, -1), shape))


PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")


def _vocab(w, sample_fn) -> int:
    return _checks.table_of(w).shape[getattr(sample_fn, "keywords", {}).get("vocab_axis", 0)]


def _needs_counts(sampling) -> bool:
    """Whether options ask for penalties, by name or in ``processors``, and bring no counts of their own."""
    processors = sampling.get("processors") or Processors()
    asks = any(sampling.get(name) is not None or getattr(processors, name) is not None for name in PENALTIES)
    return asks and sampling.get("counts") is None and processors.counts is None


def _options(state: DecodeState, rules: Rules, sampling, counts: TokenCounts | None, w, sample_fn) -> dict[str, Any]:
    """Keyword options of ``sample_fn``: those of ``Processors`` are collected, and filled with what the loop knows."""
    options = dict(sampling)
    if _needs_counts(sampling):
        options["counts"] = _counts(state, _vocab(w, sample_fn)) if counts is None else counts
    rare = {name: options.pop(name) for name in Processors._fields if name in options}
    if rules.min_lengths is not None:
        ends = jnp.maximum(rules.eos_tokens, -1)  # an eager call would refuse the -2 that pads them
        rare |= {"end_tokens": ends, "min_new_tokens": rules.min_lengths, "num_new_tokens": state.lengths}
    processors = (options.get("processors") or Processors())._replace(**rare)
    if any(value is not None for value in processors):
        options["processors"] = processors
    return options


def _draw(state: DecodeState, w, keys, rules: Rules, sampling, counts: TokenCounts | None, sample_fn, options_fn):
    sampling = sampling if options_fn is None else {**sampling, **options_fn(state)}
    options = _options(state, rules, sampling, counts, w, sample_fn)
    return sample_fn(state.h, w, jax.vmap(jax.random.fold_in)(keys, state.lengths), **options)


@plain_broadcasting()
def check_values(state: DecodeState, w, keys, rules: Rules, sampling, sample_fn, options_fn) -> None:
    """The loop traces options, so bad values that are known get their sentence here. A ``sample_fn`` of the user's is left
    alone."""
    if sampling and known_vocab(w, sample_fn) is not None:
        draw = partial(_draw, sampling=sampling, counts=None, sample_fn=sample_fn, options_fn=options_fn)
        jax.eval_shape(draw, state, w, keys, rules)


def _step(decode_fn, params, w, carry, keys, rules: Rules, sampling, *, pad_token, sample_fn, options_fn):
    state, counts = carry
    is_active = ~state.is_finished & (state.lengths < rules.limits)
    draws = _draw(state, w, keys, rules, sampling, counts, sample_fn, options_fn)
    drawn = drawn_tokens(draws)
    rows = jnp.arange(drawn.shape[0])
    # A row at rest runs past the end, where nothing is written: its cache stays as it is, to the last bit.
    positions = jnp.where(is_active, state.lengths, state.tokens.shape[1])
    # -1 marks a row without a law; it ends there, and the model is fed a real id.
    h, cache = decode_fn(params, jnp.maximum(drawn, 0)[:, None], positions[:, None], state.cache)
    is_end = (drawn < 0) | jnp.any(drawn[:, None] == rules.eos_tokens, axis=1)
    state = state._replace(
        tokens=state.tokens.at[rows, positions].set(drawn, mode="drop"),
        lengths=state.lengths + is_active,
        is_finished=state.is_finished | (is_active & is_end),
        h=jnp.where(is_active[:, None], h[:, 0], state.h),
        cache=cache,
    )

    def masked(x):
        return jnp.where(is_active.reshape(-1, *[1] * (x.ndim - 1)), x, jnp.asarray(filler(x, pad_token), x.dtype))

    if counts is not None:
        vocab = counts.output.shape[1]
        counts = counts._replace(
            output=counts.output.at[rows, jnp.where(is_active & (drawn >= 0), drawn, vocab)].add(1, mode="drop")
        )
    return (state, counts), jax.tree.map(masked, draws)


@plain_broadcasting()
def decode_steps(
    decode_fn: Callable,
    params: Any,
    w: Any,
    state: DecodeState,
    key: Key,
    *,
    num_steps: int,
    limits: jax.Array | None = None,
    min_lengths: jax.Array | None = None,
    eos_tokens: Sequence[int] | jax.Array = (),
    pad_token: int = 0,
    sample_fn: Callable = sample,
    options_fn: Callable[[DecodeState], Mapping[str, Any]] | None = None,
    copies_shared: bool = True,
    **sampling: Any,
) -> tuple[DecodeState, Any]:
    """``num_steps`` steps as one scan, for use inside ``jit``: what ``generate`` runs between two looks of the host.

    Pathwise exact, as ``generate``. With a paged cache the rows' pages for all steps are taken before the scan and those of
    steps not made are given back after it; a row that finds none rests, flagged (``kv_cache.check_overflow``).

    Args:
      num_steps: a Python int.
      limits: ``int32[batch]``, the length at which a row stops; default what ``state.tokens`` holds.
      min_lengths: ``int32[batch]``, the length below which no end token is drawn; default none.
      copies_shared: see ``kv_cache.append``: False if rows have not been forked since their last steps.
      (the others: see ``generate``)

    Returns:
      The next state, and what ``sample_fn`` returned, ``[batch, num_steps, ...]``, with ``pad_token`` (NaN for floats)
      where a row at rest drew nothing.
    """
    batch, max_length = state.tokens.shape
    keys = request_keys(key, batch)
    limits = jnp.full(batch, max_length) if limits is None else jnp.minimum(limits, max_length)
    eos_tokens = jnp.asarray(eos_tokens, jnp.int32)
    rules = Rules(limits.astype(jnp.int32), min_lengths, eos_tokens if eos_tokens.ndim == 2 else eos_tokens.reshape(-1))
    room = jnp.where(state.is_finished, 0, jnp.clip(rules.limits - state.lengths, 0, num_steps))
    cache = kv_cache.over_paged(lambda cache: kv_cache.append(cache, room, copies_shared=copies_shared), state.cache)
    rules = rules._replace(limits=jnp.where(kv_cache.has_overflowed(cache), state.lengths, rules.limits))

    # Counted from the text once, then kept up to date: the text is all that a resumed or forked row has to bring.
    counts = _counts(state, _vocab(w, sample_fn)) if _needs_counts(sampling) else None

    def body(carry, _):
        return _step(
            decode_fn, params, w, carry, keys, rules, sampling, pad_token=pad_token, sample_fn=sample_fn, options_fn=options_fn
        )

    (state, _), draws = jax.lax.scan(body, (state._replace(cache=cache), counts), length=num_steps)
    cache = kv_cache.over_paged(lambda cache: kv_cache.truncate(cache, state.lengths), state.cache)
    return state._replace(cache=cache), jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), draws)


@lru_cache(maxsize=128)
def _of_leaves(decode_fn, treedef):
    return lambda leaves, *arguments: decode_fn(treedef.unflatten(leaves), *arguments)


def flattened(decode_fn: Callable, params: Any) -> tuple[Callable, list]:
    """The same model as a function of a list: jit flattens before every chunk, and a module's state takes a millisecond."""
    leaves, treedef = jax.tree.flatten(params)
    return _of_leaves(decode_fn, treedef), leaves


@partial(
    jax.jit,
    static_argnums=0,
    static_argnames=("num_steps", "pad_token", "sample_fn", "options_fn", "frees_pages", "copies_shared"),
    donate_argnames="state",
)
@plain_broadcasting()
def run_chunk(
    decode_fn, params, w, state, keys, rules: Rules, sampling, *,
    num_steps, pad_token, sample_fn, options_fn, frees_pages, copies_shared,
) -> tuple[DecodeState, Chunk]:  # fmt: skip
    """``decode_steps``, and what the host wants to know; rows that have finished give their pages back if asked to."""
    before = state.lengths
    state, draws = decode_steps(
        decode_fn, params, w, state, keys, num_steps=num_steps, limits=rules.limits, min_lengths=rules.min_lengths,
        eos_tokens=rules.eos_tokens, pad_token=pad_token, sample_fn=sample_fn, options_fn=options_fn,
        copies_shared=copies_shared, **sampling,
    )  # fmt: skip
    has_overflowed = jnp.any(kv_cache.has_overflowed(state.cache))
    if frees_pages:
        kept = jnp.where(state.is_finished, 0, state.lengths)
        state = state._replace(cache=kv_cache.over_paged(lambda cache: kv_cache.truncate(cache, kept), state.cache))
    is_done = jnp.all(state.is_finished | (state.lengths >= rules.limits))
    return state, Chunk(draws, state.lengths - before, is_done, has_overflowed)
