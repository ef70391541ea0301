"""Vocabulary shards give the tokens of one device: every way, layout and number of devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import gumbeljax
from gumbeljax import _compat, _shards, sharding
from pallas_kernels import noise, triton, xla
from pallas_kernels.finish import Piece
from pallas_kernels.logits import Elementwise
from tests import heads, oracles
from tests.sharding import meshes

ROWS, VOCAB, D = 16, 1024, 32
MESHES = {"one axis": (1, 8), "two by four": (2, 4), "four by two": (4, 2)}
plt = _compat.pallas_triton()


@functools.cache
def one_device(vocab_axis, **options):
    h, w = heads.exact_head(VOCAB, D, ROWS, vocab_axis=vocab_axis)
    keys, _ = heads.keys_of(1, ROWS)
    t = jnp.asarray(np.random.default_rng(0).choice([0.0, 1e-6, 0.5, 1.0, 2.0], ROWS), jnp.float32)
    return h, w, keys, t, gumbeljax.sample_with_log_probs(h, w, keys, temperature=t, vocab_axis=vocab_axis, **options)


def assert_same_draw(got, want):
    np.testing.assert_array_equal(got.token, want.token)
    for a, b in zip(got[1:], want[1:], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("devices", [1, 2, 4, 8])
def test_500_rows_on_1_2_4_and_8_devices(devices):
    """CASES E-2."""
    h, w = heads.exact_head(4096, D, 500)
    keys, words = heads.keys_of(2, 500)
    mesh = meshes.mesh_of((devices,), ("tp",))
    got = meshes.manual(gumbeljax.sample, mesh)(h, w, keys)
    np.testing.assert_array_equal(got, gumbeljax.sample(h, w, keys))
    np.testing.assert_array_equal(got, oracles.grouped_draw(heads.exact_logits(h, w), words, 1.0).tokens)


@pytest.mark.parametrize("way, vocab_axis", [("manual", 0), ("manual", 1), ("explicit", 0), ("auto", 1)])
@pytest.mark.parametrize("shape", MESHES.values(), ids=MESHES)
def test_every_way_and_layout(shape, way, vocab_axis):
    h, w, keys, _, want = one_device(vocab_axis)
    run = functools.partial(meshes.WAYS[way], mesh=meshes.mesh_of(shape), data_axis="data", vocab_axis=vocab_axis)
    alone = gumbeljax.sample_with_log_probs(h, w, keys, temperature=0.5, vocab_axis=vocab_axis)
    draw = functools.partial(gumbeljax.sample_with_log_probs, temperature=0.5)
    assert_same_draw(run(draw)(h, w, keys), alone)
    log_prob = run(gumbeljax.log_prob)(h, w, want.token)
    np.testing.assert_allclose(log_prob, want.model_log_prob, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("way", ["manual", "explicit", "auto"])
def test_a_quantised_table_is_cut_with_its_scales(way):
    h, w, keys, _, _ = one_device(0)
    scale = 2.0 ** (jnp.arange(VOCAB) % 3 - 1)
    head = gumbeljax.QuantizedHead(jnp.sign(w).astype(jnp.int8), scale[:, None])
    draw = functools.partial(gumbeljax.sample_with_log_probs, temperature=0.7, valid_vocab=VOCAB - 5)
    log_prob = functools.partial(gumbeljax.log_prob, valid_vocab=VOCAB - 5)
    want = draw(h, head, keys)
    run = functools.partial(meshes.WAYS[way], mesh=meshes.mesh_of((2, 4)), data_axis="data", vocab_axis=0)
    assert_same_draw(run(draw)(h, head, keys), want)
    np.testing.assert_allclose(run(log_prob)(h, head, want.token), want.model_log_prob, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("way", ["explicit", "auto"])
def test_a_temperature_per_row_and_one_key_for_the_batch(way):
    """Where the library sees the whole batch, row i of it draws with fold_in(key, i) on every mesh."""
    h, w, _, t, _ = one_device(0)
    key, mesh = jax.random.key(5), meshes.mesh_of((2, 4))
    want = gumbeljax.sample(h, w, key, temperature=t)
    got = meshes.WAYS[way](gumbeljax.sample, mesh, data_axis="data", temperature=t)(h, w, key)
    np.testing.assert_array_equal(got, want)
    got = meshes.WAYS[way](gumbeljax.sample, mesh, data_axis="data", row_offset=3)(h[3:11], w, key)
    np.testing.assert_array_equal(got, gumbeljax.sample(h, w, key)[3:11])


def test_eager_calls():
    h, w, keys, t, want = one_device(0)
    mesh = meshes.mesh_of((2, 4), kind=jax.sharding.AxisType.Explicit)
    put = lambda x, *spec: jax.device_put(x, jax.sharding.NamedSharding(mesh, P(*spec)))  # noqa: E731
    got = gumbeljax.sample_with_log_probs(put(h, "data"), put(w, "tp"), keys, temperature=t)
    assert_same_draw(got, want)
    assert got.token.sharding.spec == P("data")
    np.testing.assert_array_equal(gumbeljax.greedy(put(h, "data"), put(w, "tp")), gumbeljax.greedy(h, w))
    np.testing.assert_array_equal(gumbeljax.greedy(h, put(w, ("tp", "data"))), gumbeljax.greedy(h, w))
    tokens = gumbeljax.sample(put(h, "data"), w, keys, temperature=t)  # rows alone are cut
    np.testing.assert_array_equal(tokens, want.token)
    lists = {"temperature": t.tolist()}
    got = gumbeljax.sample_sharded(np.asarray(h).tolist(), np.asarray(w), keys, mesh=mesh, axis_name="tp", **lists)
    np.testing.assert_array_equal(got, want.token)
    with jax.set_mesh(mesh):
        got = gumbeljax.sample_sharded(h, w, keys, axis_name=("data", "tp"), temperature=t)
    np.testing.assert_array_equal(got, want.token)


@pytest.mark.parametrize("axes", [("data", "tp"), ("tp", "data")])
def test_a_vocabulary_over_two_mesh_axes(axes):
    h, w, keys, *_ = one_device(1)
    mesh = meshes.mesh_of((2, 4))
    for way in meshes.WAYS.values():
        np.testing.assert_array_equal(
            way(gumbeljax.sample, mesh, axis_name=axes, vocab_axis=1)(h, w, keys), gumbeljax.sample(h, w, keys, vocab_axis=1))


def test_options():
    """Bias, mask, several draws, scale and soft cap, a batch of two axes."""
    h, w, keys, *_ = one_device(0)
    rng = np.random.default_rng(1)
    bias, mask = jnp.asarray(rng.integers(-2, 3, (ROWS, VOCAB)), jnp.float32), jnp.asarray(rng.random(VOCAB) < 0.5)
    options = {"logit_bias": bias, "mask": mask, "scale": 0.5, "soft_cap": 4.0, "temperature": 0.5}
    mesh = meshes.mesh_of((2, 4), kind=jax.sharding.AxisType.Explicit)
    on = sharding.on_mesh(gumbeljax.sample_with_log_probs, mesh=mesh, axis_name="tp", data_axis="data")
    assert_same_draw(on(h, w, keys, **options), gumbeljax.sample_with_log_probs(h, w, keys, **options))
    several = {"num_samples": 3} | options
    assert_same_draw(on(h, w, keys, **several), gumbeljax.sample_with_log_probs(h, w, keys, **several))
    named = {"logit_bias": {5: 3.0, 1000: 4.0}}
    np.testing.assert_array_equal(meshes.manual(gumbeljax.sample, mesh, **named)(*map(put_for(mesh), (h, w, keys), (0, 1, 0))),
                                  gumbeljax.sample(h, w, keys, **named))
    deep = on(h.reshape(4, 4, D), w, keys.reshape(4, 4), **options | {"logit_bias": bias.reshape(4, 4, VOCAB)})
    np.testing.assert_array_equal(deep.token.reshape(-1), gumbeljax.sample(h, w, keys, **options))
    counts = gumbeljax.count_tokens(rng.integers(0, VOCAB, (ROWS, 200)), VOCAB).add(rng.integers(0, VOCAB, (ROWS, 100)))
    processors = gumbeljax.Processors(
        bias_tokens=[3, 700], bias_values=np.float32([4, 5]), repetition_penalty=1.5, presence_penalty=np.linspace(0, 2, ROWS),
        frequency_penalty=0.5, counts=counts, banned_tokens=rng.integers(-1, VOCAB, (ROWS, 40)), end_tokens=[5, 1000],
        min_new_tokens=3, num_new_tokens=np.arange(ROWS))
    assert_same_draw(on(h, w, keys, processors=processors), gumbeljax.sample_with_log_probs(h, w, keys, processors=processors))
    one = gumbeljax.sample_sharded(h[0], w, keys[0], mesh=mesh, axis_name="tp")
    assert int(one) == int(gumbeljax.sample(h[0], w, keys[0]))


@pytest.mark.parametrize("way", ["explicit", "auto"])
def test_a_list_of_as_many_tokens_as_rows_is_that_of_every_row(way):
    """`[n]` with n the number of rows: not cut as the rows are. Numbers of NumPy that set shapes stay numbers."""
    h, w, keys, *_ = one_device(0)
    ids = np.arange(ROWS) * 61
    run = functools.partial(meshes.WAYS[way], gumbeljax.sample, meshes.mesh_of((2, 4)), data_axis="data")
    for processors in (gumbeljax.Processors(allowed_tokens=ids), gumbeljax.Processors(banned_tokens=jnp.arange(ROWS) + 900),
                       gumbeljax.Processors(bias_tokens=ids, bias_values=jnp.arange(ROWS, dtype=jnp.float32)),
                       gumbeljax.Processors(end_tokens=ids, min_new_tokens=3, num_new_tokens=np.arange(ROWS)),
                       gumbeljax.Processors(allowed_tokens=np.stack([ids] * ROWS) + np.arange(ROWS)[:, None])):
        want = gumbeljax.sample(h, w, keys, processors=processors, temperature=3.0)
        np.testing.assert_array_equal(run(processors=processors, temperature=3.0)(h, w, keys), want)
    numbers = {"valid_vocab": np.int64(900), "num_samples": np.int32(2), "scale": np.float32(0.5), "soft_cap": np.float64(4)}
    np.testing.assert_array_equal(run(**numbers)(h, w, keys), gumbeljax.sample(h, w, keys, **numbers))


def put_for(mesh):
    return lambda x, cut: jax.device_put(x, jax.sharding.NamedSharding(mesh, P("tp") if cut else P()))


def test_scan_and_vmap_inside_and_outside_of_shard_map():
    h, w, keys, *_ = one_device(0)
    want = gumbeljax.sample(h, w, keys)
    mesh = meshes.mesh_of((2, 4))
    specs = {"mesh": mesh, "in_specs": (P("data"), P("tp"), P("data")), "out_specs": P("data")}
    one = lambda h, w, k: gumbeljax.sample(h, w, k, axis_name="tp")  # noqa: E731
    mapped = jax.shard_map(lambda h, w, k: jax.vmap(one, (0, None, 0))(h, w, k), **specs)
    np.testing.assert_array_equal(jax.jit(mapped)(h, w, keys), want)
    batches, batch_keys = h.reshape(2, 8, D), keys.reshape(2, 8)
    np.testing.assert_array_equal(
        jax.jit(jax.vmap(jax.shard_map(one, **specs), (0, None, 0)))(batches, w, batch_keys).reshape(-1), want)

    def loop(first, w, keys):  # the token is the next hidden state
        def step(token, i):
            h = jnp.take(jnp.asarray(states), token, axis=0)
            token = gumbeljax.sample(h, w, jax.vmap(jax.random.fold_in, (0, None))(keys, i), axis_name="tp")
            return token, token

        return jax.lax.scan(step, first, jnp.arange(5))[1].T

    states = np.asarray(heads.exact_head(VOCAB, D, VOCAB, seed=3)[0])
    first = jnp.arange(ROWS, dtype=jnp.int32)
    got = jax.jit(jax.shard_map(loop, **specs))(first, w, keys)
    token, want = first, []
    for i in range(5):
        token = gumbeljax.sample(jnp.asarray(states)[token], w, jax.vmap(jax.random.fold_in, (0, None))(keys, i))
        want.append(token)
    np.testing.assert_array_equal(got, jnp.stack(want, axis=1))


def test_inside_a_shard_map_over_the_rows():
    """CASES E-7: the library's own entry inside an outer shard_map over "data"."""
    h, w, keys, *_ = one_device(0)
    mesh = meshes.mesh_of((2, 4))
    inner = lambda h, w, k: gumbeljax.sample_sharded(h, w, k, mesh=mesh, axis_name="tp")  # noqa: E731
    outer = jax.shard_map(inner, mesh=mesh, axis_names={"data"}, in_specs=(P("data"), P(), P("data")), out_specs=P("data"))
    np.testing.assert_array_equal(jax.jit(outer)(h, w, keys), gumbeljax.sample(h, w, keys))


