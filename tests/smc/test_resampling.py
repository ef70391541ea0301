"""Resampling: counts, ends, laws, memory, and mutations that the same gates catch."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gumbeljax import smc
from tests.smc import oracle

SCHEMES = [smc.systematic, smc.stratified, smc.residual, smc.multinomial]
ORDERED = SCHEMES[:2]
each_scheme = pytest.mark.parametrize("scheme", SCHEMES, ids=lambda f: f.__name__)
SKEWED = np.log(np.array([0.02, 0.31, 0.0, 0.07, 0.1, 0.003, 0.497]), where=np.arange(7) != 2, out=np.full(7, -np.inf))


@functools.cache
def jitted(scheme):
    return jax.jit(scheme, static_argnames="num_samples")


def keys_of(seed, count):
    return jax.random.split(jax.random.key(seed), count)


def counts(ancestors, n):
    """[groups, n]; every ancestor must be a particle."""
    a = np.asarray(ancestors)
    assert a.dtype == np.int32 and a.min() >= 0 and a.max() < n
    a = a.reshape(-1, a.shape[-1])
    return np.bincount((a + n * np.arange(len(a))[:, None]).ravel(), minlength=n * len(a)).reshape(-1, n)


def in_floor_or_ceil(count, expected, slack=1e-4) -> bool:
    return bool(np.all((count >= np.floor(expected - slack)) & (count <= np.ceil(expected + slack))))


def unbiased(count, expected, num_se=4.5) -> bool:
    """Mean counts over groups within so many standard errors, estimated, of their expectation."""
    error = np.abs(count.mean(0) - expected)
    return bool(np.all(error <= num_se * np.sqrt(count.var(0) / len(count)) + 1e-5))


# Laws


@each_scheme
@pytest.mark.parametrize("num_samples", [5, 7, 64])
def test_expected_counts(scheme, num_samples):
    x = np.broadcast_to(SKEWED, (20_000, 7))
    count = counts(jitted(scheme)(x, keys_of(1, len(x)), num_samples=num_samples), 7)
    expected = num_samples * oracle.weights(SKEWED)
    assert unbiased(count, expected)
    assert not count[:, 2].any(), "a particle of weight zero is an ancestor"
    gap = np.abs(count - expected).max()
    if scheme is smc.systematic:
        assert in_floor_or_ceil(count, expected)
    elif scheme is smc.stratified:
        assert gap < 2 and not in_floor_or_ceil(count, expected)
        assert np.abs(np.cumsum(count - expected, axis=-1)).max() < 1 + 1e-5
    elif scheme is smc.residual:
        assert (count >= np.floor(expected - 1e-6)).all()


def test_multinomial_has_the_multinomial_variance():
    x = np.broadcast_to(SKEWED, (20_000, 7))
    count = counts(jitted(smc.multinomial)(x, keys_of(2, len(x)), num_samples=7), 7)
    w = oracle.weights(SKEWED)
    np.testing.assert_allclose(count.var(0), 7 * w * (1 - w), rtol=0.1, atol=1e-3)
    first_two = np.asarray(jitted(smc.multinomial)(x, keys_of(2, len(x)), num_samples=7))[:, :2]
    pairs = np.bincount(first_two @ [7, 1], minlength=49) / len(x)
    assert np.abs(pairs - np.outer(w, w).ravel()).max() < 4.5 * 0.5 / np.sqrt(len(x))


def test_residual_copies_are_exact():
    w = np.array([3, 1, 0, 4]) / 8
    with np.errstate(divide="ignore"):
        x = np.broadcast_to(np.log(w).astype(np.float32), (200, 4))
    count = counts(jitted(smc.residual)(x, keys_of(3, 200), num_samples=80), 4)
    # log and exp in float32 move a weight by 1e-7, and 80 w with it, so an integer may fall to its lower neighbour.
    assert np.abs(count - 80 * w).max() <= 1 and not count[:, 2].any()
    exact = counts(jitted(smc.residual)(np.array([[0.0, -np.inf, 0.0, 0.0, 0.0]] * 200), keys_of(3, 200), num_samples=80), 5)
    np.testing.assert_array_equal(exact, [[20, 0, 20, 20, 20]] * 200)


# Against float64 with the same uniforms


@pytest.mark.parametrize("n, m", [(1, 5), (2, 2), (17, 17), (33, 100), (1000, 1000), (1000, 3), (3, 1000)])
@each_scheme
def test_same_ancestors_as_float64_from_the_same_uniforms(scheme, n, m):
    """The formulas that blackjax and most libraries use, on strictly positive weights; a boundary may move by rounding."""
    x = np.random.default_rng(n).normal(size=n).astype(np.float32) * 1.5
    key = jax.random.key(7)
    got = np.asarray(scheme(x, key, num_samples=m))
    u, w = oracle.uniforms(np.asarray(jax.random.key_data(key)), m), oracle.weights(x)
    want = {
        smc.systematic: lambda: oracle.ordered(w, u[0], m),
        smc.stratified: lambda: oracle.ordered(w, u, m),
        smc.residual: lambda: oracle.residual(w, u),
        smc.multinomial: lambda: oracle.independent(w, u),
    }[scheme]()
    assert np.sum(got != want) <= m // 1000, np.flatnonzero(got != want)
    assert np.abs(got - want).max() <= 1


# Large n and the ends


@pytest.mark.parametrize("scheme", ORDERED, ids=lambda f: f.__name__)
@pytest.mark.parametrize("n, num_keys", [(1000, 100), (30_000, 100), (1_000_000, 4)])
def test_equal_weights_are_each_taken_once(scheme, n, num_keys):
    """CASES H-1."""
    x = np.full(n, -0.37, np.float32)
    for key in keys_of(4, num_keys):
        np.testing.assert_array_equal(jitted(scheme)(x, key), np.arange(n))


@pytest.mark.parametrize("n", [30_000, 1_000_000])
def test_systematic_counts_of_many_particles(n):
    x = np.random.default_rng(5).normal(size=n).astype(np.float32) * 3
    expected = n * oracle.weights(x)
    for key in keys_of(5, 4):
        count = counts(jitted(smc.systematic)(x, key), n)
        # exp in float32 is off by 1e-7 of a count of up to thousands.
        assert np.all(np.abs(count - expected) < 1 + 1e-6 * expected + 1e-3)
        assert np.abs(np.cumsum(count[0]) - np.cumsum(expected)).max() < 1 + n * 1e-7


@each_scheme
def test_particles_of_no_weight_are_never_ancestors(scheme):
    """-inf at both ends and inside, weights that underflow, subnormal weights."""
    x = np.full((500, 64), -np.inf, np.float32)
    x[:, 20:40] = -1e30
    x[:, 40], x[:, 41], x[:, 42] = 0.0, -95.0, -103.0  # exp(-95) is subnormal: below 2^-126
    x[:, 50] = np.float32(1e-3)
    count = counts(jitted(scheme)(x, keys_of(6, 500), num_samples=300), 64)
    assert set(np.flatnonzero(count.sum(0))) == {40, 50}


@each_scheme
def test_one_heavy_particle_anywhere(scheme):
    n = 257
    x = np.where(np.eye(n, dtype=bool), 0.0, -np.inf)
    np.testing.assert_array_equal(jitted(scheme)(x, jax.random.key(0), num_samples=9), np.arange(n)[:, None].repeat(9, 1))


@each_scheme
def test_shift_changes_nothing(scheme):
    """CASES H-6 for resampling. Log-weights on a grid, so that the shifted ones are the same numbers."""
    x = np.round(np.random.default_rng(8).normal(size=(3, 50)) * 8) / 8
    want = np.asarray(jitted(scheme)(x.astype(np.float32), jax.random.key(1)))
    for shift in (-1000, -3e4, 1e6):
        np.testing.assert_array_equal(jitted(scheme)((x + shift).astype(np.float32), jax.random.key(1)), want)
    for dtype in (jnp.bfloat16, jnp.float16):
        np.testing.assert_array_equal(jitted(scheme)(jnp.asarray(x, dtype), jax.random.key(1)), want)


@each_scheme
def test_memory_is_linear(scheme):
    """CASES H-11: 10^6 from 10^6, and few from many and many from few."""
    for n, m in [(1_000_000, 1_000_000), (1_000_000, 10), (10, 1_000_000)]:
        shapes = jax.ShapeDtypeStruct((n,), jnp.float32), jax.eval_shape(lambda: jax.random.key(0))
        compiled = jax.jit(functools.partial(scheme, num_samples=m)).lower(*shapes).compile()
        assert compiled.memory_analysis().temp_size_in_bytes < 80 * (n + m)
    a = np.asarray(compiled(jnp.zeros(10), jax.random.key(0)))
    assert np.abs(counts(a, 10) - 100_000).max() < 4.5 * 300


# Degenerate groups, masks, neighbours, transforms


@each_scheme
def test_groups_without_a_law_are_marked(scheme):
    x = np.zeros((5, 6), np.float32)
    x[0], x[1, 3], x[2, 5] = -np.inf, np.nan, np.inf
    a = np.asarray(scheme(x, jax.random.key(2)))
    assert (a[:3] == -1).all() and (a[3:] >= 0).all() and (a < 6).all()
    mask = np.zeros((5, 6), bool)
    mask[1:, :3] = True
    b = np.asarray(scheme(x, jax.random.key(2), mask=mask))
    assert (b[0] == -1).all() and (b[1:] >= 0).all() and (b < 3).all()


@each_scheme
def test_neighbours_change_nothing(scheme):
    x = np.random.default_rng(9).normal(size=(2, 3, 33)).astype(np.float32) * 4
    x[0, 1], x[1, 2, 4] = -np.inf, np.nan
    keys = keys_of(9, 6).reshape(2, 3)
    together = np.asarray(scheme(x, keys, num_samples=50))
    mapped = jax.vmap(jax.vmap(functools.partial(scheme, num_samples=50)))(x, keys)
    np.testing.assert_array_equal(mapped, together)
    for i in np.ndindex(2, 3):
        np.testing.assert_array_equal(scheme(x[i], keys[i], num_samples=50), together[i])
    folded = [jax.random.fold_in(jax.random.key(3), i) for i in range(6)]
    np.testing.assert_array_equal(
        scheme(x, jax.random.key(3)).reshape(6, 33), [scheme(row, k) for row, k in zip(x.reshape(6, 33), folded, strict=True)]
    )


@each_scheme
def test_in_scan_and_with_64_bits(scheme):
    x, keys = np.float32([0.1, -2.0, 0.4, -np.inf]), keys_of(10, 5)
    want = np.stack([scheme(x, key) for key in keys])
    _, scanned = jax.lax.scan(lambda c, key: (c, scheme(x, key)), 0, keys)
    np.testing.assert_array_equal(scanned, want)
    with jax.enable_x64(True):
        for dtype in (np.float32, np.float64):
            a = jnp.stack([scheme(jnp.asarray(x, dtype), key) for key in keys])
            assert a.dtype == jnp.int32
            np.testing.assert_array_equal(a, want)
        far = jnp.asarray(np.float64(x) + 1e12, jnp.float64)  # float32 could not tell these apart
        np.testing.assert_array_equal(jnp.stack([scheme(jnp.round(far * 8) / 8, key) for key in keys]),
                                      jnp.stack([scheme(jnp.round((far - 1e12) * 8) / 8, key) for key in keys]))


@pytest.mark.parametrize("options, error, words", [
    ({"num_samples": 0}, ValueError, "num_samples must be at least 1"),
    ({"num_samples": 2.0}, TypeError, "num_samples must be a Python int"),
    ({"num_samples": 2**27 + 1}, ValueError, "at most 2\\^27"),
    ({"mask": np.ones(3)}, TypeError, "mask must be boolean"),
    ({"key": 0}, TypeError, "key must be a JAX random key"),
    ({"key": keys_of(0, 2)}, ValueError, "key must be one key or an array of keys"),
])  # fmt: skip
def test_errors(options, error, words):
    for scheme in SCHEMES:
        with pytest.raises(error, match=words):
            scheme(**{"log_weights": np.zeros((3, 3), np.float32), "key": jax.random.key(0), **options})


# Mutations: each wrong variant must fail a gate above.


def by_float32_sums(w, u, m):
    """The common form: a running float32 sum, and an index that the gather clamps."""
    sums = np.cumsum(w.astype(np.float32), dtype=np.float32)
    return np.searchsorted(sums, (np.arange(m) + u) / m, side="right").clip(max=len(w) - 1)


def test_mutation_running_float32_sum():
    n = 30_000
    count = counts(by_float32_sums(np.full(n, 1 / n), 0.5, n).astype(np.int32)[None], n)
    assert not np.array_equal(count[0], np.ones(n)) and count[0, -1] > 2  # the clamped last particle


def test_mutation_last_index_clamped():
    """Positions past the end fall to the last particle, even a dead one."""
    w = np.append(np.full(30_000, 1 / 30_000), 0.0)
    clamped = by_float32_sums(w, 0.5, 30_000)
    assert np.bincount(clamped, minlength=len(w))[-1] > 0
    with np.errstate(divide="ignore"):
        right = counts(smc.systematic(np.log(w), jax.random.key(0), num_samples=30_000), len(w))
    assert right[0, -1] == 0


def test_mutation_dead_particles_keep_their_weight():
    x, mask = np.broadcast_to(np.float32([0.0, 1.0, 2.0]), (2000, 3)), np.array([True, True, False])
    expected = 3 * np.append(oracle.weights([0.0, 1.0]), 0.0)
    assert unbiased(counts(smc.systematic(x, keys_of(11, 2000), mask=mask), 3), expected)
    assert not unbiased(counts(smc.systematic(x, keys_of(11, 2000)), 3), expected)


def test_mutation_biased_uniform():
    """Stratified with outputs in the middle of their strata has the wrong mean counts."""
    w = oracle.weights(SKEWED)
    middle = np.broadcast_to(oracle.ordered(w, 0.5, 7), (20_000, 7)).astype(np.int32)
    assert not unbiased(counts(middle, 7), 7 * w)
