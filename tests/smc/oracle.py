"""NumPy float64 twins of ess and resampling, from given uniforms. Imports nothing of ours."""

import numpy as np


def weights(log_weights) -> np.ndarray:
    x = np.asarray(log_weights, np.float64)
    w = np.exp(x - x.max(-1, keepdims=True))
    return w / w.sum(-1, keepdims=True)


def ess(log_weights) -> np.ndarray:
    return 1 / np.sum(weights(log_weights) ** 2, axis=-1)


def log_mean_weight(log_weights) -> float:
    x = np.asarray(log_weights, np.float64)
    return float(x.max() + np.log(np.mean(np.exp(x - x.max()))))


def ordered(w, uniforms, num_samples) -> np.ndarray:
    """Systematic (one uniform) or stratified: the first particle whose cumulative weight exceeds (j + u) / M."""
    positions = (np.arange(num_samples) + np.asarray(uniforms, np.float64)) / num_samples
    return np.searchsorted(np.cumsum(w), positions, side="right").clip(max=len(w) - 1)


def independent(w, uniforms) -> np.ndarray:
    return np.searchsorted(np.cumsum(w), np.asarray(uniforms, np.float64), side="right").clip(max=len(w) - 1)


def residual(w, uniforms) -> np.ndarray:
    """Copies, then draws from what is left; output j uses uniform j."""
    num_samples = len(uniforms)
    copies = np.floor(num_samples * w + 1e-9).astype(int)
    kept = np.repeat(np.arange(len(w)), copies)
    rest = np.maximum(num_samples * w - copies, 0)
    drawn = independent(rest / rest.sum(), uniforms[len(kept):]) if len(kept) < num_samples else []
    return np.concatenate([kept, drawn]).astype(int)


def threefry(key, counter0, counter1) -> tuple[np.ndarray, np.ndarray]:
    """Threefry-2x32 with 20 rounds, from the paper."""
    counter1 = np.asarray(counter1, np.uint32)
    k = np.array([key[0], key[1], np.uint32(key[0]) ^ np.uint32(key[1]) ^ np.uint32(0x1BD11BDA)], np.uint32)
    with np.errstate(over="ignore"):
        x0, x1 = np.full(counter1.shape, counter0, np.uint32) + k[0], counter1 + k[1]
        for i in range(20):
            r = np.uint32((13, 15, 26, 6, 17, 29, 16, 24)[i % 8])
            x0 = x0 + x1
            x1 = ((x1 << r) | (x1 >> (np.uint32(32) - r))) ^ x0
            if i % 4 == 3:
                s = i // 4 + 1
                x0, x1 = x0 + k[s % 3], x1 + k[(s + 1) % 3] + np.uint32(s)
    return x0, x1


def uniforms(key, count) -> np.ndarray:
    """The uniforms of resampling, purpose 5: 64 bits, float64."""
    w0, w1 = threefry(key, 2**31 + 5 * 2**24, np.arange(count))
    return (w0 + w1 / 2.0**32) / 2.0**32
