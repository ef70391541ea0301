"""Noise field v1: the only place that knows how a key and a token id become a Gumbel variate.

Counter based, so the same function gives the same bits in a kernel, in a shard and in NumPy. Once released it never
changes: published test vectors are in `docs/semantics.md`.

Source: J. K. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011 (Threefry-2x32, 20 rounds).
"""

import jax.numpy as jnp
from jax import lax

GROUP = 16
"""Consecutive token ids (by absolute id) that share one group of the sampling law."""

# Purposes: two uses of one row key never share noise.
DRAW, COIN, RESIDUAL, BONUS, MERGE, RESAMPLING, BANDIT = range(7)
GROUP_LEVEL, TOKEN_LEVEL = 0, 1


def stream(purpose, sample, level):
    """Stream id, uint32: `2^31 + 2^24 * purpose + 2 * sample + level`.

    Starts at 2^31 because `jax.random.fold_in` and `split` use the counters (0, i). `sample` may be traced.
    """
    return jnp.uint32(2**31 + 2**24 * purpose + level) + jnp.uint32(2) * jnp.asarray(sample, jnp.uint32)


def threefry2x32(key0, key1, counter0, counter1):
    """Two uint32 words per (key, counter): Threefry-2x32 with 20 rounds. Arguments broadcast."""
    rotations = ((13, 15, 26, 6), (17, 29, 16, 24))
    keys = (key0, key1, key0 ^ key1 ^ jnp.uint32(0x1BD11BDA))
    x0, x1 = counter0 + keys[0], counter1 + keys[1]
    for i in range(5):
        for r in rotations[i % 2]:
            x0 = x0 + x1
            x1 = (x1 << jnp.uint32(r)) | (x1 >> jnp.uint32(32 - r))
            x1 = x1 ^ x0
        x0 = x0 + keys[(i + 1) % 3]
        x1 = x1 + keys[(i + 2) % 3] + jnp.uint32(i + 1)
    return x0, x1


# Minimax fit of (log(1 + f) - f + f^2 / 2) / f^3 on [-1/3, 1/3]: log(1 + f) to a relative 4e-8.
LOG1P = (0.333332661, -0.25004238, 0.200079167, -0.164723218, 0.140423625, -0.151222089, 0.138199561)


def log_below_one(v):
    """`log(v)` for v in [2^-24, 1), float32, from the bits of `v = 2^e (1 + f)`, f in [-1/3, 1/3).

    Written out so that it is the same on every backend, and accurate where a backend's own logarithm is only fast.
    """
    bits = lax.bitcast_convert_type(v, jnp.uint32) + jnp.uint32(25 << 23)  # of 2^25 v
    exponent = (bits - jnp.uint32(0x3F2AAAAB)) >> jnp.uint32(23)  # e + 25; these are the bits of 2/3
    f = lax.bitcast_convert_type(bits - (exponent << jnp.uint32(23)), jnp.float32) - 1.0
    p = jnp.float32(LOG1P[-1])
    for c in LOG1P[-2::-1]:
        p = p * f + c
    return (exponent.astype(jnp.int32).astype(jnp.float32) - 25.0) * 0.693147181 + (f + f * f * (p * f - 0.5))


def exp1(u):
    """Standard exponential `-log1p(-u)` for u in (0, 1): a series below 2^-6, `-log(1 - u)` above.

    Written out because not every kernel backend has log1p, and its accuracy near 0 is where the large noise comes from.
    """
    series = u * (1.0 + u * (0.5 + u * (1.0 / 3.0 + u * (0.25 + u * 0.2))))
    return jnp.where(u < 2.0**-6, series, -log_below_one(1.0 - u))


def uniform(word0, word1):
    """Uniform in (0, 1), float32, resolution 2^-64 near 0: `(w0 + w1 * 2^-32 + 2^-33) * 2^-32`, kept below 1."""
    u = (word0.astype(jnp.float32) + word1.astype(jnp.float32) * 2.0**-32 + 2.0**-33) * 2.0**-32
    return jnp.minimum(u, 1.0 - 2.0**-24)


def exponential(key0, key1, stream, index):
    """Standard exponential noise, float32, always positive: 2.6e-20 to 16.7. Arguments are uint32 and broadcast."""
    return exp1(uniform(*threefry2x32(key0, key1, stream, index)))


def gumbel(key0, key1, stream, index):
    """Standard Gumbel noise, float32, always finite: -2.82 to 45.1. Arguments are uint32 and broadcast."""
    return -jnp.log(exponential(key0, key1, stream, index))


def log_coin(key0, key1, number):
    """Logs of uniform numbers in (0, 1), never -inf, never 0: of each key the coin with this number."""
    return jnp.log(uniform(*threefry2x32(key0, key1, stream(COIN, number, 0), jnp.uint32(0))))