def test_with_the_check_switched_off():
    h, w, keys, *_ = one_device(0)
    got = meshes.manual(gumbeljax.sample, meshes.mesh_of((2, 4)), data_axis="data", check_vma=False)(h, w, keys)
    np.testing.assert_array_equal(got, gumbeljax.sample(h, w, keys))


def test_an_axis_of_vmap():
    """Shards on one device, for those who want to see one mesh on another: `vmap` names the axis."""
    h, w, keys, *_ = one_device(0)
    got = jax.vmap(lambda w: gumbeljax.sample(h, w, keys, axis_name="tp"), axis_name="tp")(w.reshape(4, -1, D))
    np.testing.assert_array_equal(got, jnp.stack([gumbeljax.sample(h, w, keys)] * 4))


@pytest.mark.parametrize("vocab, devices", [(1000, 8), (1024, 4), (513, 2), (17, 4)])
def test_padded_vocabularies(vocab, devices):
    """`pad_vocab` and `valid_vocab`: the tokens and masses of the unpadded table. (17, 4): two shards are all padding."""
    h, w = heads.exact_head(vocab, D, ROWS)
    w = w - 4.0 * (h[0] > 0)  # padding, of logit 0, would win often
    keys, _ = heads.keys_of(1, ROWS)
    padded = sharding.pad_vocab(w, devices)
    assert padded.shape[0] % (16 * devices) == 0 and padded.shape[0] - vocab < 16 * devices
    mesh = meshes.mesh_of((devices,), ("tp",))
    want = gumbeljax.sample_with_log_probs(h, w, keys)
    for way in (meshes.manual, meshes.auto):
        assert_same_draw(way(gumbeljax.sample_with_log_probs, mesh, valid_vocab=vocab)(h, padded, keys), want)
    several = meshes.manual(gumbeljax.sample_with_log_probs, mesh, valid_vocab=vocab, num_samples=2)(h, padded, keys)
    assert_same_draw(several, gumbeljax.sample_with_log_probs(h, w, keys, num_samples=2))
    np.testing.assert_array_equal(meshes.manual(call_greedy, mesh, valid_vocab=vocab)(h, padded, keys), gumbeljax.greedy(h, w))
    log_prob = meshes.manual(gumbeljax.log_prob, mesh, valid_vocab=vocab)
    np.testing.assert_allclose(log_prob(h, padded, want.token), want.model_log_prob, rtol=1e-5, atol=1e-5)
    outside = jnp.full(ROWS, vocab, jnp.int32)
    assert np.isnan(log_prob(h, padded, outside)).all() and np.isnan(log_prob(h, padded, outside * 0 - 1)).all()


