"""What a server is asked for, and what it answers, one piece per chunk."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from gumbeljax._typing import Key

NO_OPTIONS: Mapping[str, Any] = {}


class Request(NamedTuple):
    """One prompt to continue."""

    prompt: Sequence[int]  # token ids, at least one
    key: Key  # the request key: the token at position p is drawn with fold_in(key, p)
    max_new_tokens: int
    min_new_tokens: int = 0
    eos_tokens: Sequence[int] = ()
    stop: Sequence[str] = ()
    sampling: Mapping[str, Any] = NO_OPTIONS  # options of this request, over the defaults given to serve


class Output(NamedTuple):
    """Tokens of one request that a chunk has drawn."""

    index: int  # of the request, in the order in which they came
    tokens: np.ndarray  # int32[num_new]
    draws: Any  # all that sample_fn returned for them, leaves [num_new, ...]
    reason: str | None  # None while it goes on, else why it ended: "eos", "stop", "length" or "no law"


def end_reason(tokens: np.ndarray, request: Request, is_stopped: bool) -> str | None:
    """Why the output ``tokens`` ends with its last token; of several reasons the first in the order of ``Output``.

    >>> end_reason(np.array([4, 2]), Request([1], None, max_new_tokens=2, eos_tokens=(2,)), is_stopped=True)
    'eos'
    """
    if tokens.size and tokens[-1] < 0:
        return "no law"
    if tokens.size and tokens[-1] in tuple(request.eos_tokens):
        return "eos"
    if is_stopped:
        return "stop"
    return "length" if tokens.size >= request.max_new_tokens else None
