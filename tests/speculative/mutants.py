"""Leviathan's verification in NumPy, written plainly, with a switch for each mistake that a gate must see.

Draws are by inversion of given uniforms, so that noise shared between two uses shows as strongly as it can.
"""

import numpy as np

MISTAKES = (
    "kept after a rejection", "missing bonus", "overwritten last token", "q not the law drawn from",
    "noise shared by coin and residual", "noise shared by draft and coin", "temperature after log-softmax",
    "residual not renormalised", "residual from p", "inclusive coin", "bonus from the draft", "bonus one position early",
)  # fmt: skip


def invert(law, u):
    """The token of each row's uniform; a law that does not sum to 1 leaves the rest to the last token."""
    return np.minimum((np.cumsum(law, -1) <= u[:, None]).sum(-1), law.shape[-1] - 1)


def softmax(x, temperature=1.0):
    with np.errstate(divide="ignore"):
        x = np.asarray(x, np.float64) / temperature
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


def block(log_target, log_draft, last, draft_len, rng, temperature=1.0, mistake=None):
    """One block after the tokens `last [n]`: (tokens `[n, draft_len + 1]` with -1 after the end, num_accepted `[n]`)."""
    n = len(last)
    rows = np.arange(n)
    p_table, q_table = softmax(log_target, temperature), softmax(log_draft, temperature)
    q_seen = softmax(log_draft) if mistake == "q not the law drawn from" else q_table
    if mistake == "temperature after log-softmax":  # log-probabilities over T, not normalised again
        p_table, q_seen = softmax(log_target) ** (1 / temperature), softmax(log_draft) ** (1 / temperature)
    drafted, u_draft, before = [], rng.uniform(size=(n, draft_len)), [last]
    for j in range(draft_len):
        drafted.append(invert(q_table[before[-1]], u_draft[:, j]))
        before.append(drafted[-1])
    u_coin, u_last = rng.uniform(size=(n, draft_len)), rng.uniform(size=(n, draft_len + 1))
    if mistake == "noise shared by coin and residual":
        u_last[:, :-1] = u_coin
    if mistake == "noise shared by draft and coin":
        u_coin = u_draft
    if mistake == "inclusive coin":
        u_coin = np.where(rng.uniform(size=u_coin.shape) < 1e-3, 0.0, u_coin)  # a generator that includes 0

    accepted = np.zeros((n, draft_len), bool)
    for j in range(draft_len):
        p, q = p_table[before[j], drafted[j]], q_seen[before[j], drafted[j]]
        accepted[:, j] = (u_coin[:, j] * q <= p) if mistake == "inclusive coin" else (u_coin[:, j] * q < p)
    num_accepted = np.cumprod(accepted, -1).sum(-1)
    tokens = np.full((n, draft_len + 1), -1)
    for j in range(draft_len):
        tokens[:, j] = np.where(j < num_accepted, drafted[j], -1)

    at = num_accepted
    before = np.stack(before, 1)[rows, at]
    p = p_table[before]
    q = np.where((at < draft_len)[:, None], q_seen[before], 0.0)
    law = np.maximum(p - q, 0.0)
    total = law.sum(-1, keepdims=True)
    if mistake != "residual not renormalised":
        law = law / np.where(total > 0, total, 1.0)
    law = np.where(total > 0, law, p)
    if mistake == "residual from p":
        law = p
    if mistake == "bonus from the draft":
        law = np.where((at == draft_len)[:, None], q_table[before], law)
    if mistake == "bonus one position early":
        stale = np.concatenate([last[:, None], np.stack(drafted, 1)], 1)[rows, np.maximum(at - 1, 0)]
        law = np.where((at == draft_len)[:, None], p_table[stale], law)
    new = invert(law, u_last[rows, at])
    if mistake == "overwritten last token":
        place = np.where(at == draft_len, draft_len - 1, at)
        tokens[rows, place] = new
        return tokens, np.where(at == draft_len, draft_len - 1, at)
    if mistake == "missing bonus":
        new = np.where(at == draft_len, -1, new)
    tokens[rows, at] = new
    if mistake == "kept after a rejection":  # all that was accepted is kept, wherever the rejection was
        for j in range(draft_len - 1):
            survives = (at == j) & accepted[:, j + 1]
            tokens[:, j + 1] = np.where(survives, drafted[j + 1], tokens[:, j + 1])
            num_accepted = num_accepted + survives
    return tokens, num_accepted


def speculate(log_target, log_draft, n, draft_len, rng, temperature=1.0, mistake=None, blocks=2):
    """Tokens `[n, blocks * (draft_len + 1)]`: some blocks, then the target alone; and the accepted tokens of each block."""
    total = blocks * (draft_len + 1)
    out = np.full((n, total), -1)
    length, last, accepted = np.zeros(n, int), np.zeros(n, int), []
    rows = np.arange(n)
    for _ in range(blocks):
        tokens, num_accepted = block(log_target, log_draft, last, draft_len, rng, temperature, mistake)
        for j in range(draft_len + 1):
            kept = j <= num_accepted
            out[rows[kept], length[kept] + j] = tokens[kept, j]
        length, last = length + num_accepted + 1, tokens[rows, num_accepted]
        accepted.append(num_accepted)
    p = softmax(log_target, temperature)
    for _ in range(total - blocks):
        new = invert(p[last], rng.uniform(size=n))
        going = length < total
        out[rows[going], length[going]] = new[going]
        length, last = length + going, np.where(going, new, last)
    return out, np.stack(accepted)
