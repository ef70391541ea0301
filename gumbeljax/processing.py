"""What a serving engine does to logits before a draw, in one order:

    scale -> soft_cap -> [model law] -> logit_bias (dense, then sparse) -> penalties (repetition, then presence and frequency)
    -> mask, valid_vocab, allowed and banned tokens, minimum length -> temperature -> [tempered law]
    -> top_k -> top_p -> min_p -> [processed law] -> draw

The frequent options are arguments of `gumbeljax.sample`; the rare ones travel together as one pytree, `Processors`. All values
are traced, scalars or per row. Inside one compiled function they may change from call to call without a retrace.
"""

import functools
import math
from collections.abc import Mapping, Sized
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gumbeljax import _checks
from gumbeljax._typing import Array, ArrayLike
from pallas_kernels.kept import Filters


class TokenCounts(NamedTuple):
    """Which tokens a request has seen, for penalties: made by `count_tokens`, updated by `add` in a decode loop."""

    in_prompt: Array  # bool [*batch, vocab]
    output: Array  # int32 [*batch, vocab]: how often each token was generated

    def add(self, tokens: ArrayLike) -> "TokenCounts":
        """The counts after more output, `[*batch]` or `[*batch, n]`; a token outside `[0, vocab)`, such as -1, counts nothing.

        >>> import jax.numpy as jnp
        >>> count_tokens(jnp.array([2]), vocab=4).add(jnp.int32(1)).add(jnp.int32(1)).output.tolist()
        [0, 2, 0, 0]
        """
        return self._replace(output=self.output + occurrences(tokens, self.output.shape))


def occurrences(tokens: ArrayLike, shape: tuple[int, ...]) -> Array:
    """int32 `[*batch, vocab]`: how often each id occurs in tokens `[*batch]` or `[*batch, n]`."""
    *batch, vocab = shape
    tokens = _checks.listed(tokens, "tokens")
    if not _checks.is_integral(tokens) or tokens.shape[:len(batch)] != tuple(batch) or tokens.ndim > len(shape):
        raise ValueError(f"tokens must be integers of shape {batch} or {[*batch, 'n']}; got {tokens.dtype}"
                         f"{list(tokens.shape)}: give every row its own.")
    tokens = _checks.as_ids(tokens)
    of_each_row = tokens.shape[-1] if tokens.ndim == len(shape) else 1
    flat = jnp.where((tokens >= 0) & (tokens < vocab), tokens, vocab).reshape(math.prod(batch), of_each_row)
    one_row = lambda ids: jnp.zeros(vocab, jnp.int32).at[ids].add(1, mode="drop")  # noqa: E731
    return jax.vmap(one_row)(flat).reshape(shape)


def count_tokens(prompt: ArrayLike, vocab: int, *, lengths: ArrayLike | None = None) -> TokenCounts:
    """The counts of a request that has generated nothing yet.

    Args:
      prompt: int `[*batch, n]`; -1, which fills a row up, is nothing, and so is a traced id outside the vocabulary.
      vocab: the number of tokens of the head (the width of `w`).
      lengths: int `[*batch]`, how many of each row's tokens are the prompt; the rest is nothing.

    Raises:
      ValueError: a known id is `vocab` or more, or below -1.

    >>> import jax.numpy as jnp
    >>> count_tokens(jnp.array([[3, 3], [1, 0]]), vocab=4, lengths=jnp.array([2, 1])).in_prompt.astype(int).tolist()
    [[0, 0, 0, 1], [0, 1, 0, 0]]
    """
    prompt, vocab = lists_of(prompt, "prompt", None), _checks.count(vocab, "vocab")
    is_real, batch_shape = True, prompt.shape[:-1]
    with jax.numpy_rank_promotion("allow"):
        if lengths is not None:
            if not _checks.is_integral(_checks.listed(lengths, "lengths")):
                raise TypeError("lengths must be integers; got other numbers: round them.")
            ends = _checks.per_row(lengths, "lengths", batch_shape, jnp.int32).reshape(batch_shape)
            if not any(map(_checks.is_traced, jax.tree.leaves(lengths))):  # known inside jit, too
                ends = np.broadcast_to(_checks.in_32_bits(np.asarray(lengths)).astype(np.int32), batch_shape)
            is_real = np.arange(prompt.shape[-1]) < ends[..., None]
        prompt = jnp.where(is_real, token_lists(prompt, "prompt", None, vocab, is_real), -1)
    seen = occurrences(prompt, (*batch_shape, vocab))
    return TokenCounts(seen > 0, jnp.zeros_like(seen))


