"""Which waiting request gets which row, and whose pages: decided by the host between chunks, on lists of token ids.

A request is admitted when the pages that it and all who are seated may ever need are free, so no row runs out later and
none is ever sent away. Pages of rows that have ended stay until they are needed: a prefix they hold may come again.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from gumbeljax.decode.requests import Request


class Plan(NamedTuple):
    """One request of an admission round."""

    index: int
    request: Request
    prompt: np.ndarray
    row: int
    source: int  # row whose pages it shares, or -1
    num_shared: int  # tokens in them


class House(NamedTuple):
    """What the host knows of the rows."""

    texts: Sequence[np.ndarray]  # tokens that the pages of each row hold
    free_rows: Sequence[int]  # rows without a request
    num_free: int  # pages
    num_promised: int  # of them, those that seated requests may yet take
    page_size: int


def num_blocks(length: int, page_size: int) -> int:
    """Pages of a row of ``length`` tokens."""
    return -(-length // page_size)


def common(a: np.ndarray, b: np.ndarray) -> int:
    """Length of the common prefix of two texts.

    >>> common(np.array([1, 2, 3]), np.array([1, 2, 4, 5]))
    2
    """
    size = min(a.size, b.size)
    differs = np.flatnonzero(a[:size] != b[:size])
    return int(differs[0]) if differs.size else size


def best_source(prompt: np.ndarray, texts: Sequence[np.ndarray], page_size: int) -> tuple[int, int]:
    """The text that shares most full pages with a prompt, and how many tokens they hold; ``(-1, 0)`` for none.

    The last token of the prompt is never shared: running it gives the hidden state from which to draw.
    """
    shared = [min(common(prompt, text), prompt.size - 1) // page_size * page_size for text in texts]
    best = max(range(len(shared)), key=shared.__getitem__, default=-1)
    return (best, shared[best]) if best >= 0 and shared[best] else (-1, 0)


def plan_round(waiting: Iterable[tuple[int, Request]], house: House, *, shares_prefix: bool) -> list[Plan]:
    """The requests, in order, that can be seated now.

    One that would share more with another of the round waits for the next round, when that one's pages are there.
    """
    plans: list[Plan] = []
    rows, promised = list(house.free_rows), house.num_promised
    for index, request in waiting:
        if not rows:
            break
        prompt, source, num_shared = np.asarray(request.prompt, np.int32), -1, 0
        if shares_prefix:
            source, num_shared = best_source(prompt, house.texts, house.page_size)
            if best_source(prompt, [plan.prompt for plan in plans], house.page_size)[1] > num_shared:
                break
        need = num_blocks(prompt.size + request.max_new_tokens, house.page_size) - num_shared // house.page_size
        if promised + need > house.num_free:
            break
        promised += need
        # The row whose pages are least worth keeping: the source's own, an empty one, a short one.
        row = min(rows, key=lambda i, source=source: (i != source, house.texts[i].size))
        rows.remove(row)
        plans.append(Plan(index, request, prompt, row, source, num_shared))
    return plans
