"""Draws and log-probabilities under filters on a vocabulary cut over devices: those of one device; what they move."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import gumbeljax
from benchmarks.collectives import Collective, in_and_out_of_loops
from gumbeljax import _cut_filters, sharding
from tests import filter_oracle as oracle
from tests import heads, knobs, statistics
from tests.filter_oracle import Options
from tests.sharding import meshes


def head(rows=16, vocab=1024, vocab_axis=0):
    h, w = heads.exact_head(vocab, 32, rows, vocab_axis=vocab_axis)
    return h, w, heads.keys_of(1, rows)[0]


def mixed(rows=16):
    """Filters that differ from row to row, off for some; the last rows need the search."""
    rng = np.random.default_rng(3)
    k = np.array([0, 5, 40, 0, -1, 300, 0, 1023] * 2)[:rows]
    p = np.array([1.0, 1.0, 0.8, 0.5, 0.99, 0.9, 1.0, 1.0] * 2)[:rows]
    m = np.where(rng.random(rows) < 0.3, 0.1, 0.0)
    t = rng.choice([0.0, 0.5, 1.0, 2.0], rows)
    return knobs.filters_of(Options(t, k, p, m), rows)


def assert_same_draw(got, want):
    np.testing.assert_array_equal(got.token, want.token)
    for a, b in zip(got[1:], want[1:], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def with_options(fn):
    """`fn` as the ways of `meshes` call it, with traced options per row in the third argument."""
    def call(h, w, third, **options):
        return fn(h, w, third["third"], **third["options"], **options)

    return call


@functools.cache
def one_device(vocab_axis=0):
    h, w, keys = head(vocab_axis=vocab_axis)
    return h, w, keys, mixed(), gumbeljax.sample_with_log_probs(h, w, keys, vocab_axis=vocab_axis, **mixed())


@pytest.mark.parametrize("way, vocab_axis, shape, axes, data_axis", [
    ("manual", 0, (2, 4), "tp", "data"), ("explicit", 1, (2, 4), "tp", "data"), ("auto", 0, (1, 2), "tp", None),
    ("manual", 1, (4, 2), ("data", "tp"), None), ("explicit", 0, (4, 2), ("tp", "data"), None)])
def test_every_way_gives_the_draw_of_one_device(way, vocab_axis, shape, axes, data_axis):
    h, w, keys, options, want = one_device(vocab_axis)
    mesh = meshes.mesh_of(shape)
    on = functools.partial(meshes.WAYS[way], mesh=mesh, axis_name=axes, data_axis=data_axis, vocab_axis=vocab_axis)
    if way == "manual":
        call = lambda fn: lambda h, w, third: on(with_options(fn))(h, w, {"third": third, "options": options})  # noqa: E731
    else:
        call = lambda fn: on(fn, **options)  # noqa: E731
    assert_same_draw(call(gumbeljax.sample_with_log_probs)(h, w, keys), want)
    if data_axis is not None:
        log_prob = call(gumbeljax.log_prob)(h, w, want.token)
        np.testing.assert_allclose(log_prob, want.processed_log_prob, rtol=1e-5, atol=1e-5)


def test_quantised_tables():
    """Scales are powers of two, so that every logit is exact."""
    h, w, keys = head()
    scales = jnp.exp2(jnp.arange(w.shape[0]) % 3 - 1.0)
    table = gumbeljax.QuantizedHead(jnp.round(w / jnp.max(jnp.abs(w))).astype(jnp.int8), scales)
    mesh = meshes.mesh_of((2, 4))
    got = gumbeljax.sample_sharded(h, table, keys, mesh=mesh, axis_name="tp", **mixed())
    np.testing.assert_array_equal(got, gumbeljax.sample(h, table, keys, **mixed()))


@pytest.mark.parametrize("options", [
    {"min_p": 0.1}, {"top_k": 9}, {"top_k": 200, "top_p": 0.95, "min_p": 0.01, "num_samples": 3}], ids=str)
def test_numbers_alone_and_several_samples(options):
    h, w, keys = head(vocab=512)
    fn = gumbeljax.sample_with_log_probs if "num_samples" in options else gumbeljax.sample
    on = sharding.on_mesh(fn, mesh=meshes.mesh_of((2, 4)), axis_name="tp", data_axis="data")
    got, want = on(h, w, keys, **options), fn(h, w, keys, **options)
    (assert_same_draw if "num_samples" in options else np.testing.assert_array_equal)(got, want)


def test_with_processors_masks_and_padding():
    """A vocabulary of 1,000 in a table of 1,024; the last shard's end is padding whose logit, 0, would often be kept."""
    h, w, keys = head(vocab=1000)
    w = w - 4.0 * (h[0] > 0)
    rng, rows = np.random.default_rng(1), len(h)
    counts = gumbeljax.count_tokens(rng.integers(0, 1000, (rows, 200)), 1000).add(rng.integers(0, 1000, (rows, 100)))
    processors = gumbeljax.Processors(
        bias_tokens=[3, 700], bias_values=np.float32([4, 5]), repetition_penalty=1.5, presence_penalty=np.linspace(0, 2, rows),
        counts=counts, banned_tokens=rng.integers(-1, 1000, (rows, 40)))
    bias, mask = jnp.asarray(rng.integers(-2, 3, (rows, 1000)), jnp.float32), jnp.asarray(rng.random(1000) < 0.5)
    mask = mask.at[128:256].set(False)  # a shard without any
    options = {"logit_bias": bias, "mask": mask, "scale": 0.5, "soft_cap": 4.0, **mixed()}
    want = gumbeljax.sample_with_log_probs(h, w, keys, processors=processors, **options)
    wide = lambda x: jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, 24)])  # noqa: E731
    padded = jax.tree.map(lambda x: wide(x) if np.shape(x)[-1:] == (1000,) else x, (processors, options))
    padded[1]["mask"] = padded[1]["mask"].at[1000:].set(True)
    on = sharding.on_mesh(gumbeljax.sample_with_log_probs, mesh=meshes.mesh_of((8,), ("tp",)), axis_name="tp")
    got = on(h, sharding.pad_vocab(w, 8), keys, processors=padded[0], valid_vocab=1000, **padded[1])
    assert_same_draw(got, want)


