"""What goes wrong when shards are drawn carelessly, and the laws that must hold: CASES E, and mutations that must fail."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import gumbeljax
from gumbeljax import _mesh, _shards, sharding
from pallas_kernels import race
from tests import heads, oracles, statistics
from tests.sharding import meshes

ROWS, VOCAB, D = 16, 256, 32


def head(rows=ROWS, vocab=VOCAB):
    return *heads.exact_head(vocab, D, rows), heads.keys_of(1, rows)[0]


# E-1: a key that is the same on every shard must not be the same noise


def draws_of_uniform_logits(rows=20_000, vocab=4096, shards=4):
    mesh = meshes.mesh_of((shards,), ("tp",))
    h, w = jnp.zeros((rows, 16)), jnp.zeros((vocab, 16))
    keys = jax.random.split(jax.random.key(0), rows)
    return np.asarray(meshes.manual(gumbeljax.sample, mesh)(h, w, keys))


def uniform_over_shards(tokens) -> bool:
    """The joint law of (shard, id in the shard) on 4 x 64 cells: uniform and independent."""
    table = np.zeros((4, 64), int)
    np.add.at(table, (tokens // 1024, tokens % 1024 // 16), 1)
    if statistics.chi_square(table, np.full(256, 1 / 256)) <= statistics.ALPHA:
        return False
    return statistics.independent(table) > statistics.ALPHA


def test_every_shard_of_a_uniform_law_is_drawn():
    assert uniform_over_shards(draws_of_uniform_logits())


def test_mutation_local_noise_never_leaves_the_first_shard(monkeypatch):
    """Without the offset all shards tie, and the first wins: the gate must see it."""
    monkeypatch.setattr(race, "global_ids", lambda keys, ids: ids.astype(jnp.uint32))
    jax.clear_caches()
    tokens = draws_of_uniform_logits(2000)
    monkeypatch.undo()
    jax.clear_caches()
    assert not uniform_over_shards(tokens) and tokens.max() < 1024


def test_identical_prompts_on_two_data_shards():
    """The same hidden state in every row: with one key per row, or one key and a row offset, rows differ as on one device."""
    h, w, keys = head()
    h = jnp.broadcast_to(h[:1], h.shape)
    mesh = meshes.mesh_of((2, 4))
    key, rows = jax.random.key(3), ROWS // 2
    specs = {"mesh": mesh, "in_specs": (P("data"), P("tp"), P()), "out_specs": P("data")}

    def by_offset(h, w, key):
        return gumbeljax.sample(h, w, key, axis_name="tp", row_offset=jax.lax.axis_index("data") * rows)

    tokens = jax.jit(jax.shard_map(by_offset, **specs))(h, w, key)
    np.testing.assert_array_equal(tokens, gumbeljax.sample(h, w, key))
    assert (tokens[:rows] != tokens[rows:]).any()
    tokens = meshes.manual(gumbeljax.sample, mesh, data_axis="data")(h, w, keys)
    assert (tokens[:rows] != tokens[rows:]).any()


# E-4: ids survive


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_one_allowed_id_of_a_large_vocabulary(dtype):
    """CASES E-4: one row for each id, all but it masked."""
    vocab, ids = 262_144, np.array([255, 257, 2049, 65_537, 131_071, 200_003, 262_143, 0])
    mask = np.zeros((len(ids), vocab), bool)
    mask[np.arange(len(ids)), ids] = True
    h, w = jnp.ones((len(ids), 2), dtype), jnp.ones((vocab, 2), dtype)
    mesh = meshes.mesh_of((4,), ("tp",))
    out = sharding.on_mesh(gumbeljax.sample_with_log_probs, mesh=mesh, axis_name="tp")(h, w, jax.random.key(0), mask=mask)
    assert out.token.tolist() == ids.tolist()
    np.testing.assert_allclose(out.tempered_log_prob, 0.0, atol=1e-6)
    np.testing.assert_allclose(out.log_normalizer, 2.0, rtol=1e-6)
    np.testing.assert_allclose(out.model_log_prob, -np.log(vocab), rtol=1e-6)


def test_mutation_ids_sent_as_floats_of_the_weights(monkeypatch):
    """An id packed as bfloat16 comes back as another; the check above must see it."""
    gather = _mesh.gather
    monkeypatch.setattr(_mesh, "gather", lambda values, axes: tuple(
        x.astype(jnp.bfloat16).astype(x.dtype) if x.dtype == jnp.int32 else x for x in gather(values, axes)))
    mask = jnp.arange(1024) == 257
    tokens = meshes.manual(gumbeljax.sample, meshes.mesh_of((4,), ("tp",)), logit_bias={257: 99.0})(
        jnp.ones((4, 4)), jnp.ones((1024, 4)), heads.keys_of(0, 4)[0])
    assert mask.sum() == 1 and (np.asarray(tokens) != 257).all()


# Shards without mass, rows without a law


def on_four(fn, **options):
    return sharding.on_mesh(fn, mesh=meshes.mesh_of((4,), ("tp",)), axis_name="tp")


def test_shards_without_mass_never_win_and_leave_the_law_alone():
    """Three shards are masked; or all are; or the only finite logits are hugely negative."""
    h, w, keys = head()
    alive = np.arange(VOCAB) // 64 == 2
    draw = on_four(gumbeljax.sample_with_log_probs)
    for options in ({"mask": alive}, {"logit_bias": np.where(alive, 0.0, -np.inf)},
                    {"mask": alive, "logit_bias": np.where(alive, -1e30, 0.0), "temperature": 0.25}):
        got, want = draw(h, w, keys, **options), gumbeljax.sample_with_log_probs(h, w, keys, **options)
        assert set(np.asarray(got.token) // 64) == {2}
        for a, b in zip(got, want, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    out = draw(h, w, keys, mask=np.zeros(VOCAB, bool))
    assert (np.asarray(out.token) == -1).all() and all(np.isnan(x).all() for x in out[1:])
    got = on_four(gumbeljax.log_prob)(h, w, jnp.arange(ROWS) * 16, mask=alive)
    np.testing.assert_allclose(got, gumbeljax.log_prob(h, w, jnp.arange(ROWS) * 16, mask=alive), rtol=1e-5, atol=1e-5)
    assert np.isneginf(got).sum() == 12


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("where", [0, 64, 255])
def test_a_bad_logit_in_one_shard_marks_its_row(bad, where):
    h, w, keys = head()
    bias = np.zeros((ROWS, VOCAB), np.float32)
    bias[5, where] = bad
    out = on_four(gumbeljax.sample_with_log_probs)(h, w, keys, logit_bias=bias)
    want = gumbeljax.sample_with_log_probs(h, w, keys, logit_bias=bias)
    assert np.flatnonzero(np.asarray(out.token) < 0).tolist() == [5]
    np.testing.assert_array_equal(out.token, want.token)
    assert np.isnan(out.tempered_log_prob[5]) and np.isnan(out.log_normalizer[5])
    score = on_four(gumbeljax.log_prob)(h, w, jnp.zeros(ROWS, jnp.int32), logit_bias=bias)
    assert np.flatnonzero(np.isnan(score)).tolist() == [5]


def test_greedy_ties_across_shards_go_to_the_lowest_id():
    h, w = jnp.ones((3, 4)), jnp.zeros((VOCAB, 4)).at[jnp.array([70, 130, 200])].set(1.0)
    assert on_four(gumbeljax.greedy)(h, w).tolist() == [70, 70, 70]
    assert on_four(gumbeljax.sample)(h, w, jax.random.key(0), temperature=0.0).tolist() == [70, 70, 70]
    tied = on_four(gumbeljax.log_prob)(jnp.ones((3, 4)), w, jnp.array([70, 130, 0]), temperature=0.0)
    assert tied.tolist() == [0.0, -np.inf, -np.inf]


# Unaligned shards: another token, the same law


def unaligned_draws(rows=100_000):
    logits = np.linspace(-2.0, 2.0, 40) * np.cos(np.arange(40))
    h, w = heads.pinned_head(logits, rows=rows)
    mesh = meshes.mesh_of((4,), ("tp",))  # shards of 10: every cut is inside a group
    out = sharding.on_mesh(gumbeljax.sample_with_log_probs, mesh=mesh, axis_name="tp")(h, w, jax.random.key(7))
    return logits, out


def law_holds(logits, tokens) -> bool:
    law = np.exp(oracles.log_softmax(logits[None], 1.0)[0])
    counts = np.bincount(tokens, minlength=40)
    return min(statistics.chi_square(counts, law), statistics.g_test(counts, law)) > statistics.ALPHA and statistics.ks_gate(
        tokens, law)


def test_the_law_of_unaligned_shards():
    logits, out = unaligned_draws()
    assert law_holds(logits, np.asarray(out.token))
    want = oracles.log_softmax(logits[None], 1.0)[0][np.asarray(out.token)]
    np.testing.assert_allclose(out.tempered_log_prob, want, atol=2e-5)
    np.testing.assert_allclose(out.model_log_prob, want, atol=2e-5)


def test_mutations_of_the_merge_fail_the_law(monkeypatch):
    """The winner by mass instead of by score; every shard equally likely. Each must fail the gate, and does."""
    right = _shards.merge_draws

    def by_mass(high, low, token, top, total, *rest, t):
        return right(top + jnp.log(total), 0.0 * low, token, top, total, *rest, t=t)

    def equal(high, low, token, top, total, *rest, t):
        return right(high - (top + jnp.log(total)), 0.0 * low, token, top, total, *rest, t=t)

    for wrong in (by_mass, equal):
        monkeypatch.setattr(_shards, "merge_draws", wrong)
        jax.clear_caches()
        logits, out = unaligned_draws(20_000)
        assert not law_holds(logits, np.asarray(out.token)), wrong.__name__
    monkeypatch.undo()
    jax.clear_caches()


# Gradients


@pytest.mark.parametrize("way", meshes.WAYS)
def test_gradients_of_log_prob(way):
    rng = np.random.default_rng(0)
    h, w = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in [(ROWS, D), (VOCAB, D)])
    tokens = jnp.asarray(rng.integers(0, VOCAB, ROWS))
    mesh = meshes.mesh_of((2, 4))
    options = {"mask": jnp.arange(VOCAB) % 7 > 0} if way == "auto" else {}
    weights = jnp.linspace(-1, 2, ROWS)
    tokens = jnp.where(tokens % 7 == 0, tokens + 1, tokens) % VOCAB

    def total(fn):
        return jax.jit(jax.value_and_grad(lambda h, w: jnp.sum(weights * fn(h, w, tokens)), (0, 1)))

    options |= {"scale": 0.7, "soft_cap": 5.0, "temperature": 0.8}
    fn = functools.partial(gumbeljax.log_prob, **options)
    if way == "explicit":
        mesh = meshes.mesh_of((2, 4), kind=jax.sharding.AxisType.Explicit)
        put = lambda x, axis: jax.device_put(x, jax.sharding.NamedSharding(mesh, P(axis)))  # noqa: E731
        got = total(fn)(put(h, "data"), put(w, "tp"))
        assert got[1][1].sharding.spec[0] == "tp" and got[1][0].sharding.spec[0] == "data"
    else:
        got = total(meshes.WAYS[way](gumbeljax.log_prob, mesh, data_axis="data", **options))(h, w)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(total(fn)(h, w)), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


def test_gradients_of_temperature_and_bias_inside_shard_map():
    """Taken inside the shard_map: the gradient of what is the same on all shards is summed over them, once."""
    rng = np.random.default_rng(1)
    h, w, bias = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in [(ROWS, D), (VOCAB, D), (VOCAB,)])
    tokens, t = jnp.asarray(rng.integers(0, VOCAB, ROWS)), jnp.linspace(0.5, 2.0, ROWS)
    mask = jnp.arange(VOCAB) >= 64  # the first shard has no mass
    tokens = jnp.maximum(tokens, 64)

    def gradient(h, w, t, bias, tokens, mask, **axes):
        def loss(h, w, t, bias):
            return gumbeljax.log_prob(h, w, tokens, temperature=t, logit_bias=bias, mask=mask, **axes).sum()

        return jax.grad(loss, (0, 1, 2, 3))(h, w, t, bias)

    tp = P("tp")
    on_shards = jax.jit(jax.shard_map(
        functools.partial(gradient, axis_name="tp"), mesh=meshes.mesh_of((4,), ("tp",)),
        in_specs=(P(), tp, P(), tp, P(), tp), out_specs=(P(), tp, P(), tp)))
    for a, b in zip(on_shards(h, w, t, bias, tokens, mask), gradient(h, w, t, bias, tokens, mask), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


def test_a_packed_mask_whose_words_do_not_end_where_shards_do():
    """Shards of 16 tokens, words of 32: on a mesh the bits are unpacked before they are cut."""
    h, w = heads.exact_head(128, 32, 6)
    words = jax.random.bits(jax.random.key(5), (6, 4), jnp.uint32)
    draw = sharding.on_mesh(gumbeljax.sample, mesh=meshes.mesh_of((8,), ("tp",)), axis_name="tp")
    for mask in (words, words[0]):
        want = gumbeljax.sample(h, w, jax.random.key(1), mask=mask)
        np.testing.assert_array_equal(draw(h, w, jax.random.key(1), mask=mask), want)
