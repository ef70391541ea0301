"""Stop strings, found by the host between chunks."""

from collections.abc import Callable, Iterable, Sequence

import numpy as np


def stop_strings(stop: str | Sequence[str], name: str = "stop") -> tuple[str, ...]:
    """Stop strings, checked; one alone may be given as it is.

    >>> stop_strings("END"), stop_strings(["a", "b"])
    (('END',), ('a', 'b'))
    """
    strings = (stop,) if isinstance(stop, str) or not isinstance(stop, Iterable) else tuple(stop)
    for string in strings:
        if not isinstance(string, str) or not string:  # every text contains the empty one
            raise ValueError(f"{name} must be texts with at least one character, got {string!r}; leave it out.")
    return strings


def find_stop(tokens: np.ndarray, start: int, stop: Sequence[str], text_fn: Callable[[Sequence[int]], str]) -> int | None:
    """The least number of tokens, above ``start``, whose text contains a stop string; None if there is none.

    >>> text_fn = lambda tokens: "".join("ab."[t] for t in tokens)
    >>> find_stop(np.array([0, 1, 2, 2, 1]), 1, ["..", "b."], text_fn)
    3
    >>> find_stop(np.array([0, 1, 2]), 1, ["ba"], text_fn) is None
    True
    """

    def has_stop(count: int) -> bool:
        text = text_fn(tokens[:count].tolist())
        return any(string in text for string in stop)

    if not stop or not has_stop(len(tokens)):
        return None
    # Texts of token prefixes need not be prefixes of texts (a cut character), so all are tried.
    return next((count for count in range(start + 1, len(tokens)) if has_stop(count)), len(tokens))


def cut_text(text: str, stop: Sequence[str]) -> str:
    """``text`` up to the first stop string, which is left out.

    >>> cut_text("yes. No.", [".", "No"])
    'yes'
    """
    return text[: min((at for string in stop if (at := text.find(string)) >= 0), default=len(text))]