def call_greedy(h, w, _, **options):
    return gumbeljax.greedy(h, w, **options)


def test_a_padded_table_in_the_other_layout():
    h, w = heads.exact_head(100, D, ROWS, vocab_axis=1)
    keys, _ = heads.keys_of(1, ROWS)
    padded = sharding.pad_vocab(w, 4, vocab_axis=1)
    got = meshes.auto(gumbeljax.sample, meshes.mesh_of((4,), ("tp",)), valid_vocab=100, vocab_axis=1)(h, padded, keys)
    np.testing.assert_array_equal(got, gumbeljax.sample(h, w, keys, vocab_axis=1))


@pytest.mark.skipif(plt is None, reason="this jax has no Pallas Triton backend")
@pytest.mark.parametrize("valid", [None, 150])
def test_the_interpreted_triton_kernel_as_a_shard(valid):
    """The kernel's piece at an offset, with padding, is the plain twin's; four of them merge to the whole draw."""
    vocab, shards, rows = 192, 4, 18
    h, w = heads.exact_head(vocab, D, rows)
    keys, words = heads.keys_of(3, rows)
    t = jnp.asarray(np.random.default_rng(0).choice([0.0, 0.5, 1.0], rows), jnp.float32)
    width, found = vocab // shards, {"triton": [], "xla": []}
    kernel = jax.jit(functools.partial(triton.piece, plt=plt, vocab=width, with_model=True, interpret=True))
    twin = jax.jit(functools.partial(xla.piece, vocab=width, with_model=True))
    for shard in range(shards):
        first = shard * width
        here = None if valid is None else jnp.clip(valid - first, 0, width)
        arguments = (h, w[first:first + width], (*map(jnp.asarray, words.T), jnp.full(rows, first, jnp.uint32)), t,
                     Elementwise(valid=here))
        found["triton"].append(kernel(*arguments))
        found["xla"].append(twin(*arguments))
        for a, b in zip(*map(jax.tree.leaves, (found["triton"][-1], found["xla"][-1])), strict=True):
            if a.dtype == jnp.float32:
                np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(found["triton"][-1].draw.token, found["xla"][-1].draw.token)
    want = gumbeljax.sample_with_log_probs(h, w, keys, temperature=t, valid_vocab=valid)
    for pieces in found.values():
        assert_same_draw(merged(pieces, width, t), want)


