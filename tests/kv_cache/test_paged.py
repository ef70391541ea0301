"""Random sequences of operations on the paged cache, compared with plain Python after each of them."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gumbeljax import kv_cache
from gumbeljax.kv_cache import pages as tables
from tests.kv_cache.oracle import PythonCache

BATCH, MAX_BLOCKS = 3, 4
MOST = 9  # tokens of one append


def counted(pages) -> np.ndarray:
    named = np.asarray(pages.block_tables).reshape(-1)
    return np.bincount(named[named >= 0], minlength=pages.ref_counts.shape[0])


def check_invariant(pages, page_size) -> None:
    """Counts are references, free and owned pages are all pages, a row holds exactly the pages of its length."""
    np.testing.assert_array_equal(pages.ref_counts, counted(pages))
    free = np.asarray(pages.free_pages)[: int(pages.num_free)]
    assert sorted(free) == np.flatnonzero(counted(pages) == 0).tolist()
    held = -(-np.asarray(pages.lengths) // page_size)
    np.testing.assert_array_equal(np.asarray(pages.block_tables) >= 0, np.arange(MAX_BLOCKS) < held[:, None])


@partial(jax.jit, donate_argnums=0)
def append_and_write(cache, new, counts):
    """Append, then write as a model does: the positions of all new tokens, pads behind the real ones."""
    positions = cache.pages.lengths[:, None] + jnp.arange(MOST)
    cache = kv_cache.append(cache, counts)
    slots = kv_cache.locate(cache, positions)
    keys, values = (kv_cache.write(side[0], new[..., None, None] * sign, slots) for side, sign in
                    ((cache.keys, 1), (cache.values, -1)))  # fmt: skip
    return cache._replace(keys=(keys,), values=(values,))


OPERATIONS = {
    "append": append_and_write,
    "truncate": jax.jit(kv_cache.truncate, donate_argnums=0),
    "fork": jax.jit(kv_cache.fork, donate_argnums=0),
    "release": jax.jit(kv_cache.release, donate_argnums=0),
}


def texts(cache, side: str) -> list[list[float]]:
    slots, pages = np.asarray(getattr(cache, side)[0])[..., 0, 0], cache.pages
    rows = zip(np.asarray(pages.block_tables), np.asarray(pages.lengths), strict=True)
    return [slots[table].reshape(-1)[:length].tolist() for table, length in rows]


def new_cache(num_pages, page_size):
    cache = kv_cache.init_paged(1, BATCH, MAX_BLOCKS * page_size, 1, 1, page_size=page_size, num_pages=num_pages)
    # What nobody has written is NaN: reading a stale slot would show.
    return cache._replace(keys=(cache.keys[0] * jnp.nan,), values=(cache.values[0] * jnp.nan,))


def check(cache, oracle) -> None:
    check_invariant(cache.pages, cache.page_size)
    assert cache.pages.has_overflowed.tolist() == oracle.has_overflowed
    assert texts(cache, "keys") == oracle.texts
    assert texts(cache, "values") == [[-value for value in text] for text in oracle.texts]
    assert int(cache.pages.num_free) == oracle.num_pages - len(oracle.owners())
    # The same rows share the same blocks.
    table = np.asarray(cache.pages.block_tables)
    ids = [[id(page) for page in row] for row in oracle.rows]
    for i in range(BATCH):
        for j in range(BATCH):
            ours = {(a, b) for a in range(len(ids[i])) for b in range(len(ids[j])) if table[i, a] == table[j, b]}
            assert ours == {(a, b) for a, page in enumerate(ids[i]) for b, other in enumerate(ids[j]) if page == other}


def per_row(elements):
    return st.lists(elements, min_size=BATCH, max_size=BATCH)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), per_row(st.integers(0, MOST))),
        st.tuples(st.just("append"), per_row(st.integers(0, 2))),
        st.tuples(st.just("truncate"), per_row(st.integers(0, 20))),
        st.tuples(st.just("fork"), per_row(st.integers(-1, BATCH - 1))),
        st.tuples(st.just("release"), per_row(st.booleans())),
    ),
    max_size=12,
)


def run(steps, num_pages, page_size):
    cache, oracle = new_cache(num_pages, page_size), PythonCache(BATCH, MAX_BLOCKS, num_pages, page_size)
    value = 0
    for name, numbers in steps:
        if name == "append":
            new = [[float(value + MOST * i + j) for j in range(n)] for i, n in enumerate(numbers)]
            value += MOST * BATCH
            padded = np.array([text + [-1.0] * (MOST - len(text)) for text in new], np.float32)
            cache = append_and_write(cache, padded, np.array(numbers))
            oracle.append(new)
        else:
            cache = OPERATIONS[name](cache, np.array(numbers))
            getattr(oracle, name)(numbers)
        check(cache, oracle)
    return cache


@pytest.mark.parametrize("num_pages,page_size", [(9, 1), (7, 3), (12, 4), (5, 8)])
@settings(max_examples=60, deadline=None, derandomize=True)
@given(steps=STEPS)
def test_any_sequence_of_operations_is_what_plain_python_says(num_pages, page_size, steps):
    run(steps, num_pages, page_size)


def test_the_comparison_notices_a_page_that_is_not_copied(monkeypatch):
    """Without copy-on-write two rows write into one page."""
    steps = [("append", [2, 0, 0]), ("fork", [0, 0, -1]), ("append", [1, 1, 0])]
    run(steps, 12, 4)

    def careless(pages, counts, *fixed):
        grown, copies = tables.append(pages._replace(ref_counts=jnp.minimum(pages.ref_counts, 1)), counts, *fixed)
        return grown._replace(ref_counts=tables.replace(grown, *grown[:2], grown[-1]).ref_counts), copies

    monkeypatch.setattr("gumbeljax.kv_cache.paged.tables", type("", (), {**vars(tables), "append": staticmethod(careless)}))
    jax.clear_caches()
    with pytest.raises(AssertionError):
        run(steps, 12, 4)
    jax.clear_caches()


def test_without_copies_a_row_that_needs_one_is_refused():
    """And keys and values are the arrays that came in: no code reads them."""
    cache = kv_cache.append(kv_cache.init_paged(1, 3, 8, 1, 1, page_size=4), jnp.array([3, 4, 0]))
    assert not kv_cache.shares_last_page(cache)
    grown = kv_cache.append(cache, jnp.array([2, 1, 1]), copies_shared=False)
    assert grown.keys is cache.keys and grown.values is cache.values
    want = kv_cache.append(cache, jnp.array([2, 1, 1]))
    jax.tree.map(np.testing.assert_array_equal, grown, want)
    forked = kv_cache.fork(cache, jnp.array([0, 1, 0]))
    assert kv_cache.shares_last_page(forked) and not kv_cache.shares_last_page(kv_cache.fork(cache, jnp.array([1, 1, -1])))
    refused = kv_cache.append(forked, jnp.array([1, 1, 0]), copies_shared=False)
    assert refused.pages.has_overflowed.tolist() == [True, False, False] and refused.pages.lengths.tolist() == [3, 5, 3]


def test_growing_needs_no_retrace_and_works_in_64_bit_mode():
    cache = new_cache(9, 1)
    append = jax.jit(kv_cache.append)
    for counts in ([1, 0, 2], [3, 1, 0], [0, 0, 0]):
        cache = append(cache, jnp.array(counts))
    assert append._cache_size() == 1
    assert cache.pages.lengths.tolist() == [4, 1, 2]
    with jax.enable_x64(True):
        for name, argument in (("append", [1, 2, 3]), ("fork", [1, 1, 0]), ("truncate", [1, 2, 1]), ("release", [True] * 3)):
            out = jax.eval_shape(getattr(kv_cache, name), cache, np.array(argument))
            assert jax.tree.map(lambda x: (x.shape, x.dtype), out) == jax.tree.map(lambda x: (x.shape, x.dtype), cache)


@pytest.mark.parametrize("name", ["num_layers", "batch", "max_length", "num_kv_heads", "head_dim", "page_size", "num_pages"])
def test_sizes_are_checked(name):
    sizes = {"num_layers": 1, "batch": 2, "max_length": 8, "num_kv_heads": 1, "head_dim": 4, "page_size": 4, "num_pages": 3}
    with pytest.raises(ValueError, match=f"{name} must be at least 1; got 0: .*\\.$"):
        kv_cache.init_paged(**sizes | {name: 0})
    with pytest.raises(TypeError, match=f"{name} must be a Python int"):
        kv_cache.init_paged(**sizes | {name: 2.0})


@pytest.mark.parametrize("change, name, good", [
    (kv_cache.append, "counts", [1, 2, 3]), (kv_cache.truncate, "lengths", [1, 2, 3]), (kv_cache.fork, "ancestors", [0, 0, -1]),
    (kv_cache.release, "is_released", [True, False, True])])
def test_there_is_one_number_for_each_row(change, name, good):
    cache, good = kv_cache.append(new_cache(9, 4), jnp.array([3, 1, 2])), jnp.array(good)
    with pytest.raises(ValueError, match=rf"^{name} must have one number for each of the 3 rows; got shape \[2\]: .*\.$"):
        change(cache, good[:2])
    with pytest.raises(TypeError, match=rf"^{name} must be (integers|boolean); got dtype float32: .*\.$"):
        change(cache, good.astype(jnp.float32))
    one, same = change(cache, good[0]).pages, change(cache, jnp.broadcast_to(good[0], (3,))).pages
    assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), one, same))


def test_overflow_is_one_clear_sentence():
    cache = kv_cache.append(new_cache(3, 4), jnp.array([4, 9, 1]))
    assert cache.pages.lengths.tolist() == [4, 0, 0]  # rows in order: the second asked first
    kv_cache.check_overflow({"unrelated": jnp.ones(3), "cache": kv_cache.release(cache, jnp.array([False, True, True]))})
    with pytest.raises(ValueError, match=r"cache must have room .* got 3 pages .* rows \[1, 2\] .*; raise num_pages"):
        kv_cache.check_overflow((cache,))
