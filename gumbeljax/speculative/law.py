"""The law of a model at every position of a draft, as the verifiers take it, and the keys of positions."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gumbeljax import _checks
from gumbeljax._call import Config, Operands, plain_broadcasting, prepare, prepare_logits
from gumbeljax._keys import as_threefry, typed_key
from gumbeljax._tuning import Tuning
from gumbeljax._typing import Array, ArrayLike, Key
from gumbeljax.processing import Processors, TokenCounts


class Law(NamedTuple):
    """`softmax(l / temperature)` at every position, `l` from hidden states and an output table, or given.

    `h` is `[*batch, positions, d_model]` with `w` as in `gumbeljax.sample`, or, with `w=None`, the logits
    `[*batch, positions, vocab]` themselves (scaled and capped already, and no `implementation` to name). All other options are
    those of `gumbeljax.sample`, with the same order of processing. An option over rows may be given once, for each request
    `[*batch, ...]`, which repeats it for the request's positions, or for each position `[*batch, positions, ...]`: that is
    where penalties differ, since a position has the drafted tokens before it in its counts (`position_counts`).

    Under `top_k`, `top_p` or `min_p` logits are stored, for a few requests at a time.

    `axis_name` is for a `w` that is cut over the vocabulary, inside `jax.shard_map`, as in `gumbeljax.sample`. If one of two
    laws is cut, each shard takes its part of the other, which may be whole: a table (that part is copied) or logits.

    For a draft this must be *the law that its tokens were drawn from*, temperature, mask and filters included: nothing can
    detect another one, and the output would silently follow a wrong law.

    >>> Law(jnp.zeros((2, 5, 8)), jnp.zeros((32, 8)), temperature=0.7).w.shape
    (32, 8)
    """

    h: ArrayLike
    w: ArrayLike | None = None
    temperature: ArrayLike = 1.0
    top_k: ArrayLike | None = None
    top_p: ArrayLike | None = None
    min_p: ArrayLike | None = None
    valid_vocab: int | None = None
    logit_bias: ArrayLike | None = None
    mask: ArrayLike | None = None
    processors: Processors | None = None
    vocab_axis: int = 0
    scale: float | None = None
    soft_cap: float | None = None
    precision: str | jax.lax.Precision | None = None
    implementation: str | Tuning | None = None
    axis_name: str | tuple[str, ...] | None = None


AXES = {"logit_bias": 1, "mask": 1, "bias_tokens": 1, "bias_values": 1, "allowed_tokens": 1, "banned_tokens": 1,
        "end_tokens": 1, "in_prompt": 1, "output": 1}
"""Axes that an option has behind those of its rows; the others have none."""


def spread(x, name: str, shape: tuple[int, ...]):
    """An option given for each request, repeated for its positions; one of any other shape is left as it is."""
    tail = AXES.get(name, 0)
    if hasattr(x, "_replace"):  # processors, and the counts in them
        return x._replace(**{field: spread(value, field, shape) for field, value in x._asdict().items()})
    if x is None or isinstance(x, dict | str) or len(shape) == 1:
        return x
    given, x = x, _checks.listed(x, name)
    if x.ndim != len(shape) - 1 + tail or x.shape[: len(shape) - 1] != shape[:-1]:
        return given
    xp = np if isinstance(x, np.ndarray) else jnp  # numpy keeps 64 bits and concrete values for the checks
    x = xp.expand_dims(x, len(shape) - 1)
    return xp.broadcast_to(x, (*shape, *x.shape[len(shape):]))


def prepare_law(law: Law, name: str) -> tuple[Operands, Config, tuple[int, ...]]:
    """Checked operands, static description and shape `[*batch, positions]` of a law."""
    if not isinstance(law, Law):
        raise TypeError(f"{name} must be a Law; got {type(law).__name__}: write Law(h, w) or Law(logits).")
    h = _checks.float_array(law.h, "h" if law.w is not None else "logits")
    if h.ndim < 2:
        raise ValueError(f"{name} must have positions and {'d_model' if law.w is not None else 'vocab'} as its last axes; "
                         f"got shape {list(h.shape)}: give every position its own row.")
    shape = h.shape[:-1]
    options: dict[str, Any] = law._asdict()
    head = {x: options.pop(x) for x in ("vocab_axis", "scale", "soft_cap", "precision", "implementation", "axis_name")}
    del options["h"], options["w"]
    options: dict[str, Any] = {x: spread(value, x, shape) for x, value in options.items()}
    if law.w is not None:
        return prepare(h, law.w, **options, **head)
    if law.axis_name:
        raise ValueError(f"{name} must have no axis_name when it is given as logits; got {law.axis_name!r}: give every shard "
                         "all logits.")
    if law.scale is not None or law.soft_cap is not None:
        raise ValueError(f"{name} must have no scale and no soft_cap when it is given as logits; got scale={law.scale}, "
                         f"soft_cap={law.soft_cap}: apply them to the logits.")
    if law.vocab_axis not in (0, -1) or law.implementation not in (None, "xla"):
        raise ValueError(f"{name} must have no vocab_axis and no implementation but 'xla' when it is given as logits "
                         f"[*batch, positions, vocab]; got vocab_axis={law.vocab_axis!r}, "
                         f"implementation={law.implementation!r}: leave them out.")
    return prepare_logits(h, **options)


@plain_broadcasting()
def position_counts(counts: TokenCounts, draft_tokens: ArrayLike) -> TokenCounts:
    """Counts `[*batch, draft_len + 1, vocab]` for the penalties of a target: each position counts the tokens drafted before it.

    Args:
      counts: of the requests, `[*batch, vocab]`, up to the block.
      draft_tokens: integers `[*batch, draft_len]`; ids outside the vocabulary count nothing.

    >>> from gumbeljax import count_tokens
    >>> position_counts(count_tokens(jnp.array([0]), vocab=3), jnp.array([2, 2])).output.tolist()
    [[0, 0, 0], [0, 0, 1], [0, 0, 2]]
    """
    if not isinstance(counts, TokenCounts):
        raise TypeError(f"counts must be a gumbeljax.TokenCounts; got {type(counts).__name__}: make them with count_tokens.")
    tokens, vocab = _checks.listed(draft_tokens, "draft_tokens"), counts.output.shape[-1]
    if not _checks.is_integral(tokens) or tokens.ndim == 0 or tokens.shape[:-1] != counts.output.shape[:-1]:
        raise ValueError(f"draft_tokens must be integers {[*counts.output.shape[:-1], 'draft_len']}, as counts; "
                         f"got {tokens.dtype}{list(tokens.shape)}: give every request its draft.")
    each = jax.nn.one_hot(_checks.as_ids(tokens), vocab, dtype=jnp.int32)
    before = jnp.pad(jnp.cumsum(each, axis=-2), [(0, 0)] * (tokens.ndim - 1) + [(1, 0), (0, 0)])
    in_prompt = jnp.broadcast_to(counts.in_prompt[..., None, :], before.shape)
    return TokenCounts(in_prompt, counts.output[..., None, :] + before)


class Drafts(NamedTuple):
    """Checked drafts `[requests, chains, draft_len]`, their lengths `[requests, chains]`, and the batch shape."""

    tokens: Array
    lens: Array
    batch_shape: tuple[int, ...]


def check_drafts(draft_tokens: ArrayLike, draft_lens: ArrayLike | None, shape: tuple[int, ...], chains: bool) -> Drafts:
    """Drafts against the shape of the target's rows, `[*batch, positions]` or `[*batch, chains, positions]`."""
    tokens = _checks.listed(draft_tokens, "draft_tokens")
    wanted = (*shape[:-1], shape[-1] - 1)
    if tokens.shape != wanted or len(wanted) < 1 + chains or 0 in shape[len(shape) - 1 - chains:]:
        raise ValueError(f"draft_tokens must be [*batch, {'chains, ' * chains}draft_len] where the target has positions "
                         f"[*batch, {'chains, ' * chains}draft_len + 1]; got {list(tokens.shape)} and {list(shape)}: the "
                         "target scores one position more, for the token after the draft.")
    batch_shape = wanted[:-1 - chains]
    tokens = _checks.token_ids(tokens, wanted, "draft_tokens")
    tokens = tokens.reshape(math.prod(batch_shape), wanted[-2] if chains else 1, wanted[-1])
    lens = jnp.full(tokens.shape[:2], wanted[-1], jnp.int32)
    if draft_lens is not None:
        draft_lens = _checks.as_array(_checks.in_32_bits(draft_lens), "draft_lens")
        if not jnp.issubdtype(draft_lens.dtype, jnp.integer) or draft_lens.shape not in ((), wanted[:-1]):
            raise ValueError(f"draft_lens must be integers, one or {list(wanted[:-1])}; got {draft_lens.dtype}"
                             f"{list(draft_lens.shape)}: give every draft its length.")
        lens = _checks.per_row(draft_lens, "draft_lens", wanted[:-1], jnp.int32).reshape(lens.shape)
    return Drafts(tokens, lens, batch_shape)


