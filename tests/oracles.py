"""The laws of gumbeljax in NumPy float64: what every implementation is compared with.

Nothing here imports gumbeljax, pallas_kernels or jax. Only the integer noise bits and the float32 uniform made from
them are computed in the precision the law names; everything after is float64, where a tie of two scores does not
happen by rounding. Rows are worked on in chunks, so 256 rows of 152k logits take a few seconds.

Shapes: `logits [rows, vocab]`, `row_keys uint32 [rows, 2]`, `temperature` a scalar or `[rows]`.
"""

from typing import NamedTuple

import numpy as np

GROUP = 16
DRAW, COIN, RESIDUAL, BONUS, MERGE, RESAMPLING, BANDIT = range(7)
GROUP_LEVEL, TOKEN_LEVEL = 0, 1
NO_TOKEN = -1
SMALLEST_TEMPERATURE = 2.0**-100  # below it: greedy
_CHUNK = 1 << 22  # logits held in float64 at a time


class Draw(NamedTuple):
    """Tokens and how close they were to being others.

    `score` is the winning group's score in logit units (NaN for a greedy or a marked row). `group_gap` and `token_gap`
    are winner minus runner-up, in logit units; inf when there is no runner-up. A greedy row has `group_gap` inf and
    its two largest logits' difference as `token_gap`. Shape of each: `[rows]`, or `[rows, num_samples]`.
    """

    tokens: np.ndarray
    score: np.ndarray
    group_gap: np.ndarray
    token_gap: np.ndarray

    def near_tie(self, tolerance: float = 1e-4) -> np.ndarray:
        """Where rounding of the logits could have changed the token."""
        return np.minimum(self.group_gap, self.token_gap) < tolerance


# Noise field v1


def threefry2x32(k0, k1, c0, c1):
    """Threefry-2x32 with 20 rounds (Salmon et al., 2011); uint32 arrays of any shapes that broadcast."""
    k0, k1, x0, x1 = (np.asarray(x).astype(np.uint32) for x in (k0, k1, c0, c1))
    shape = np.broadcast_shapes(k0.shape, k1.shape, x0.shape, x1.shape)
    keys = (k0, k1, k0 ^ k1 ^ np.uint32(0x1BD11BDA))
    rotations = ((13, 15, 26, 6), (17, 29, 16, 24))
    with np.errstate(over="ignore"):
        x0, x1 = np.broadcast_to(x0, shape) + k0, np.broadcast_to(x1, shape) + k1
        for block in range(5):
            for r in rotations[block % 2]:
                x0 = x0 + x1
                x1 = ((x1 << np.uint32(r)) | (x1 >> np.uint32(32 - r))) ^ x0
            x0 = x0 + keys[(block + 1) % 3]
            x1 = x1 + keys[(block + 2) % 3] + np.uint32(block + 1)
    return x0, x1


def fold_in(row_keys, data):
    """`jax.random.fold_in` of threefry keys: the counter (0, data). Keys `[..., 2]`, data broadcasts with `[...]`."""
    row_keys = np.asarray(row_keys, np.uint32)
    return np.stack(threefry2x32(row_keys[..., 0], row_keys[..., 1], np.uint32(0), data), axis=-1)


def row_keys_of(key, rows: int):
    """Row keys of one key `[2]` for a batch of `rows` rows (row-major)."""
    return fold_in(np.asarray(key, np.uint32)[None], np.arange(rows, dtype=np.uint32))


def stream(purpose: int, sample: int, level: int) -> int:
    return 2**31 + 2**24 * purpose + 2 * sample + level


def uniform(w0, w1):
    """float32 in (0, 1) from two words; dense near 0, where the large Gumbels come from."""
    scale, half = np.float32(2.0**-32), np.float32(2.0**-33)
    u = (w0.astype(np.float32) + w1.astype(np.float32) * scale + half) * scale
    return np.minimum(u, np.float32(1 - 2.0**-24))


def gumbel(k0, k1, stream_id, index):
    """Standard Gumbel noise of counter (stream_id, index) in float64, from the float32 uniform of the law."""
    return -np.log(-np.log1p(-uniform(*threefry2x32(k0, k1, stream_id, index)).astype(np.float64)))