class Processors(NamedTuple):
    """The rare options of a draw; None is off. Numbers are scalars or `[*batch]`, token lists int `[n]` or `[*batch, n]`, and
    a -1 in a list is nothing (to fill shorter rows up). Traced ids outside the vocabulary are nothing too.

    Args:
      bias_tokens, bias_values: added to the logits of these tokens; values of a token named twice add up.
      repetition_penalty: > 0; logits of tokens of prompt and output are divided by it if positive, else multiplied.
      presence_penalty: taken from the logits of tokens of the output.
      frequency_penalty: taken from them once for each time that the token occurs.
      counts: `TokenCounts` of every row; required by the penalties.
      allowed_tokens, banned_tokens: only these, or not these, may be drawn. A row that allows none has no law.
      end_tokens, min_new_tokens, num_new_tokens: end tokens are banned while a row has fewer than `min_new_tokens` tokens of
        output; `num_new_tokens` says how many it has, or else `counts` does.

    Source of the penalties: N. S. Keskar et al., "CTRL", arXiv 1909.05858 (repetition); the OpenAI API (presence, frequency).
    """

    bias_tokens: Any = None
    bias_values: Any = None
    repetition_penalty: Any = None
    presence_penalty: Any = None
    frequency_penalty: Any = None
    counts: TokenCounts | None = None
    allowed_tokens: Any = None
    banned_tokens: Any = None
    end_tokens: Any = None
    min_new_tokens: Any = None
    num_new_tokens: Any = None