def test_rows_without_a_law():
    h, w, keys = head(vocab=256)
    bias = np.zeros((16, 256), np.float32)
    bias[1], bias[2, 70], bias[3, 200], bias[4, [3, 250]] = -np.inf, np.nan, np.inf, np.inf
    options = mixed() | {"temperature": jnp.ones(16).at[5].set(jnp.nan), "top_k": jnp.full(16, 5).at[6].set(-2)}
    on = sharding.on_mesh(gumbeljax.sample_with_log_probs, mesh=meshes.mesh_of((4,), ("tp",)), axis_name="tp")
    draw = jax.jit(functools.partial(on, h, w, keys))
    got, want = (f(logit_bias=bias, **options) for f in (draw, jax.jit(functools.partial(
        gumbeljax.sample_with_log_probs, h, w, keys))))
    assert np.flatnonzero(np.asarray(got.token) < 0).tolist() == [1, 2, 3, 4, 5, 6]
    assert_same_draw(got, want)
    score = jax.jit(sharding.on_mesh(gumbeljax.log_prob, mesh=meshes.mesh_of((4,), ("tp",)), axis_name="tp"))
    tokens, options = jnp.full(16, 100).at[15].set(256), {"min_p": 0.1, "temperature": options["temperature"]}
    wanted = np.asarray(jax.jit(gumbeljax.log_prob)(h, w, tokens, logit_bias=bias, **options))
    np.testing.assert_allclose(score(h, w, tokens, logit_bias=bias, **options), wanted, rtol=1e-5, atol=1e-5)
    assert np.isnan(wanted).sum() == 6 and np.isneginf(wanted).any() and np.isfinite(wanted).any()


