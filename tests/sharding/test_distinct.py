"""Draws without replacement from a cut vocabulary: those of one device, and a few numbers for each token that move."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gumbeljax
from benchmarks.collectives import Collective, collectives, in_and_out_of_loops
from gumbeljax import _cut_ranks, _mesh, sharding
from tests import heads, oracles, statistics
from tests.sharding import meshes
from tests.sharding.test_cut_filter_draws import assert_same_draw, mixed, with_options

ROWS, VOCAB, D = 16, 1024, 32
draw = functools.partial(gumbeljax.sample_with_log_probs, replace=False)


def head(vocab=VOCAB, vocab_axis=0):
    h, w = heads.exact_head(vocab, D, ROWS, vocab_axis=vocab_axis)
    return h, w, heads.keys_of(1, ROWS)[0]


def assert_distinct(tokens):
    for row in np.asarray(tokens):
        assert len(set(row[row >= 0])) == (row >= 0).sum()


@pytest.mark.parametrize("way, vocab_axis, shape, axes, data_axis", [
    ("manual", 0, (2, 4), "tp", "data"), ("explicit", 1, (2, 4), "tp", "data"), ("auto", 0, (1, 2), "tp", None),
    ("manual", 1, (4, 2), ("data", "tp"), None), ("explicit", 0, (4, 2), ("tp", "data"), None)])
def test_every_way_gives_the_tokens_of_one_device(way, vocab_axis, shape, axes, data_axis):
    h, w, keys = head(vocab_axis=vocab_axis)
    mesh = meshes.mesh_of(shape)
    call = functools.partial(draw, num_samples=20, temperature=0.7)
    got = meshes.WAYS[way](call, mesh, axis_name=axes, data_axis=data_axis, vocab_axis=vocab_axis)(h, w, keys)
    assert_same_draw(got, call(h, w, keys, vocab_axis=vocab_axis))
    assert_distinct(got.token)


def test_the_tokens_are_the_oracle_s():
    h, w, keys = head()
    words = np.asarray(jax.random.key_data(keys))
    t = jnp.asarray(np.random.default_rng(0).choice([0.0, 1e-6, 0.5, 1.0, 2.0], ROWS), jnp.float32)
    got = gumbeljax.sample_sharded(h, w, keys, mesh=meshes.mesh_of((8,), ("tp",)), axis_name="tp", num_samples=9, replace=False,
                                   temperature=t)
    np.testing.assert_array_equal(got, oracles.grouped_without_replacement(heads.exact_logits(h, w), words, 9, t))
    np.testing.assert_array_equal(got[:, 0], gumbeljax.sample(h, w, keys, temperature=t))


def test_one_token_of_each_shard_is_not_enough(monkeypatch):
    h, w, keys = head()
    on = functools.partial(gumbeljax.sample_sharded, mesh=meshes.mesh_of((8,), ("tp",)), axis_name="tp", replace=False)

    def first_alone(said, axes):
        high = said.ranked.high.at[1:].set(-jnp.inf)
        return gather_all(said._replace(ranked=said.ranked._replace(high=high)), axes)

    gather_all = _mesh.gather_all
    monkeypatch.setattr(_cut_ranks._mesh, "gather_all", first_alone)
    jax.clear_caches()
    got = on(h, w, keys, num_samples=6)
    jax.clear_caches()
    assert (got != gumbeljax.sample(h, w, keys, num_samples=6, replace=False)).any()
    np.testing.assert_array_equal(got[:, 0], gumbeljax.sample(h, w, keys))


@pytest.mark.parametrize("way", ["manual", "auto"])
def test_under_filters(way):
    h, w, keys = head()
    mesh, options = meshes.mesh_of((2, 4)), mixed()
    want = draw(h, w, keys, num_samples=7, **options)
    if way == "manual":
        third = {"third": keys, "options": options}
        got = meshes.manual(with_options(draw), mesh, data_axis="data", num_samples=7)(h, w, third)
    else:
        got = meshes.auto(draw, mesh, data_axis="data", num_samples=7, **options)(h, w, keys)
    assert_same_draw(got, want)
    assert (np.asarray(got.token) < 0).any() and (np.asarray(got.token) >= 0).all(axis=1).any()  # small sets, and large ones


@pytest.mark.parametrize("num", [1, 20, 70])
def test_shards_with_fewer_tokens_than_are_drawn(num):
    """Four shards of 32, one without any token and two of them padding in part: what is short is -1."""
    h, w, keys = head(100)
    w = w - 4.0 * (h[0] > 0)  # padding, of logit 0, would win often
    mask = jnp.arange(100) % 32 != 0
    mask = mask.at[32:64].set(False)
    want = draw(h, w, keys, num_samples=num, mask=mask)
    on = sharding.on_mesh(draw, mesh=meshes.mesh_of((4,), ("tp",)), axis_name="tp")
    got = on(h, sharding.pad_vocab(w, 4), keys, num_samples=num, mask=jnp.pad(mask, (0, 28), constant_values=True),
             valid_vocab=100)
    assert_same_draw(got, want)
    assert (np.asarray(got.token) >= 0).sum() == ROWS * min(num, 100 - 32 - 3)


def test_rows_without_a_law():
    h, w, keys = head(256)
    bias = np.zeros((ROWS, 256), np.float32)
    bias[1], bias[2, 70], bias[3, 200] = -np.inf, np.nan, np.inf
    t = jnp.ones(ROWS).at[4].set(jnp.nan)
    on = sharding.on_mesh(draw, mesh=meshes.mesh_of((4,), ("tp",)), axis_name="tp")
    got, want = (jax.jit(functools.partial(f, num_samples=3))(h, w, keys, logit_bias=bias, temperature=t) for f in (on, draw))
    assert np.flatnonzero((np.asarray(got.token) < 0).all(axis=1)).tolist() == [1, 2, 3, 4]
    assert_same_draw(got, want)


def test_the_law_of_unaligned_shards():
    """Shards of 10 draw other tokens, from the same law: pairs are Plackett-Luce."""
    logits = np.linspace(-1.0, 1.0, 20) * np.cos(np.arange(20))
    h, w = heads.pinned_head(logits, rows=20_000)
    on = sharding.on_mesh(gumbeljax.sample, mesh=meshes.mesh_of((2,), ("tp",)), axis_name="tp")
    pairs = np.asarray(on(h, w, jax.random.key(3), num_samples=2, replace=False))
    p = np.exp(logits) / np.exp(logits).sum()
    law = p[:, None] * p / (1 - p[:, None])
    np.fill_diagonal(law, 0.0)
    counts = np.bincount(pairs[:, 0] * 20 + pairs[:, 1], minlength=400)
    assert counts[law.reshape(-1) == 0].sum() == 0
    assert statistics.chi_square(counts[law.reshape(-1) > 0], law[law > 0]) > statistics.ALPHA
    assert (pairs != gumbeljax.sample(h, w, jax.random.key(3), num_samples=2, replace=False)).any()


@pytest.mark.parametrize("fn, per_token, per_row", [(gumbeljax.sample, 12, 8), (gumbeljax.sample_with_log_probs, 20, 16)])
@pytest.mark.parametrize("num", [1, 8])
def test_one_all_gather_of_a_few_bytes_per_token(fn, per_token, per_row, num):
    h, w, keys = head(4096)
    call = meshes.manual(fn, meshes.mesh_of((2, 4)), data_axis="data", num_samples=num, replace=False)
    found = collectives(call.lower(h, w, keys).compile())
    assert found == [Collective("all-gather", (per_token * num + per_row) * (ROWS // 2) * 4)]


def test_filters_add_what_they_always_do():
    h, w, keys = head(4096)
    call = meshes.manual(with_options(gumbeljax.sample), meshes.mesh_of((2, 4)), data_axis="data", num_samples=5, replace=False)
    options = {"min_p": jnp.full(ROWS, 0.01)}
    once, in_loops = in_and_out_of_loops(call.lower(h, w, {"third": keys, "options": options}).compile())
    assert [c.num_bytes for c in once] == [4 * ROWS // 2 * 4, (12 * 5 + 8) * ROWS // 2 * 4] and not in_loops


def test_more_tokens_than_there_are():
    h, w, keys = head(64)
    on = functools.partial(gumbeljax.sample_sharded, mesh=meshes.mesh_of((4,), ("tp",)), axis_name="tp", replace=False)
    assert_distinct(on(h, w, keys, num_samples=64))
    for valid, limit in ((None, 64), (50, 50)):
        sentence = rf"^num_samples must be at most the number of tokens, {limit}, when replace=False; got 65"
        with pytest.raises(ValueError, match=sentence):
            on(h, w, keys, num_samples=65, valid_vocab=valid)
        with pytest.raises(ValueError, match=sentence):
            meshes.manual(gumbeljax.sample, meshes.mesh_of((4,), ("tp",)), num_samples=65, replace=False,
                          valid_vocab=valid)(h, w, keys)