def merged(pieces: list[Piece], width, t):
    """What `_shards.draw` does after its gather."""
    draw, won, mass = jax.tree.map(lambda *x: jnp.stack(x), *pieces)[:3]
    token = jnp.where(draw.token < 0, -1, draw.token + width * jnp.arange(len(pieces))[:, None])
    return _shards.merge_draws(won.high, won.low, token, won.top, won.total, draw.tempered_log_prob, draw.model_log_prob,
                               mass.top, mass.total, t=t)


def test_ids_above_2_to_24_keep_their_noise():
    """Beyond any table: a shard that starts at 2^24 + 16 draws with the noise of those ids."""
    first, width, rows = 2**24 + 16, 48, 64
    h, w = heads.exact_head(width, D, rows)
    _, words = heads.keys_of(4, rows)
    piece = jax.jit(functools.partial(xla.piece, vocab=width))
    out = piece(h, w, (*map(jnp.asarray, words.T), jnp.full(rows, first, jnp.uint32)), jnp.ones(rows))
    local = piece(h, w, tuple(map(jnp.asarray, words.T)), jnp.ones(rows))
    stream = noise.stream(noise.DRAW, 0, noise.GROUP_LEVEL)
    ids = (first + 16 * np.arange(3)).astype(np.uint32)[:, None]
    gumbel = noise.gumbel(jnp.asarray(words[:, 0]), jnp.asarray(words[:, 1]), stream, jnp.asarray(ids))
    mass = jax.nn.logsumexp(jnp.asarray(heads.exact_logits(h, w)).reshape(rows, 3, 16), axis=-1).T
    np.testing.assert_array_equal(out.won.winner, 16 * jnp.argmax(mass + gumbel, axis=0))
    assert (out.won.winner != local.won.winner).any()  # without the offset: other noise
