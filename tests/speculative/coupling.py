"""Acceptance of coupled draws in NumPy float64, by enumeration of the noise. Imports nothing of ours."""

import numpy as np

GROUP = 16


def agreement(a, b):
    """P(both argmin of E / a and of E / b are i), `[n]`, for masses a, b `[n]` and the same exponentials E."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.maximum(a[None] / a[:, None], b[None] / b[:, None])
        out = 1 / ratio.sum(1)
    return np.where((a > 0) & (b > 0), out, 0.0)


def one_level(p, q):
    """Noise per token."""
    return agreement(p, q).sum()


def two_levels(p, q):
    """Noise per group, then per token in the group."""
    a, b = (np.pad(x, (0, -len(x) % GROUP)).reshape(-1, GROUP) for x in (p, q))
    groups = agreement(a.sum(1), b.sum(1))
    return sum(g * agreement(x, y).sum() for g, x, y in zip(groups, a, b, strict=True))


def bound(p, q):
    """(1 - TV) / (1 + TV)."""
    overlap = np.minimum(p, q).sum()
    return overlap / (2 - overlap)


def pairs(count, vocab, seed=0):
    """Random pairs of laws, from nearly equal to far apart."""
    rng = np.random.default_rng(seed)
    for i in range(count):
        p = rng.dirichlet(np.full(vocab, rng.uniform(0.1, 1)))
        other = rng.dirichlet(np.full(vocab, rng.uniform(0.1, 1)))
        share = (i + 0.5) / count
        q = share * other + (1 - share) * p if i % 2 else p ** rng.uniform(0.4, 2) * np.exp(share * rng.normal(size=vocab))
        yield p, q / q.sum()
