"""Statistical gates of the distribution tests, exact enumerations they compare with, and laws that must fail them.

A gate takes observations and a law and returns a p-value, or a bool. Tests pin their keys and demand p > ALPHA, so they
never flake. The wrong laws at the end are deliberate mistakes in the grouped law; each has a test that a gate sees it.
NumPy and SciPy only.
"""

from collections import Counter
from itertools import permutations

import numpy as np
from scipy import stats

ALPHA = 1e-4


# Gates


def pooled(counts, probs, least: float = 5.0):
    """Observed and expected counts with all cells of expectation below `least` pooled into one.

    Raises:
      AssertionError: an outcome of probability zero was observed. That is no matter of significance.
    """
    counts, probs = np.asarray(counts, np.float64).ravel(), np.asarray(probs, np.float64).ravel()
    assert counts.shape == probs.shape, f"{counts.shape} counts against {probs.shape} probabilities"
    assert abs(probs.sum() - 1) < 1e-9, f"probabilities sum to {probs.sum()}"
    assert not counts[probs == 0].any(), f"outcomes of probability zero: {np.flatnonzero((probs == 0) & (counts > 0))}"
    expected = probs * counts.sum()
    small = expected < least
    if small.any() and expected[small].sum() < least:  # the pool is still too small: it takes in the next smallest cell
        rest = np.flatnonzero(~small)
        small[rest[np.argmin(expected[rest])]] = True
    observed, wanted = counts[~small], expected[~small]
    if small.any():
        observed, wanted = np.append(observed, counts[small].sum()), np.append(wanted, expected[small].sum())
    return observed, wanted


def chi_square(counts, probs) -> float:
    """p-value of Pearson's test of counts against a law."""
    return float(stats.chisquare(*pooled(counts, probs)).pvalue)


def g_test(counts, probs) -> float:
    """p-value of the likelihood-ratio test of counts against a law."""
    return float(stats.power_divergence(*pooled(counts, probs), lambda_="log-likelihood").pvalue)


def ks_gate(tokens, probs, samples: int = 10_000, level: float = 0.01) -> bool:
    """Kolmogorov-Smirnov on the first `samples` tokens against the law's distribution function, at `level`.

    The critical value is the one for a continuous law, which is conservative for tokens.
    """
    tokens = np.asarray(tokens).ravel()[:samples]
    assert len(tokens) == samples, f"{len(tokens)} tokens, {samples} wanted"
    counts = np.bincount(tokens, minlength=len(probs))
    distance = np.abs(np.cumsum(counts) / samples - np.cumsum(probs)).max()
    return bool(distance < stats.kstwo.ppf(1 - level, samples))


def gumbel_ks(values) -> float:
    """p-value of Kolmogorov-Smirnov against the standard Gumbel distribution."""
    return float(stats.ks_1samp(np.asarray(values, np.float64).ravel(), stats.gumbel_r.cdf).pvalue)


def frequency_within(count, trials, p, num_se: float = 4.5) -> bool:
    """Whether a count of `trials` is within `num_se` standard errors of probability p; exact when p is 0 or 1."""
    p = np.asarray(p, np.float64)
    error = np.abs(np.asarray(count) / trials - p)
    return bool(np.all(error <= num_se * np.sqrt(p * (1 - p) / trials)))


def independent(table) -> float:
    """p-value of independence of a contingency table's rows and columns."""
    return float(stats.chi2_contingency(np.asarray(table)).pvalue)


# Enumerations


def plackett_luce(probs, k: int) -> dict[tuple[int, ...], float]:
    """Probability of every ordered k-tuple of distinct outcomes drawn one after the other, renormalised each time."""
    probs, law = np.asarray(probs, np.float64), {}
    for chosen in permutations(np.flatnonzero(probs), k):
        left, p = probs.sum(), 1.0
        for v in chosen:
            p *= probs[v] / left
            left -= probs[v]
        law[tuple(int(v) for v in chosen)] = p
    return law


def tuple_counts(draws, law) -> tuple[np.ndarray, np.ndarray]:
    """Counts of the rows of `draws [n, k]` and the probabilities of `law`, in one order; none may be outside."""
    seen = Counter(map(tuple, np.asarray(draws).tolist()))
    assert not set(seen) - set(law), f"outside the law: {sorted(set(seen) - set(law))[:5]}"
    outcomes = list(law)
    return np.array([seen[x] for x in outcomes]), np.array([law[x] for x in outcomes])