# Processed logits and their laws


class Processed(NamedTuple):
    model: np.ndarray  # the model's own logits: scale, soft cap, valid_vocab
    processed: np.ndarray  # those, with bias and mask


def processed_logits(logits, *, scale=None, soft_cap=None, logit_bias=None, mask=None, valid_vocab=None) -> Processed:
    """logits -> scale -> soft cap -> [model] -> bias -> mask, valid_vocab -> [processed], before temperature.

    `valid_vocab` cuts padding of the head, which is no part of the model's law, so the model's logits lose it too.
    """
    x = np.asarray(logits).astype(np.float64)
    with np.errstate(invalid="ignore"):
        if scale is not None:
            x = x * float(scale)
        if soft_cap is not None:
            x = float(soft_cap) * np.tanh(x / float(soft_cap))
        real = np.arange(x.shape[-1]) < (x.shape[-1] if valid_vocab is None else valid_vocab)
        model = np.where(real, x, -np.inf)
        x = model if logit_bias is None else np.where(real, model + np.asarray(logit_bias).astype(np.float64), -np.inf)
        x = x if mask is None else np.where(np.asarray(mask, bool), x, -np.inf)
    return Processed(model, x)


def logsumexp(x, axis=-1):
    """Stable in float64; -inf for an empty sum."""
    top = np.max(x, axis=axis, keepdims=True)
    top = np.where(np.isneginf(top), 0.0, top)
    with np.errstate(divide="ignore"):
        return np.squeeze(top, axis) + np.log(np.sum(np.exp(x - top), axis=axis))


def log_softmax(logits, temperature=1.0):
    """Log-probabilities `[rows, vocab]` of softmax(logits / T); at T = 0 all on the lowest id of the row's maximum."""
    logits = np.asarray(logits).astype(np.float64)
    t = _temperatures(temperature, len(logits))
    lawless, greedy = _lawless(logits, t), t < SMALLEST_TEMPERATURE
    safe = np.where(lawless[:, None], 0.0, logits)
    x = (safe - safe.max(-1, keepdims=True)) / np.where(greedy | lawless, 1.0, t)[:, None]
    x = x - logsumexp(x)[:, None]
    point = np.where(np.arange(logits.shape[-1]) == safe.argmax(-1)[:, None], 0.0, -np.inf)
    return np.where(lawless[:, None], np.nan, np.where(greedy[:, None], point, x))


def _temperatures(temperature, rows):
    return np.broadcast_to(np.asarray(temperature, np.float32).astype(np.float64), (rows,))


def _lawless(logits, t):
    """Rows with no law: nothing allowed, a NaN or +inf logit, or a temperature that is negative, NaN or infinite."""
    top = logits.max(-1)  # NaN if any is NaN
    return ~np.isfinite(top) | ~np.isfinite(t) | (t < 0)


# Draws


def grouped_tokens(logits, row_keys, temperature=1.0, *, sample=0, num_samples=None, purpose=DRAW):
    """int32 tokens of the grouped Gumbel-max law, `[rows]` or `[rows, num_samples]` (independent samples)."""
    return grouped_draw(logits, row_keys, temperature, sample=sample, num_samples=num_samples, purpose=purpose).tokens


def grouped_draw(logits, row_keys, temperature=1.0, *, sample=0, num_samples=None, purpose=DRAW) -> Draw:
    """`grouped_tokens` with the scores' gaps. Samples are numbered `sample, sample + 1, ...`."""
    logits, row_keys = np.asarray(logits), np.asarray(row_keys, np.uint32)
    t = _temperatures(temperature, len(logits))
    samples = range(sample, sample + (1 if num_samples is None else num_samples))
    parts = [_draw_rows(logits[i], row_keys[i], t[i], samples, purpose) for i in _chunks(logits)]
    draw = Draw(*(np.concatenate(x) for x in zip(*parts, strict=True)))
    return Draw(*(x[:, 0] for x in draw)) if num_samples is None else draw


