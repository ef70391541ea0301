"""The same ancestors as blackjax from the same uniforms, on strictly positive weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gumbeljax.smc import resampling

theirs = pytest.importorskip("blackjax.smc.resampling")


def with_uniforms(scheme, weights, uniforms, num_samples):
    """Ours, with noise words made of given float32 uniforms (multiples of 2^-32, so exact)."""
    words = (np.asarray(uniforms, np.float64) * 2.0**32).astype(np.uint32)
    given = lambda count: (jnp.asarray(words[:count]), jnp.zeros(count, jnp.uint32))  # noqa: E731
    return scheme(weights / weights.max(), given, num_samples)


@pytest.mark.parametrize("n, m", [(1, 5), (8, 8), (33, 20), (33, 100), (500, 500)])
@pytest.mark.parametrize("seed", range(5))
def test_same_ancestors(n, m, seed):
    weights = np.random.default_rng(seed).dirichlet(np.ones(n)).astype(np.float32) + np.float32(1e-6)
    weights = jnp.asarray(weights / weights.sum())
    key = jax.random.key(seed)
    one, many = jax.random.uniform(key, ())[None], jax.random.uniform(key, (m,))
    ordered = theirs._sorted_uniforms(key, m)
    got = (with_uniforms(resampling._systematic, weights, one, m), with_uniforms(resampling._stratified, weights, many, m),
           with_uniforms(resampling._multinomial, weights, ordered, m))
    want = (f(key, weights, m) for f in (theirs.systematic, theirs.stratified, theirs.multinomial))
    for a, b in zip(got, want, strict=True):
        differ = np.flatnonzero(np.asarray(a) != np.asarray(b))
        # A float32 cumulative sum puts a boundary up to n ulp beside its place: a uniform may fall between.
        assert len(differ) <= (0 if n < 100 else 2) and np.all(np.abs(np.asarray(a) - np.asarray(b))[differ] <= 1)


def test_same_copies():
    """Residual: the copies that are certain. What is left both draw, blackjax in permuted order."""
    weights = np.random.default_rng(0).dirichlet(np.full(16, 0.5)).astype(np.float32)
    copies = int(np.floor(np.float32(16) * weights).sum())
    want = np.asarray(theirs.residual(jax.random.key(0), jnp.asarray(weights), 16))[:copies]
    got = resampling.residual(jnp.log(jnp.asarray(weights)), jax.random.key(0))
    np.testing.assert_array_equal(got[:copies], want)
