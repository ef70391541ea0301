"""Area C: what a key decides, and what it must not depend on."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gumbeljax
from tests import heads, statistics
from tests.cases import routes

# C-1, C-2: a row is its key and its logits


def draw_everything(h, w, keys, temperature=1.0):
    """Every kind of draw as one tuple of arrays `[rows, ...]`."""
    one = gumbeljax.sample_with_log_probs(h, w, keys, temperature=temperature)
    several = gumbeljax.sample(h, w, keys, temperature=temperature, num_samples=3)
    distinct = gumbeljax.sample(h, w, keys, temperature=temperature, num_samples=3, replace=False)
    categorical = gumbeljax.sample(h, w, keys, temperature=temperature, method="categorical")
    return (*one, several, distinct, categorical)


def test_other_keys_change_nothing():
    h, w = heads.exact_head(200, 32, 1)
    h = jnp.repeat(h, 2, axis=0)
    mine = jax.random.key(42)
    drawn = []
    for i in range(50):
        drawn.append(draw_everything(h, w, jnp.stack([mine, jax.random.key(i)])))
    for parts in zip(*drawn, strict=True):
        firsts = np.stack([np.asarray(p)[0] for p in parts])
        assert (firsts == firsts[0]).all()
    assert len({int(d[0][1]) for d in drawn}) > 10  # and the neighbour did draw other tokens


def test_batch_size_changes_nothing():
    h, w = heads.exact_head(200, 32, 16)
    keys = routes.keys_of(0, 16)
    whole = draw_everything(h, w, keys)
    for rows in (1,):
        for a, b in zip(draw_everything(h[:rows], w, keys[:rows]), whole, strict=True):
            np.testing.assert_allclose(a, b[:rows], rtol=1e-6)  # tokens exactly; log-probs are sums


def test_one_key_for_a_batch_does_not_depend_on_its_size():
    h, w = heads.exact_head(200, 32, 12)
    whole = gumbeljax.sample(h, w, jax.random.key(1))
    for rows in (1, 5):
        np.testing.assert_array_equal(gumbeljax.sample(h[:rows], w, jax.random.key(1)), whole[:rows])


def test_permuting_the_batch_permutes_everything():
    h, w = heads.exact_head(500, 32, 32)
    keys, t = routes.keys_of(2, 32), jnp.linspace(0, 2, 32)
    whole = draw_everything(h, w, keys, t)
    for seed in range(20):
        order = np.random.default_rng(seed).permutation(32)
        for a, b in zip(draw_everything(h[order], w, keys[order], t[order]), whole, strict=True):
            np.testing.assert_array_equal(a, b[order])


@routes.needs_triton
def test_permuting_the_batch_of_a_kernel():
    h, w = heads.exact_head(100, 16, 20)
    keys = routes.keys_of(3, 20)
    draw = jax.jit(lambda h, keys: routes.triton_draw(h, w, keys).token)
    whole = np.asarray(draw(h, keys))
    for seed in range(3):
        order = np.random.default_rng(seed).permutation(20)
        np.testing.assert_array_equal(draw(h[order], keys[order]), whole[order])


# C-4: samples of one prompt are different samples


def pairs_equal(tokens):
    """Share of equal pairs along the last axis."""
    tokens = np.asarray(tokens)
    return np.mean([tokens[..., i] == tokens[..., j] for i, j in itertools.combinations(range(tokens.shape[-1]), 2)])


@pytest.mark.parametrize("method", ["grouped", "categorical"])
@pytest.mark.parametrize("way", ["num_samples", "rows", "rank one"])
def test_samples_of_one_prompt_are_independent(way, method):
    """64 of 50 equal ids: 36.3 distinct ones are expected; the same key gives the same ones."""
    w, h, key = jnp.ones((50, 16)), jnp.ones((1, 16)), jax.random.key(5)

    def draw(key):
        if way == "rows":
            return gumbeljax.sample(jnp.repeat(h, 64, axis=0), w, key, method=method)
        return gumbeljax.sample(h if way == "num_samples" else h[0], w, key, num_samples=64, method=method).reshape(64)

    tokens = draw(key)
    assert 28 <= len(set(tokens.tolist())) <= 44
    np.testing.assert_array_equal(tokens, draw(key))
    many = jax.vmap(draw)(routes.keys_of(6, 200))
    assert abs(pairs_equal(many) - 0.02) < 0.002
    assert statistics.chi_square(np.bincount(np.asarray(many).ravel(), minlength=50), np.full(50, 0.02)) > statistics.ALPHA
    assert statistics.independent(np.histogram2d(*np.asarray(many)[:, :2].T // 10, bins=5)[0]) > statistics.ALPHA


def test_samples_do_not_repeat_the_draws_of_other_rows():
    """Sample s of row r, sample r of row s, and the rows of a split: no two share a stream."""
    w, h, key = jnp.ones((997, 16)), jnp.ones((16, 16)), jax.random.key(7)
    table = np.asarray(gumbeljax.sample(h, w, key, num_samples=16))
    others = [table.T, np.asarray(gumbeljax.sample(h, w, jax.random.split(jax.random.fold_in(key, 1), 16), num_samples=16))]
    off_diagonal = ~np.eye(16, dtype=bool)
    for other in others:
        assert (table == other)[off_diagonal].mean() < 0.03
    assert len(np.unique(table)) > 200


def test_a_decode_loop_keyed_by_position_can_be_cut_anywhere():
    h, w = heads.exact_head(300, 32, 12)
    request = jax.random.key(8)

    def steps(first, last):
        return [int(gumbeljax.sample(h[i], w, jax.random.fold_in(request, i))) for i in range(first, last)]

    keys = jax.vmap(jax.random.fold_in, (None, 0))(request, jnp.arange(12))
    whole = gumbeljax.sample(h, w, keys).tolist()
    assert steps(0, 12) == steps(0, 5) + steps(5, 12) == whole


# C-9: one token on every route


@pytest.mark.parametrize("vocab", [7, 1000])
def test_all_routes_draw_one_token(vocab):
    rows = 200
    rng = np.random.default_rng(vocab)
    logits = rng.integers(-32, 33, (rows, vocab)).astype(np.float32) / 8
    keys, t = routes.keys_of(vocab, rows), jnp.asarray(rng.choice([0.0, 0.5, 1.0, 2.0], rows), jnp.float32)
    want = np.asarray(routes.by_head(logits, keys, t)[0])
    for route in routes.SAME_TOKEN:
        if route is not routes.by_triton or routes.plt is not None:
            np.testing.assert_array_equal(route(logits, keys, t)[0], want, err_msg=route.__name__)
    heads.assert_pathwise(want, logits, routes.words_of(keys), t)
    heads.assert_pathwise(routes.by_reference(logits, keys, t)[0], logits, routes.words_of(keys), t)


@pytest.mark.parametrize("options", [{"method": "grouped"}, {"method": "categorical"}], ids=lambda o: o["method"])
def test_kinds_of_key_are_one_key(options):
    """Typed, raw, a NumPy copy, one or one per row, inside jit and outside."""
    h, w = heads.exact_head(200, 32, 6)
    key, keys = jax.random.key(9), routes.keys_of(9, 6)
    for typed in (key, keys):
        want = gumbeljax.sample(h, w, typed, **options)
        raw = jax.random.key_data(typed)
        for same in (raw, np.asarray(raw)):
            np.testing.assert_array_equal(gumbeljax.sample(h, w, same, **options), want)
        inside = jax.jit(lambda h, w, k: gumbeljax.sample(h, w, k, **options))
        np.testing.assert_array_equal(inside(h, w, typed), want)
        np.testing.assert_array_equal(inside(h, w, raw), want)
