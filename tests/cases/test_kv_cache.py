"""Bugs that others had in their paged caches (CASES J)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gumbeljax import kv_cache

PAGE = 4


def paged(batch=2, num_pages=8, **options):
    return kv_cache.init_paged(1, batch, 4 * PAGE, 2, 8, page_size=PAGE, num_pages=num_pages, **options)


@jax.jit
def write_at(cache, positions, value):
    slots = kv_cache.locate(cache, jnp.asarray(positions))
    new = jnp.full((*slots.positions.shape, *cache.keys[0].shape[2:]), value)
    return cache._replace(
        keys=(kv_cache.write(cache.keys[0], new, slots),), values=(kv_cache.write(cache.values[0], new, slots),)
    )


@jax.jit
def attend_at(cache, positions):
    slots = kv_cache.locate(cache, jnp.asarray(positions))
    q = jax.random.normal(jax.random.key(0), (*slots.positions.shape, 4, 8))
    return kv_cache.attend(q, cache.keys[0], cache.values[0], slots)


def test_padding_rows_and_pages_of_minus_one_write_nothing():
    """CASES J-1: the owner's pages are the first and the last of the pool, where -1 and clamped indices would land."""
    cache = paged(batch=3)
    cache = kv_cache.append(cache, jnp.array([8 * PAGE // 2, 0, 0]))
    cache = cache._replace(
        pages=cache.pages._replace(
            block_tables=jnp.array([[0, 7, 1, 2], [-1] * 4, [3, -1, -1, -1]]),
            lengths=jnp.array([16, 0, 4]),
            ref_counts=jnp.array([1, 1, 1, 1, 0, 0, 0, 1]),
            free_pages=jnp.array([6, 5, 4, 0, 0, 0, 0, 0]),
            num_free=jnp.int32(3),
        )
    )
    cache = write_at(cache, np.tile(np.arange(16), (3, 1)) * np.array([[1], [0], [0]]) + np.array([[0], [-5], [-5]]), 7.0)
    before = cache
    # An inactive row at position 0, a row far beyond its pages, a negative position; the owner at rest.
    for positions in ([[16], [0], [4]], [[99], [5], [15]], [[-1], [-1], [-1]], [[16], [3], [10**6]]):
        cache = write_at(cache, positions, 1.0)
    np.testing.assert_array_equal(cache.keys[0], before.keys[0])
    np.testing.assert_array_equal(cache.keys[0][jnp.array([0, 7, 1, 2])], np.full((4, PAGE, 2, 8), 7.0, np.float32))
    grown = kv_cache.append(cache, jnp.array([1, 0, 1]))
    assert grown.pages.has_overflowed.tolist() == [True, False, False]
    assert grown.pages.lengths.tolist() == [16, 0, 5]
    out = attend_at(cache, [[15], [0], [3]])
    np.testing.assert_allclose(out[0], 7.0, rtol=1e-6)
    np.testing.assert_array_equal(out[1], 0.0)


@pytest.mark.parametrize("stale", [1.0, np.nan, np.inf])
def test_a_page_given_to_another_row_forgets_its_old_owner(stale):
    """CASES J-2."""
    cache = write_at(kv_cache.append(paged(), jnp.array([16, 0])), np.stack([np.arange(16), -np.ones(16, int)]), stale)
    cache = kv_cache.release(cache, jnp.array([True, False]))
    cache = kv_cache.append(cache, jnp.array([0, 5]))
    cache = write_at(cache, [[-1] * 5, list(range(5))], 2.0)
    out = attend_at(cache, [[0], [4]])
    np.testing.assert_array_equal(out[0], 0.0)
    np.testing.assert_allclose(out[1], 2.0, rtol=1e-6)
    cache = write_at(kv_cache.append(cache, jnp.array([0, 11])), [[-1] * 11, list(range(5, 16))], 2.0)
    np.testing.assert_allclose(attend_at(cache, [[0], [15]])[1], 2.0, rtol=1e-6)


def test_growing_freeing_and_freeing_again():
    """CASES J-4: pages held are those of the length, freed pages come back once."""
    cache = kv_cache.init_paged(1, 3, 64, 1, 4, page_size=16, num_pages=6)
    append, release = jax.jit(kv_cache.append), jax.jit(kv_cache.release)

    def held(cache):
        return (np.asarray(cache.pages.block_tables) >= 0).sum(axis=1).tolist()

    cache = append(cache, jnp.array([17, 0, 0]))
    assert held(cache) == [2, 0, 0]
    cache = append(cache, jnp.array([40 - 17, 0, 0]))
    assert (held(cache), int(cache.pages.num_free)) == ([3, 0, 0], 3)
    for _ in range(2):
        cache = release(cache, jnp.array([True, False, False]))
        assert (held(cache), int(cache.pages.num_free)) == ([0, 0, 0], 6)
    cache = append(cache, jnp.array([16, 33, 32]))
    assert (held(cache), int(cache.pages.num_free)) == ([1, 3, 2], 0)
    tables = np.asarray(cache.pages.block_tables)
    assert sorted(tables[tables >= 0]) == list(range(6))


def test_windows_and_grouped_heads_are_dense_attention():
    """Attention over scattered pages against the same keys in one piece, query heads sharing key heads."""
    batch, length, page = 2, 13, 3
    new = jax.random.normal(jax.random.key(1), (2, batch, length, 2, 8))
    cache, append = kv_cache.init_paged(1, batch, 15, 2, 8, page_size=page), jax.jit(kv_cache.append)
    for _ in range(length):  # rows grow in turn, so that their pages alternate
        cache = append(cache, jnp.array([1, 1]))
    positions = jnp.broadcast_to(jnp.arange(length), (batch, length))
    slots = kv_cache.locate(cache, positions)
    keys, values = (kv_cache.write(side[0], x, slots) for side, x in zip((cache.keys, cache.values), new, strict=True))
    q = jax.random.normal(jax.random.key(2), (batch, length, 6, 8))
    for window in (None, 1, 4):
        out = kv_cache.attend(q, keys, values, slots, window=window)
        k, v = (np.repeat(np.asarray(x, np.float64), 3, axis=2) for x in new)
        logits = np.einsum("bqhd,bkhd->bhqk", np.asarray(q, np.float64), k) / np.sqrt(8)
        at, to = np.arange(length)[:, None], np.arange(length)
        logits[..., (to > at) | (to <= at - (window or 99))] = -np.inf
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        expected = np.einsum("bhqk,bkhd->bqhd", weights / weights.sum(-1, keepdims=True), v)
        np.testing.assert_allclose(out, expected, atol=1e-5)