def test_scan_and_vmap_around_the_search():
    h, w, keys = head(vocab=512)
    options = {"top_p": mixed()["top_p"]}
    want = gumbeljax.sample(h, w, keys, **options)
    specs = {"mesh": meshes.mesh_of((2, 4)), "in_specs": (P("data"), P("tp"), P("data"), P("data")), "out_specs": P("data")}
    one = lambda h, w, key, o: gumbeljax.sample(h, w, key, axis_name="tp", **o)  # noqa: E731
    mapped = jax.shard_map(jax.vmap(one, (0, None, 0, 0)), **specs)
    np.testing.assert_array_equal(jax.jit(mapped)(h, w, keys, options), want)
    named = jax.vmap(lambda w: one(h, w, keys, options), axis_name="tp")(w.reshape(4, -1, 32))
    np.testing.assert_array_equal(named, jnp.stack([want] * 4))

    def loop(h, w, keys, options):
        def step(_, i):
            return None, one(h, w, jax.vmap(jax.random.fold_in, (0, None))(keys, i), options)

        return lax.scan(step, None, jnp.arange(3))[1].T

    got = jax.jit(jax.shard_map(loop, check_vma=False, **specs))(h, w, keys, options)
    for i in range(3):
        at_step = jax.vmap(jax.random.fold_in, (0, None))(keys, i)
        np.testing.assert_array_equal(got[:, i], gumbeljax.sample(h, w, at_step, **options))