def group_scores(logits, row_keys, temperature, *, sample=0, purpose=DRAW):
    """The score of every group in the draw of one sample, float64 `[rows, groups]`, at positive temperatures."""
    logits, row_keys = np.asarray(logits, np.float64), np.asarray(row_keys, np.uint32)
    x, m, t = _grouped(logits, _temperatures(temperature, len(logits)))
    first_ids = np.arange(m.shape[1], dtype=np.uint32) * GROUP
    noise = gumbel(row_keys[:, :1], row_keys[:, 1:], stream(purpose, sample, GROUP_LEVEL), first_ids)
    return m + t[:, None] * (_scaled_masses(x, m, t) + noise)


def grouped_without_replacement(logits, row_keys, k, temperature=1.0, *, purpose=DRAW):
    """int32 `[rows, k]`: k distinct tokens in Plackett-Luce order, -1 where the row runs out of tokens."""
    logits, row_keys = np.asarray(logits), np.asarray(row_keys, np.uint32)
    t = _temperatures(temperature, len(logits))
    return np.concatenate([_distinct_rows(logits[i], row_keys[i], t[i], k, purpose) for i in _chunks(logits)])


def categorical_low(logits, key):
    """`jax.random.categorical(key, logits)` for float32 logits of any shape (mode "low", partitionable threefry)."""
    logits, key = np.asarray(logits, np.float32), np.asarray(key, np.uint32)
    flat, tokens = logits.reshape(-1, logits.shape[-1]), []
    for i in _chunks(flat):
        count = np.arange(i.start * flat.shape[-1], i.stop * flat.shape[-1], dtype=np.uint64)
        w0, w1 = threefry2x32(key[0], key[1], count >> np.uint64(32), count & np.uint64(0xFFFFFFFF))
        u = (((w0 ^ w1) >> np.uint32(9)) | np.uint32(0x3F800000)).view(np.float32) - np.float32(1)
        u = np.maximum(u, np.finfo(np.float32).tiny).astype(np.float64)
        tokens.append(np.argmax(flat[i] - np.log(-np.log(u)).reshape(flat[i].shape), axis=-1))
    return np.concatenate(tokens).astype(np.int32).reshape(logits.shape[:-1])


