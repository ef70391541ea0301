"""What a server is asked for, and what it answers, one piece per chunk."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from gumbeljax._checks import table_of
from gumbeljax._keys import as_threefry, typed_key
from gumbeljax._typing import Key
from gumbeljax.decode.stops import stop_strings

NO_OPTIONS: Mapping[str, Any] = {}


class Request(NamedTuple):
    """One prompt to continue."""

    prompt: Sequence[int] | np.ndarray  # token ids, at least one
    key: Key  # the request key: the token at position p is drawn with fold_in(key, p)
    max_new_tokens: int
    min_new_tokens: int = 0
    eos_tokens: int | Sequence[int] = ()
    stop: str | Sequence[str] = ()
    sampling: Mapping[str, Any] = NO_OPTIONS  # options of this request, over the defaults given to serve


class Output(NamedTuple):
    """Tokens of one request that a chunk has drawn."""

    index: int  # of the request, in the order in which they came
    tokens: np.ndarray  # int32[num_new]
    draws: Any  # all that sample_fn returned for them, leaves [num_new, ...]
    reason: str | None  # None while it goes on, else why it ended: "eos", "stop", "length" or "no law"


def whole_numbers(x: Any, name: str) -> np.ndarray:
    """Integers of 32 bits, or one sentence: a length of 3.5 would never be reached.

    >>> whole_numbers([3, 4], "lengths"), whole_numbers([], "lengths").dtype
    (array([3, 4], dtype=int32), dtype('int32'))
    """
    try:
        values = np.asarray(x)
    except ValueError:
        raise ValueError(f"{name} must be of one length, got lists of several; fill shorter ones up.") from None
    if values.size and (values.dtype.kind not in "iu" or values.min() < -(2**31) or values.max() >= 2**31):
        raise TypeError(f"{name} must be whole numbers of 32 bits, got {str(x)[:40]}; round them.")
    return values.astype(np.int32)


def check_pad(pad_token: Any) -> None:
    """The pad token is a constant of the loop."""
    if isinstance(pad_token, bool) or not isinstance(pad_token, int | np.integer):
        raise TypeError(f"pad_token must be a Python int, got {pad_token!r}; pass a token id.")


def known_vocab(w: Any, sample_fn: Callable) -> int | None:
    """Rows of the head, or None where only a ``sample_fn`` of the user's knows what ``w`` is."""
    function = getattr(sample_fn, "func", sample_fn)
    shape = np.shape(table_of(w))
    if not str(getattr(function, "__module__", "")).startswith("gumbeljax.") or len(shape) != 2:
        return None
    return shape[getattr(sample_fn, "keywords", {}).get("vocab_axis", 0)]


def check_ids(ids: np.ndarray, vocab: int | None, name: str) -> None:
    """Token ids that the model has: an embedding table answers others with NaN, negative ones with its last rows.

    >>> check_ids(np.array([4, 53]), 53, "prompt")
    Traceback (most recent call last):
    ValueError: prompt must hold token ids from 0 to 52, got 53; encode it with the model's own tokenizer.
    """
    outside = ids[(ids < 0) | (ids >= (2**31 if vocab is None else vocab))]
    if outside.size:
        rule = "of at least 0" if vocab is None else f"from 0 to {vocab - 1}"
        raise ValueError(f"{name} must hold token ids {rule}, got {outside[0]}; encode it with the model's own tokenizer.")


def checked(request: Request, index: int, vocab: int | None = None) -> Request:
    """The request in one form: its numbers as ints, its key a threefry key, one end token or stop string in a tuple."""
    if not isinstance(request, Request):
        raise TypeError(f"requests must be gumbeljax.decode.Request, got {type(request).__name__}; write Request(prompt, ...).")
    whose = f"of request {index}"
    names = ("prompt", "max_new_tokens", "min_new_tokens", "eos_tokens")
    prompt, most, least, ends = (whole_numbers(getattr(request, name), f"{name} {whose}") for name in names)
    if prompt.ndim != 1:
        raise ValueError(f"prompt {whose} must be one list of token ids, got shape {list(prompt.shape)}; give every prompt a "
                         "request of its own.")  # fmt: skip
    check_ids(prompt, vocab, f"prompt {whose}")
    for name, value in (("max_new_tokens", most), ("min_new_tokens", least)):
        if value.ndim:
            raise ValueError(f"{name} {whose} must be one number, got shape {list(value.shape)}; pass an int.")
    key = as_threefry(typed_key(request.key))
    if key.shape:
        raise ValueError(f"key {whose} must be one key, got keys of shape {list(key.shape)}; give every request its own.")
    if not isinstance(request.sampling, Mapping):
        raise TypeError(f"sampling {whose} must be a mapping, got {type(request.sampling).__name__}; leave it out for none.")
    for name, value in request.sampling.items():
        if not (np.asarray(value).dtype == bool or jnp.issubdtype(np.asarray(value).dtype, np.number)):
            raise TypeError(f"{name} {whose} must be numbers, got {value!r}; pass a number or an array.")
    return Request(
        prompt, key, int(most), min(max(int(least), 0), max(int(most), 0)), tuple(ends.reshape(-1).tolist()),
        stop_strings(request.stop, f"stop {whose}"), request.sampling,
    )  # fmt: skip


def end_reason(tokens: np.ndarray, request: Request, is_stopped: bool) -> str | None:
    """Why the output ``tokens`` ends with its last token; of several reasons the first in the order of ``Output``.

    >>> end_reason(np.array([4, 2]), Request([1], None, max_new_tokens=2, eos_tokens=(2,)), is_stopped=True)
    'eos'
    """
    if tokens.size and tokens[-1] < 0:
        return "no law"
    if tokens.size and tokens[-1] in np.atleast_1d(request.eos_tokens):
        return "eos"
    if is_stopped:
        return "stop"
    return "length" if tokens.size >= request.max_new_tokens else None
