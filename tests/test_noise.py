"""The noise field: bits, range, law, independence."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import noise
from tests import oracles, statistics


def words(seed, n):
    return np.random.default_rng(seed).integers(0, 2**32, n, np.uint32)


def test_threefry_is_numpys_bit_for_bit():
    arguments = [words(i, 50_000) for i in range(4)]
    np.testing.assert_array_equal(np.stack(noise.threefry2x32(*arguments)), np.stack(oracles.threefry2x32(*arguments)))


def test_streams_never_meet():
    seen = {int(noise.stream(p, s, level)) for p in range(7) for s in (0, 1, 2, 2**23 - 1) for level in (0, 1)}
    assert len(seen) == 7 * 4 * 2 and min(seen) == 2**31
    for place in [(0, 0, 0), (0, 9, 1), (6, 0, 1), (6, 9, 0)]:
        assert int(noise.stream(*place)) == oracles.stream(*place)


VECTORS = [["0660c005", "94adcefb", "bc6adca1", "fee23a88"], ["c88b10f0", "1e93cadb", "ba537d98", "79615634"]]
GUMBELS = [3.679745674133301, 0.14000649750232697, -0.28655198216438293, -1.6928906440734863]


def test_published_vectors():
    """The vectors of docs/semantics.md. They may never change."""
    index = jnp.array([0, 1, 16, 151_935], jnp.uint32)
    key = [jnp.uint32(x) for x in jax.random.key_data(jax.random.key(0, impl="threefry2x32"))]
    got = noise.threefry2x32(*key, noise.stream(noise.DRAW, 0, noise.GROUP_LEVEL), index)
    assert [[f"{int(x):08x}" for x in word] for word in got] == VECTORS
    gumbel = noise.gumbel(*key, noise.stream(noise.DRAW, 0, noise.GROUP_LEVEL), index)
    np.testing.assert_allclose(gumbel, GUMBELS, rtol=1e-6)


def test_extreme_words_are_finite():
    w = np.array([0, 1, 2**31, 2**32 - 1], np.uint32)
    u = noise.uniform(jnp.asarray(w)[:, None], jnp.asarray(w))
    g = -jnp.log(noise.exp1(u))
    assert np.all((u > 0) & (u < 1)) and np.all(np.isfinite(g))
    assert 44 < g.max() < 46 and -3 < g.min() < -2.7
    np.testing.assert_array_equal(u, oracles.uniform(w[:, None], w))


def test_exp1_is_accurate_where_noise_is_large():
    u = np.float32(2.0) ** -np.linspace(0.01, 64, 5000, dtype=np.float32)
    np.testing.assert_allclose(noise.exp1(jnp.asarray(u)), -np.log1p(-u.astype(np.float64)), rtol=5e-6)


def test_logarithm_below_one():
    v = np.concatenate([1 - np.arange(1, 2000) * 2.0**-24, np.linspace(2.0**-24, 1 - 2.0**-24, 100_000),
                        2.0 ** -np.linspace(0.001, 24, 5000), [2 / 3]]).astype(np.float32)
    np.testing.assert_allclose(noise.log_below_one(jnp.asarray(v)), np.log(v.astype(np.float64)), rtol=2e-7)


@pytest.mark.parametrize("purpose, sample", [(noise.DRAW, 0), (noise.BANDIT, 7)])
def test_gumbel_law(purpose, sample):
    g = noise.gumbel(jnp.uint32(1), jnp.uint32(2), noise.stream(purpose, sample, 1), jnp.arange(200_000, dtype=jnp.uint32))
    assert statistics.gumbel_ks(g) > statistics.ALPHA
    want = oracles.gumbel(1, 2, oracles.stream(purpose, sample, 1), np.arange(200_000))
    np.testing.assert_allclose(g, want, rtol=3e-6, atol=1e-6)


def test_tail_reaches_beyond_24_bits():
    """A million values pass 13 about as often as e^-13 says; a 24-bit uniform would stop at 16.6."""
    g = np.asarray(noise.gumbel(jnp.uint32(3), jnp.uint32(4), noise.stream(0, 0, 0), jnp.arange(2**22, dtype=jnp.uint32)))
    for level in (8, 11, 13):
        assert statistics.frequency_within((g > level).sum(), g.size, 1 - np.exp(-np.exp(-level)))


def test_levels_samples_purposes_and_keys_are_independent():
    index = jnp.arange(100_000, dtype=jnp.uint32)
    base = np.asarray(noise.gumbel(jnp.uint32(5), jnp.uint32(6), noise.stream(0, 0, 0), index))
    others = [noise.gumbel(jnp.uint32(5), jnp.uint32(6), noise.stream(*s), index) for s in [(0, 0, 1), (0, 1, 0), (1, 0, 0)]]
    others.append(noise.gumbel(jnp.uint32(5), jnp.uint32(7), noise.stream(0, 0, 0), index))
    for other in others:
        assert abs(np.corrcoef(base, other)[0, 1]) < 4.5 / np.sqrt(index.size)
