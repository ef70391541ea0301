"""`method="categorical"` with a cut vocabulary: XLA partitions it, the tokens are those of one device, few bytes move."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gumbeljax
from benchmarks.collectives import collectives
from gumbeljax import sharding
from tests import heads
from tests.sharding import meshes

ROWS, VOCAB, D = 16, 1024, 32


def head(vocab_axis=0):
    h, w = heads.exact_head(VOCAB, D, ROWS, vocab_axis=vocab_axis)
    return h, w, heads.keys_of(1, ROWS)[0]


@pytest.mark.parametrize("vocab_axis, mode, options", [
    (0, None, {}), (1, "high", {"temperature": 0.5}), (0, "highest", {"num_samples": 3, "valid_vocab": VOCAB - 5}),
    (0, None, {"mask": np.arange(VOCAB) % 3 > 0})], ids=str)
@pytest.mark.parametrize("one_key", [True, False])
def test_tokens_of_one_device(vocab_axis, mode, options, one_key):
    h, w, keys = head(vocab_axis)
    key = jax.random.key(3) if one_key else keys
    options = {"method": "categorical", "mode": mode, "vocab_axis": vocab_axis, **options}
    on = functools.partial(sharding.on_mesh, mesh=meshes.mesh_of((2, 4)), axis_name="tp", data_axis="data")
    want = gumbeljax.sample_with_log_probs(h, w, key, **options)
    for got in (jax.jit(functools.partial(on(gumbeljax.sample_with_log_probs), **options))(h, w, key),
                on(gumbeljax.sample_with_log_probs)(h, w, key, **options)):
        np.testing.assert_array_equal(got.token, want.token)
        np.testing.assert_allclose(got.processed_log_prob, want.processed_log_prob, rtol=1e-5, atol=1e-5)


def test_they_are_those_of_jax():
    h, w, _ = head()
    got = gumbeljax.sample_sharded(h, w, jax.random.key(3), mesh=meshes.mesh_of((1, 8)), axis_name="tp", method="categorical")
    np.testing.assert_array_equal(got, jax.random.categorical(jax.random.key(3), jnp.asarray(heads.exact_logits(h, w))))


@pytest.mark.parametrize("one_key", [True, False])
def test_a_few_bytes_move(one_key):
    h, w, keys = head()
    draw = functools.partial(gumbeljax.sample_sharded, mesh=meshes.mesh_of((2, 4)), axis_name="tp", data_axis="data",
                             method="categorical")
    place = lambda x, *spec: jax.device_put(x, jax.sharding.NamedSharding(  # noqa: E731
        meshes.mesh_of((2, 4)), jax.sharding.PartitionSpec(*spec)))
    key = jax.random.key(3) if one_key else place(keys, "data")
    found = collectives(jax.jit(draw).lower(place(h, "data"), place(w, "tp"), key).compile())
    assert 0 < sum(c.num_bytes for c in found) <= 24 * ROWS * 4


def test_what_is_refused():
    h, w, keys = head()
    draw = functools.partial(gumbeljax.sample_sharded, h, w, keys, axis_name="tp", method="categorical")
    mesh = meshes.mesh_of((2, 4))
    for options, what in (({"top_p": 0.9}, "top_p"), ({"num_samples": 2, "replace": False}, "replace=False")):
        with pytest.raises(NotImplementedError, match=rf"^method='categorical' on a cut vocabulary is .*; got {what}"):
            draw(mesh=mesh, **options)
    with pytest.raises(NotImplementedError, match=r"partitioned by XLA, over auto axes; got 'tp' of another kind"):
        draw(mesh=meshes.mesh_of((2, 4), kind=jax.sharding.AxisType.Explicit))