def test_gradients_of_a_filtered_log_prob():
    """The kept set is a constant; rows, tokens outside it and a shard without any kept token included."""
    rng, rows = np.random.default_rng(0), 16
    h, w = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in [(rows, 8), (256, 8)])
    bias = jnp.where(jnp.arange(256) < 64, -30.0, jnp.asarray(rng.normal(size=256), jnp.float32))
    options = {"top_k": jnp.asarray([0, 3, 40, 200] * 4), "top_p": jnp.asarray([0.9, 1.0, 0.6, 0.97] * 4)}
    tokens = gumbeljax.sample(h, w, jax.random.key(0), logit_bias=bias, temperature=0.8, **options).at[3].set(0)

    def total(fn):
        def loss(h, w, t, bias):
            out = fn(h, w, tokens, temperature=t, logit_bias=bias, **options)
            return jnp.sum(jnp.where(out > -jnp.inf, jnp.linspace(-1, 2, rows) * out, 0.0))

        return jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3)))(h, w, jnp.full(rows, 0.8), bias)

    on = sharding.on_mesh(gumbeljax.log_prob, mesh=meshes.mesh_of((2, 4)), axis_name="tp", data_axis="data")
    for a, b in zip(jax.tree.leaves(total(on)), jax.tree.leaves(total(gumbeljax.log_prob)), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


def test_the_law_of_unaligned_shards():
    """Shards of 10 draw other tokens, from the same law on the same kept set."""
    logits = np.linspace(-2.0, 2.0, 40) * np.cos(np.arange(40))
    h, w = heads.pinned_head(logits, rows=10_000)
    on = sharding.on_mesh(gumbeljax.sample, mesh=meshes.mesh_of((4,), ("tp",)), axis_name="tp")
    tokens = np.asarray(on(h, w, jax.random.key(7), top_p=0.8, min_p=0.1))
    law = np.exp(oracle.laws(logits[None].astype(np.float32), Options(1.0, 0, 0.8, 0.1)).processed[0])
    counts = np.bincount(tokens, minlength=40)
    assert 5 < (law > 0).sum() < 25 and not counts[law == 0].any()
    inside = law > 0
    assert statistics.chi_square(counts[inside], law[inside]) > statistics.ALPHA and statistics.ks_gate(tokens, law)
    assert (tokens != gumbeljax.sample(h, w, jax.random.key(7), top_p=0.8, min_p=0.1)).any()


# What is moved


ROWS = 16
BEFORE = 8 * _cut_filters.CANDIDATES  # bytes of the tokens that a shard sends
COSTS = {  # bytes per row and shard before the draw's 20; bytes per row of the sum; number of searches
    ("min_p",): (4, 0, 0), ("top_k",): (BEFORE + 4, 0, 1), ("top_p",): (BEFORE + 8, 8, 1),
    ("top_k", "top_p", "min_p"): (BEFORE + 8, 8, 2)}


def moved(fn, names, third, **options):
    h, w, _ = head(vocab=4096)
    per_row = {name: x for name, x in mixed().items() if name in names}
    call = meshes.manual(with_options(fn), meshes.mesh_of((2, 4)), data_axis="data", **options)
    return in_and_out_of_loops(call.lower(h, w, {"third": third, "options": per_row}).compile())


@pytest.mark.parametrize("names", COSTS, ids="+".join)
def test_at_most_three_small_collectives_and_one_in_each_search(names):
    once, summed, searches = COSTS[names]
    keys, rows, shards = heads.keys_of(0, ROWS)[0], ROWS // 2, 4
    outside, inside = moved(gumbeljax.sample, names, keys)
    want = [Collective("all-gather", rows * shards * once), *[Collective("all-reduce", rows * summed)] * (summed > 0),
            Collective("all-gather", rows * shards * 20)]
    assert sorted(outside) == sorted(want) and len(outside) <= 3
    assert inside == [Collective("all-reduce", rows * 15 * 8)] * searches


def test_log_probs_move_little_more():
    keys, tokens, rows, shards = heads.keys_of(0, ROWS)[0], jnp.zeros(ROWS, jnp.int32), ROWS // 2, 4
    outside, inside = moved(gumbeljax.sample_with_log_probs, ("min_p",), keys)
    assert sorted(c.num_bytes for c in outside) == [rows * shards * 8, rows * shards * 36] and not inside
    outside, inside = moved(gumbeljax.log_prob, ("min_p",), tokens)
    assert sorted(c.num_bytes for c in outside) == [rows * shards * 4, rows * shards * 16] and not inside


def test_the_counter_of_loops_counts():
    """A loop's collective is one inside, whatever surrounds it."""
    def call(h, w, keys, *, axis_name, vocab_axis):
        once = lax.psum(h[:1].astype(jnp.float32), axis_name)
        return lax.fori_loop(0, jnp.int32(h[0, 0]) + 3, lambda i, a: a + lax.psum(a[:, :2].sum() * w[0, 0], axis_name), once)

    h, w, keys = head()
    outside, inside = in_and_out_of_loops(meshes.manual(call, meshes.mesh_of((4,), ("tp",))).lower(h, w, keys).compile())
    assert outside == [Collective("all-reduce", 32 * 4)] and inside == [Collective("all-reduce", 4)]


# What is refused


def test_what_is_refused():
    h, w, keys = head(vocab=256)
    mesh = meshes.mesh_of((4,), ("tp",))
    filters = jax.device_put(jnp.ones(4, jnp.int32), jax.sharding.NamedSharding(mesh, P("tp")))
    call = jax.shard_map(lambda h, w, keys, k: gumbeljax.sample(h, w, keys, top_k=k[0], axis_name="tp"), mesh=mesh,
                         in_specs=(P(), P("tp"), P(), P("tp")), out_specs=P())
    with pytest.raises(ValueError, match=r"^top_k must be the same on all shards of the vocabulary; got one that varies"):
        jax.jit(call)(h, w, keys, filters)
    for fn in (gumbeljax.kept_tokens, gumbeljax.processed_log_probs, functools.partial(gumbeljax.top_log_probs, num=3)):
        call = jax.shard_map(lambda h, w, fn=fn: fn(h, w, top_k=3, axis_name="tp"), mesh=mesh, in_specs=(P(), P("tp")),
                             out_specs=P())
        with pytest.raises(NotImplementedError, match=r"^axis_name must be None or \(\) for a law over the whole vocabulary"):
            jax.jit(call)(h, w)