def options_from_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Options of `gumbeljax.sample` from a dict with the names of a Hugging Face `GenerationConfig`.

    `processors` of the result holds the rare ones; fill its `counts` (and, for a minimum length, `num_new_tokens`) in.
    Without `do_sample` the temperature is 0. What is no part of a draw (lengths, caches, token ids of padding) is passed over.

    Raises:
      NotImplementedError: an option that changes the law and has no counterpart here is on.

    >>> options_from_config({"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95})
    {'temperature': 0.6, 'top_k': 20, 'top_p': 0.95}
    """
    neutral = {"typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "top_h": None, "num_beams": 1, "penalty_alpha": 0.0,
               "no_repeat_ngram_size": 0, "encoder_repetition_penalty": 1.0, "min_length": 0,
               "guidance_scale": 1.0, "bad_words_ids": None,
               "sequence_bias": None, "forced_bos_token_id": None, "forced_eos_token_id": None,
               "exponential_decay_length_penalty": None, "begin_suppress_tokens": None, "watermarking_config": None,
               "force_words_ids": None, "constraints": None, "dola_layers": None}
    for name, off in neutral.items():
        value = config.get(name)
        is_off = value is None or value == off or (isinstance(value, Sized) and not value)  # no words is no rule
        if not is_off:
            raise NotImplementedError(f"{name} must be {off!r}, since gumbeljax does not offer it; got {value!r}: leave it "
                                      "out.")
    out: dict[str, Any] = {}
    if not config.get("do_sample", False):
        out["temperature"] = 0.0
    elif config.get("temperature") is not None:
        out["temperature"] = config["temperature"]
    out |= {name: config[name] for name in ("top_k", "top_p", "min_p") if config.get(name) is not None}
    rare: dict[str, Any] = {}
    if config.get("repetition_penalty") not in (None, 1.0):
        rare["repetition_penalty"] = config["repetition_penalty"]
    if config.get("suppress_tokens"):
        rare["banned_tokens"] = list(config["suppress_tokens"])
    if config.get("min_new_tokens"):
        ends = config.get("eos_token_id")
        rare["min_new_tokens"] = config["min_new_tokens"]
        rare["end_tokens"] = [] if ends is None else np.atleast_1d(ends).tolist()
    return out | ({"processors": Processors(**rare)} if rare else {})


def lists_of(x: ArrayLike, name: str, batch_shape: tuple[int, ...] | None):
    """Integers `[n]` or `[*batch, n]` (any leading shape when batch_shape is None), as they are."""
    values = _checks.listed(x, name)
    if not _checks.is_integral(values):
        raise TypeError(f"{name} must be integers; got {values.dtype}: pass token ids.")
    if values.ndim == 0 or (batch_shape is not None and values.shape[:-1] not in ((), batch_shape)):
        raise ValueError(f"{name} must be [n] or {[*(batch_shape or ['*batch']), 'n']}; got {list(values.shape)}: "
                         "fill shorter rows up with -1.")
    return values


def token_lists(x: ArrayLike, name: str, batch_shape: tuple[int, ...] | None, vocab: int, is_real=True) -> Array:
    """Checked token ids of `lists_of`, int32, -1 for nothing; what is not real may be anything."""
    values = lists_of(x, name, batch_shape)
    if _checks.is_concrete(values) and _checks.is_concrete(is_real):
        known = np.asarray(values)
        if np.any(bad := is_real & ((known < -1) | (known >= vocab))):
            raise ValueError(f"{name} must name token ids from 0 to {vocab - 1} (or -1, nothing); got {known[bad][0]}: "
                             "leave it out.")
    values = _checks.as_ids(values)
    return jnp.where((values >= 0) & (values < vocab), values, -1)


def number(x: ArrayLike | None, name: str, batch_shape: tuple[int, ...], is_good,
           rule: str) -> tuple[Array | None, Array | bool]:
    """(float32 `[rows]`, where it is good): known bad values raise, traced ones are to leave their row without a law."""
    if x is None:
        return None, True
    out = _checks.per_row(x, name, batch_shape)
    if not any(map(_checks.is_traced, jax.tree.leaves(x))):
        given = np.asarray(x, np.float64).reshape(-1)
        with np.errstate(all="ignore"):
            if np.any(bad := ~(is_good(given) & is_good(given.astype(np.float32)))):  # what it is here, and what a draw sees
                raise ValueError(f"{name} must be {rule}; got {_checks.shown(given[bad][0])}: pass such a number, or None for "
                                 "none.")
    return out, is_good(out)


def filters(top_k, top_p, min_p, batch_shape: tuple[int, ...]) -> tuple[Filters | None, Array | bool]:
    """(Filters or None if all are off, where they are good). Numbers (not arrays) that are off leave nothing to compile."""
    top_k = _checks.in_32_bits(top_k)
    kind = None if top_k is None else _checks.as_array(top_k, "top_k").dtype
    if kind is not None and not jnp.issubdtype(kind, jnp.integer):
        raise TypeError(f"top_k must be an integer or integers; got {kind}: round it.")
    k, k_good = number(top_k, "top_k", batch_shape, lambda k: k >= -1, "at least -1 (0 and -1 are off)")
    p, p_good = number(top_p, "top_p", batch_shape, lambda p: (p >= 0) & (p <= 1), "between 0 and 1 (1 is off)")
    m, m_good = number(min_p, "min_p", batch_shape, lambda m: (m >= 0) & (m <= 1), "between 0 and 1 (0 is off)")
    if k is not None:
        k = _checks.per_row(top_k, "top_k", batch_shape, jnp.int32)  # as integers: float32 has 24 bits
    off = lambda x, is_off: isinstance(x, int | float | np.number) and bool(is_off(x))  # noqa: E731
    k = None if off(top_k, lambda k: k <= 0) else k
    p = None if off(top_p, lambda p: p == 1) else p
    m = None if off(min_p, lambda m: m == 0) else m
    good = k_good & p_good & m_good
    return (None if k is None and p is None and m is None else Filters(k, p, m)), good


def checked(processors) -> Processors:
    """Processors, and nothing else."""
    if not isinstance(processors, Processors):
        raise TypeError(f"processors must be a gumbeljax.Processors; got {type(processors).__name__}: write "
                        "Processors(repetition_penalty=1.1, ...).")
    return processors


LEAST = 2.0**-126  # a smaller float32 is 0 to XLA
PENALTIES = {"repetition_penalty": ("finite and positive", lambda v: (v >= LEAST) & (v < np.inf)),
             "presence_penalty": ("finite", lambda v: abs(v) < np.inf),
             "frequency_penalty": ("finite", lambda v: abs(v) < np.inf)}


def numbers_of(p: Processors, batch_shape: tuple[int, ...]) -> dict[str, tuple[Array | None, Array | bool]]:
    """`number` of every penalty."""
    return {name: number(getattr(p, name), name, batch_shape, is_good, rule) for name, (rule, is_good) in PENALTIES.items()}


def whole_number(x: ArrayLike, name: str, batch_shape: tuple[int, ...]) -> Array:
    """Checked int32 `[rows]`: float32 would not tell 2^24 from 2^24 + 1."""
    out = _checks.per_row(_checks.in_32_bits(x), name, batch_shape, jnp.int32)
    if not _checks.is_integral(_checks.listed(x, name)):
        raise TypeError(f"{name} must be an integer or integers; got other numbers: round them.")
    return out


class Dense(NamedTuple):
    """The dense form of all elementwise options, each None, `[vocab]` or `[rows, vocab]`, and where the numbers are good."""

    bias: Array | None
    mask: Array | None
    factor: Array | None
    offset: Array | None
    is_good: Array | bool


def dense(processors: Processors | None, bias: Array | None, mask: Array | None, batch_shape: tuple[int, ...], width: int,
          vocab: int) -> Dense:
    """Processors over the vocabulary, on top of the dense `bias` and `mask` (`[vocab]` or `[rows, vocab]`)."""
    if processors is None:
        return Dense(bias, mask, None, None, True)
    p = checked(processors)
    if p.counts is not None:
        if not isinstance(p.counts, TokenCounts):
            raise TypeError(f"counts must be a gumbeljax.TokenCounts; got {type(p.counts).__name__}: make them with "
                            "count_tokens.")
        counts = TokenCounts(*(_checks.as_array(x, "counts") for x in p.counts))
        if counts.output.shape != (*batch_shape, width) or counts.in_prompt.shape != counts.output.shape:
            raise ValueError(f"counts must be {[*batch_shape, width]}, as wide as the vocabulary of w; got "
                             f"{list(counts.in_prompt.shape)}, {list(counts.output.shape)}: make them with count_tokens.")
        if counts.in_prompt.dtype != jnp.bool_ or not _checks.is_integral(counts.output):
            raise TypeError(f"counts must be boolean (in_prompt) and integers (output); got {counts.in_prompt.dtype} and "
                            f"{counts.output.dtype}: make them with count_tokens.")
        p = p._replace(counts=counts)
    rows = math.prod(batch_shape)
    lists = {}
    for name in LISTS:
        if (x := getattr(p, name)) is not None:
            x = token_lists(x, name, batch_shape, vocab)
            lists[name] = x if x.ndim == 1 else x.reshape(rows, x.shape[-1])
    if (p.bias_tokens is None) != (p.bias_values is None):
        raise ValueError("bias_tokens and bias_values must be given together; got one of them: pass both.")
    numbers = numbers_of(p, batch_shape)
    is_good = functools.reduce(lambda a, b: a & b, [good for _, good in numbers.values()])
    counts = None
    if any(x is not None for x, _ in numbers.values()):
        if p.counts is None:
            raise ValueError("counts must be given with penalties; got None: make them with count_tokens.")
        counts = TokenCounts(*(x.reshape(rows, width)[:, :vocab] for x in p.counts))
    if (p.min_new_tokens is None) != (p.end_tokens is None):
        raise ValueError("end_tokens and min_new_tokens must be given together; got one of them: pass both.")
    too_short = None
    if p.min_new_tokens is not None:
        if p.num_new_tokens is None and p.counts is None:
            raise ValueError("num_new_tokens must be given with min_new_tokens; got None: pass the length of the output.")
        have = p.counts.output.sum(-1) if p.num_new_tokens is None else p.num_new_tokens  # pyright: ignore
        too_short = (whole_number(have, "num_new_tokens", batch_shape)
                     < whole_number(p.min_new_tokens, "min_new_tokens", batch_shape))
    values = None
    if p.bias_values is not None:
        values = _checks.float_array(p.bias_values, "bias_values").astype(jnp.float32)
        if values.shape != np.shape(p.bias_tokens):
            raise ValueError(f"bias_values must have the shape of bias_tokens, {list(np.shape(p.bias_tokens))}; got "
                             f"{list(values.shape)}: give every token one.")
        values = values.reshape(lists["bias_tokens"].shape)
    numbers = {name: x for name, (x, _) in numbers.items()}
    with jax.numpy_rank_promotion("allow"):
        bias, mask, factor, offset = _dense(lists, numbers, counts, values, too_short, bias, mask, vocab=vocab)
    return Dense(bias, mask, factor, offset, is_good)


LISTS = ("bias_tokens", "allowed_tokens", "banned_tokens", "end_tokens")


def of_shard(processors: Processors | None, first, vocab: int, batch_shape: tuple[int, ...]) -> Processors | None:
    """Processors with the ids of a shard whose first token is `first`; ids of other shards become nothing. Counts are the
    shard's own already."""
    if not isinstance(processors, Processors):
        return processors
    if processors.min_new_tokens is not None and processors.num_new_tokens is None:
        raise ValueError("num_new_tokens must be given with min_new_tokens on a vocabulary that is cut over devices; got None: "
                         "pass the length of the output.")
    given = {name: x for name in LISTS if (x := getattr(processors, name)) is not None}
    ids = {name: token_lists(x, name, batch_shape, vocab) for name, x in given.items()}
    return processors._replace(**{name: jnp.where(x < 0, -1, x - first) for name, x in ids.items()})


@functools.partial(jax.jit, static_argnames="vocab")
def _dense(lists, numbers, counts, values, too_short, bias, mask, *, vocab):
    """(bias, mask, factor, offset) from checked options."""
    def put(ids, start, update):
        """Scatters lists of ids into the vocabulary; id -1 falls outside."""
        one = lambda ids, u: jnp.full(vocab, start).at[jnp.where(ids < 0, vocab, ids)].add(u, mode="drop")  # noqa: E731
        return one(ids, update) if ids.ndim == 1 else jax.vmap(one)(ids, jnp.broadcast_to(update, ids.shape))

    def both(a, b):
        return b if a is None else a & b

    has = lambda name: put(lists[name], jnp.int32(0), jnp.int32(1)) > 0  # noqa: E731
    if "bias_tokens" in lists:
        sparse = put(lists["bias_tokens"], jnp.float32(0), values)
        bias = sparse if bias is None else bias + sparse
    if "allowed_tokens" in lists:
        mask = both(mask, has("allowed_tokens"))
    if "banned_tokens" in lists:
        mask = both(mask, ~has("banned_tokens"))
    if too_short is not None:
        mask = both(mask, ~(has("end_tokens") & too_short[:, None]))
    factor = offset = None
    if (repetition := numbers["repetition_penalty"]) is not None:
        factor = jnp.where(counts.in_prompt | (counts.output > 0), repetition[:, None], 1.0)
    if (presence := numbers["presence_penalty"]) is not None:
        offset = jnp.where(counts.output > 0, presence[:, None], 0.0)
    if (frequency := numbers["frequency_penalty"]) is not None:
        per_count = frequency[:, None] * counts.output.astype(jnp.float32)
        offset = per_count if offset is None else offset + per_count
    return bias, mask, factor, offset