@plain_broadcasting()
def position_keys(key: Key, start: ArrayLike, count: int) -> Array:
    """Keys of the draws at absolute positions `start, ..., start + count - 1`: `fold_in(request key, position)`.

    The keys of plain decoding, for a block of positions: with them coupled verification draws the very tokens that
    `gumbeljax.decode` draws.

    Args:
      key: request keys `[*batch]`, typed or raw.
      start: int `[*batch]` or one number: the position of the first token of the block.
      count: Python int, `draft_len + 1`.

    Returns:
      typed keys `[*batch, count]`.

    >>> position_keys(jax.random.split(jax.random.key(0), 3), jnp.array([7, 9, 9]), 5).shape
    (3, 5)
    """
    key, count = as_threefry(typed_key(key)), _checks.count(count, "count")
    start = _checks.as_array(_checks.in_32_bits(start), "start")
    if start.shape not in ((), key.shape) or not jnp.issubdtype(start.dtype, jnp.integer):
        raise ValueError(f"start must be integers, one or one for each of the keys {list(key.shape)}; got {start.dtype}"
                         f"{list(start.shape)}: give every request its position.")
    positions = start[..., None] + jnp.arange(count)
    positions = jnp.broadcast_to(positions, (*key.shape, count)).astype(jnp.uint32)
    keys = jnp.broadcast_to(key[..., None], positions.shape)
    return jax.vmap(jax.random.fold_in)(keys.reshape(-1), positions.reshape(-1)).reshape(positions.shape)