def total_variation(counts, probs) -> float:
    counts = np.asarray(counts, np.float64)
    return float(0.5 * np.abs(counts / counts.sum() - probs).sum())


# Wrong laws. Each takes logits [vocab], a count n, and a numpy Generator; vocab a multiple of `group`.


def _blocks(logits, group):
    x = np.asarray(logits, np.float64).reshape(-1, group)
    return x, np.log(np.exp(x).sum(-1))


def race_with(logits, n, rng, group=4, *, noise=None):
    """The grouped law on groups of `group`, right unless `noise` (shape -> values) is wrong."""
    noise = noise or rng.gumbel
    x, mass = _blocks(logits, group)
    g = (mass + noise(size=(n, len(mass)))).argmax(-1)
    return g * group + (x[g] + noise(size=(n, group))).argmax(-1)


def noise_reused_across_groups(logits, n, rng, group=4):
    """One noise value per place inside a group, the same in every group; then the best token wins."""
    x, _ = _blocks(logits, group)
    return (x + rng.gumbel(size=(n, 1, group))).reshape(n, -1).argmax(-1)


def noise_reused_across_levels(logits, n, rng, group=4):
    """The winning group's own noise is used again for its tokens."""
    x, mass = _blocks(logits, group)
    noise = rng.gumbel(size=(n, max(len(mass), group)))
    g = (mass + noise[:, : len(mass)]).argmax(-1)
    return g * group + (x[g] + noise[:, :group]).argmax(-1)


def group_maximum_for_mass(logits, n, rng, group=4):
    """Groups race with their largest logit in place of their log mass."""
    x, _ = _blocks(logits, group)
    g = (x.max(-1) + rng.gumbel(size=(n, len(x)))).argmax(-1)
    return g * group + (x[g] + rng.gumbel(size=(n, group))).argmax(-1)


def one_token_of_each_top_group(logits, k, n, rng, group=4):
    """Without replacement, wrongly: the k best groups give one token each."""
    x, mass = _blocks(logits, group)
    g = (-(mass + rng.gumbel(size=(n, len(mass))))).argsort(-1)[:, :k]
    return g * group + (x[g] + rng.gumbel(size=(n, k, group))).argmax(-1)


def fresh_noise_over_top_groups(logits, k, n, rng, group=4):
    """Without replacement, wrongly: the k best groups' tokens race with fresh, unconditioned noise."""
    x, mass = _blocks(logits, group)
    g = (-(mass + rng.gumbel(size=(n, len(mass))))).argsort(-1)[:, :k]
    ids = (g[..., None] * group + np.arange(group)).reshape(n, -1)
    order = (-(x.ravel()[ids] + rng.gumbel(size=ids.shape))).argsort(-1)[:, :k]
    return np.take_along_axis(ids, order, -1)


def conditioned_over_top_groups(logits, k, n, rng, group=4):
    """Without replacement, rightly: tokens' noise conditioned on their group's score."""
    x, mass = _blocks(logits, group)
    score = mass + rng.gumbel(size=(n, len(mass)))
    g = (-score).argsort(-1)[:, :k]
    score = np.take_along_axis(score, g, -1)[..., None]
    fresh = x[g] + rng.gumbel(size=(n, k, group))
    value = -np.log(np.exp(-score) + np.exp(-fresh) - np.exp(-fresh.max(-1, keepdims=True)))
    ids = (g[..., None] * group + np.arange(group)).reshape(n, -1)
    return np.take_along_axis(ids, (-value.reshape(n, -1)).argsort(-1)[:, :k], -1)


def capped_gumbel(rng, bits: int = 23):
    """Noise as -log(-log(u)) with u on a grid of 2^-bits below 1: never above bits * log 2 (15.9 for 23 bits)."""

    def noise(size):
        u = rng.integers(0, 2**bits, size=size) / 2.0**bits
        return -np.log(-np.log(np.maximum(u, np.finfo(np.float32).tiny)))

    return noise


def bfloat16_noise(rng):
    """Noise made from a bfloat16 uniform: seven bits, 128 values, ties everywhere."""
    return capped_gumbel(rng, bits=7)