def _chunks(logits):
    step = max(1, _CHUNK // logits.shape[-1])
    return [slice(i, min(i + step, len(logits))) for i in range(0, max(len(logits), 1), step)]


def _grouped(logits, t):
    """[rows, groups, 16] float64 logits padded with -inf, the groups' maxima, and temperatures safe to divide by."""
    rows, vocab = logits.shape
    x = np.full((rows, -(-vocab // GROUP) * GROUP), -np.inf)
    x[:, :vocab] = logits
    x = x.reshape(rows, -1, GROUP)
    return x, x.max(-1), np.where(t >= SMALLEST_TEMPERATURE, t, 1.0)


def _scaled_masses(x, m, t):
    """log sum exp((l - m) / T) of each group, relative to its own maximum; -inf for an empty group."""
    safe = np.where(np.isneginf(m), 0.0, m)
    with np.errstate(divide="ignore"):
        return np.log(np.sum(np.exp((x - safe[..., None]) / t[:, None, None]), axis=-1))


def _two_best(x):
    """Lowest index of the maximum along the last axis, the maximum, and its distance to the next best."""
    best = x.argmax(-1)
    top = np.take_along_axis(x, best[..., None], -1)[..., 0]
    rest = np.where(np.arange(x.shape[-1]) == best[..., None], -np.inf, x)
    with np.errstate(invalid="ignore"):
        return best, top, top - rest.max(-1)


def _draw_rows(logits, row_keys, t, samples, purpose) -> Draw:
    logits = logits.astype(np.float64)
    rows = len(logits)
    lawless = _lawless(logits, t)
    greedy = t < SMALLEST_TEMPERATURE
    logits = np.where(lawless[:, None], 0.0, logits)
    x, m, safe_t = _grouped(logits, np.where(lawless, 1.0, t))
    mass = _scaled_masses(x, m, safe_t)
    k0, k1 = row_keys[:, :1], row_keys[:, 1:]
    first_ids = np.arange(m.shape[1], dtype=np.uint32) * GROUP
    greedy_token, _, greedy_gap = _two_best(logits)
    out = []
    for s in samples:
        noise = gumbel(k0, k1, stream(purpose, s, GROUP_LEVEL), first_ids)
        group, score, group_gap = _two_best(m + safe_t[:, None] * (mass + noise))
        ids = group[:, None] * GROUP + np.arange(GROUP)
        inside = x[np.arange(rows), group]
        noise = gumbel(k0, k1, stream(purpose, s, TOKEN_LEVEL), ids)
        place, _, token_gap = _two_best((inside - m[np.arange(rows), group][:, None]) / safe_t[:, None] + noise)
        token = np.where(greedy, greedy_token, group * GROUP + place)
        out.append(
            Draw(
                np.where(lawless, NO_TOKEN, token).astype(np.int32),
                np.where(lawless | greedy, np.nan, score),
                np.where(lawless | greedy, np.inf, group_gap),
                np.where(lawless, np.inf, np.where(greedy, greedy_gap, token_gap * safe_t)),
            )
        )
    return Draw(*(np.stack(a, axis=1) for a in zip(*out, strict=True)))


def _distinct_rows(logits, row_keys, t, k, purpose):
    logits = logits.astype(np.float64)
    lawless = _lawless(logits, t)
    greedy = t < SMALLEST_TEMPERATURE
    logits = np.where(lawless[:, None], 0.0, logits)
    x, m, safe_t = _grouped(logits, np.where(lawless, 1.0, t))
    k0, k1 = row_keys[:, :1], row_keys[:, 1:]
    first_ids = np.arange(m.shape[1], dtype=np.uint32) * GROUP
    scores = _scaled_masses(x, m, safe_t) + gumbel(k0, k1, stream(purpose, 0, GROUP_LEVEL), first_ids)
    groups = np.argsort(-(m + safe_t[:, None] * scores), axis=-1, kind="stable")[:, :k]
    x, m, scores = (
        np.take_along_axis(a, groups.reshape(groups.shape + (1,) * (a.ndim - 2)), 1) for a in (x, m, scores)
    )
    ids, value = _conditioned(x, m, scores, safe_t, groups, row_keys, purpose)
    order = np.lexsort((ids, -value))[:, :k]
    best = np.where(np.isneginf(np.take_along_axis(value, order, -1)), NO_TOKEN, np.take_along_axis(ids, order, -1))
    tokens = np.full((len(logits), k), NO_TOKEN, np.int32)
    tokens[:, : best.shape[1]] = best
    for row in np.flatnonzero(greedy & ~lawless):
        order = np.argsort(-logits[row], kind="stable")[:k]
        tokens[row] = NO_TOKEN
        tokens[row, : len(order)] = np.where(np.isneginf(logits[row, order]), NO_TOKEN, order)
    return np.where(lawless[:, None], NO_TOKEN, tokens).astype(np.int32)


def _conditioned(x, m, scores, t, groups, row_keys, purpose):
    """Ids and values `[rows, groups * 16]` of the chosen groups' tokens, noise conditioned on the group's score."""
    ids = groups[..., None] * GROUP + np.arange(GROUP)
    k0, k1 = row_keys[:, 0, None, None], row_keys[:, 1, None, None]
    empty, t, score = np.isneginf(m)[..., None], t[:, None, None], scores[..., None]
    safe_m = np.where(empty, 0.0, m[..., None])
    fresh = (x - safe_m) / t + gumbel(k0, k1, stream(purpose, 0, TOKEN_LEVEL), ids)
    # -log(exp(-score) + exp(-fresh) - exp(-top)), with exp(-fresh) taken out so that nothing overflows.
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        top = fresh.max(-1, keepdims=True)
        value = fresh - np.log(np.exp(fresh - score) - np.expm1(fresh - top))
    value = np.where(fresh == top, score, value)
    value = np.where(np.isneginf(x), -np.inf, safe_m + t * value)
    return ids.reshape(len(x), -1), value.reshape(len(x), -1)
