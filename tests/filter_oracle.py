"""What a serving engine does to logits, in NumPy float64 and by honest sorts and loops over lists of tokens.

Imports nothing but the oracle of the draw. Rows are worked on one by one; an option is a scalar or has a value for each row.
Numbers that the library takes as float32 are rounded to float32 first, since that is the law that was asked for.
"""

from typing import Any, NamedTuple

import numpy as np

from tests import oracles

BAND = 1e-6  # of the mass: where rounding may decide whether a token crosses top_p


class Options(NamedTuple):
    """Everything that may be asked of a draw; token lists are Python lists, one for each row."""

    temperature: Any = 1.0
    top_k: Any = 0
    top_p: Any = 1.0
    min_p: Any = 0.0
    scale: float | None = None
    soft_cap: float | None = None
    valid_vocab: int | None = None
    logit_bias: Any = None
    sparse_bias: Any = None  # list of (token, value) for each row
    prompt: Any = None
    output: Any = None
    repetition: Any = 1.0
    presence: Any = 0.0
    frequency: Any = 0.0
    mask: Any = None
    allowed: Any = None  # None, or a list for each row
    banned: Any = None
    end_tokens: Any = None
    min_new: Any = 0


class Laws(NamedTuple):
    """`[rows, vocab]`: logits before temperature, the kept set, where rounding may turn it, and three kinds of log-probs."""

    logits: np.ndarray
    kept: np.ndarray
    near: np.ndarray
    model: np.ndarray
    tempered: np.ndarray
    processed: np.ndarray


def f32(x):
    """A float32 number, as float64."""
    return np.asarray(x, np.float32).astype(np.float64)


def per_row(x, rows):
    return np.broadcast_to(np.asarray(x), (rows,))


def laws(logits, options: Options) -> Laws:
    """All that is to be known about a draw."""
    rows = len(logits)
    model, x = processed_logits(logits, options)
    t = per_row(f32(options.temperature), rows)
    k, p, m = (per_row(v, rows) for v in (options.top_k, f32(options.top_p), f32(options.min_p)))
    kept, near = (np.stack(a) for a in zip(*(kept_set(*row) for row in zip(x, t, k, p, m, strict=True)), strict=True))
    tempered = oracles.log_softmax(x, t)
    processed = oracles.log_softmax(np.where(kept | ~np.isfinite(tempered).any(1)[:, None], x, -np.inf), t)
    return Laws(x, kept, near, oracles.log_softmax(model), tempered, processed)


# Processors


def processed_logits(logits, options: Options):
    """(model logits, processed logits) before temperature: bias, sparse bias, penalties, then everything that forbids."""
    o, rows = options, len(logits)
    model, x = oracles.processed_logits(
        logits, scale=o.scale, soft_cap=o.soft_cap, logit_bias=o.logit_bias, valid_vocab=o.valid_vocab
    )
    x = np.array(x)
    numbers = [per_row(f32(v), rows) for v in (o.repetition, o.presence, o.frequency)]
    for i in range(rows):
        for token, value in (o.sparse_bias or [()] * rows)[i]:
            x[i, token] += f32(value)
        penalise(x[i], (o.prompt or [()] * rows)[i], (o.output or [()] * rows)[i], *(v[i] for v in numbers))
        if o.allowed is not None:
            x[i, [v for v in range(x.shape[1]) if v not in o.allowed[i]]] = -np.inf
        if o.banned is not None:
            x[i, list(o.banned[i])] = -np.inf
        if o.end_tokens is not None and len((o.output or [()] * rows)[i]) < per_row(o.min_new, rows)[i]:
            x[i, list(o.end_tokens[i])] = -np.inf
    if o.mask is not None:
        x = np.where(np.asarray(o.mask, bool), x, -np.inf)
    return model, x


def penalise(x, prompt, output, repetition, presence, frequency):
    """In place, on one row: repetition once for each id seen, presence once for each of the output, frequency each time."""
    for token in set(prompt) | set(output):
        x[token] = x[token] / repetition if x[token] > 0 else x[token] * repetition
    for token in set(output):
        x[token] -= presence
        x[token] -= frequency * list(output).count(token)


# Filters


def descending(x):
    """Ids in order: largest logit first, lowest id first among equals (0.0 and -0.0 are equal)."""
    return np.lexsort((np.arange(len(x)), -x))


def weights_of(x, t):
    """exp((l - max l) / T); at T = 0 the limit: 1 for the largest logits, else 0."""
    if t < oracles.SMALLEST_TEMPERATURE:
        return np.where(x == x.max(), 1.0, 0.0)
    return np.exp((x - x.max()) / t)


def kept_set(x, t, top_k, top_p, min_p):
    """(kept, near) of one row: top_k, then top_p on what is left, renormalised and with the crossing token, then min_p.

    `near` is where a mass is within BAND of top_p, or a weight relatively so near to min_p that float32 may decide.
    """
    kept, near = np.zeros(len(x), bool), np.zeros(len(x), bool)
    if not np.isfinite(x.max()) or not np.isfinite(t) or t < 0:
        return kept, near
    order = [v for v in descending(x) if x[v] > -np.inf]
    if top_k > 0:
        order = order[:top_k]
    weights = weights_of(x, t)
    base, mass = weights[order].sum(), 0.0
    for place, token in enumerate(order):
        inside = place == 0 or top_p >= 1 or mass / base < top_p
        near[token] = place > 0 and top_p < 1 and abs(mass / base - top_p) <= BAND
        if not inside and not near[token]:
            break
        kept[token] = inside
        mass += weights[token]
    if min_p > 0:
        with np.errstate(divide="ignore"):
            close = abs(weights / min_p - 1) <= 1e-6 * max(1.0, -np.log(min_p))
        close &= weights < 1  # the largest token is always kept
        near |= kept & close
        kept &= weights >= min_p
        near &= (weights >= min_p) | close
    return kept, near


# Lists of the best


def best_tokens(log_probs, num):
    """(tokens, log-probs) `[rows, num]` of the largest, lowest id first; -1 and NaN where none with mass is left."""
    tokens, values = np.full((len(log_probs), num), -1), np.full((len(log_probs), num), np.nan)
    for i, row in enumerate(log_probs):
        if not np.isnan(row).any():
            order = [v for v in descending(row) if row[v] > -np.inf][:num]
            tokens[i, : len(order)], values[i, : len(order)] = order, row[order]
    return tokens, values


def rank(log_probs, logits, tokens):
    """1 for the most probable token of a row, 0 for a token outside the law."""
    out = []
    for row, x, token in zip(log_probs, logits, tokens, strict=True):
        inside = 0 <= token < len(row) and row[token] > -np.inf
        order = [v for v in descending(x) if row[v] > -np.inf] if inside else []
        out.append(order.index(token) + 1 if inside else 0)
    return np.array(out)
