"""What a sharded call moves: one all-gather of a few bytes per row and shard, counted in the compiled program."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import gumbeljax
from benchmarks.collectives import Collective, bytes_of, collectives, executed
from gumbeljax import _mesh, sharding
from tests import heads
from tests.sharding import meshes

ROWS, VOCAB, D = 16, 2048, 32
CALLS = {  # bytes per row and shard
    "sample": (gumbeljax.sample, {}, 20),
    "cold": (gumbeljax.sample, {"temperature": 0.5, "scale": 2.0, "valid_vocab": VOCAB - 5}, 20),
    "three samples": (gumbeljax.sample, {"num_samples": 3}, 3 * 20),
    "log-probs": (gumbeljax.sample_with_log_probs, {"temperature": 0.5}, 36),
    "greedy": (lambda h, w, _, **options: gumbeljax.greedy(h, w, **options), {}, 12),
    "log_prob": (gumbeljax.log_prob, {"temperature": 0.5}, 16),
}


def arguments(fn, mesh, axis_name, data_axis):
    h, w = heads.exact_head(VOCAB, D, ROWS)
    third = jnp.zeros(ROWS, jnp.int32) if fn is gumbeljax.log_prob else heads.keys_of(0, ROWS)[0]
    place = lambda x, axis: jax.device_put(x, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(axis)))  # noqa: E731
    return place(h, data_axis), place(w, axis_name), place(third, data_axis)


def moved(fn, shape, axis_name="tp", data_axis="data", **options):
    mesh = meshes.mesh_of(shape)
    call = meshes.manual(fn, mesh, axis_name=axis_name, data_axis=data_axis, **options)
    return collectives(call.lower(*arguments(fn, mesh, axis_name, data_axis)).compile())


def is_one_small_gather(found: list[Collective], rows, shards, most=24) -> bool:
    return [c.kind for c in found] == ["all-gather"] and found[0].num_bytes <= most * rows * shards


@pytest.mark.parametrize("name", CALLS)
def test_one_all_gather_of_a_few_bytes(name):
    fn, options, per_row = CALLS[name]
    assert moved(fn, (2, 4), **options) == [Collective("all-gather", per_row * ROWS // 2 * 4)]


@pytest.mark.parametrize("axis_name, data_axis", [("tp", None), (("data", "tp"), None)])
def test_the_bytes_are_those_of_the_ranks(axis_name, data_axis):
    found = moved(gumbeljax.sample, (2, 4), axis_name=axis_name, data_axis=data_axis)
    shards = 4 if axis_name == "tp" else 8
    assert is_one_small_gather(found, ROWS, shards) and found[0].num_bytes == 20 * ROWS * shards


def test_on_mesh_moves_no_more():
    mesh = meshes.mesh_of((2, 4))
    call = jax.jit(functools.partial(gumbeljax.sample_sharded, mesh=mesh, axis_name="tp", data_axis="data"))
    h, w, _ = arguments(gumbeljax.sample, mesh, "tp", "data")
    found = collectives(call.lower(h, w, jax.random.key(0)).compile())
    assert is_one_small_gather(found, ROWS // 2, 4)


def test_explicit_axes_move_no_more():
    mesh = meshes.mesh_of((2, 4), kind=jax.sharding.AxisType.Explicit)
    h, w, keys = arguments(gumbeljax.sample, mesh, "tp", "data")
    assert is_one_small_gather(collectives(jax.jit(gumbeljax.sample).lower(h, w, keys).compile()), ROWS // 2, 4)


def test_gradients_move_what_tensor_parallelism_must():
    """The gradient of h, once; w's stays where w is."""
    mesh = meshes.mesh_of((8,), ("tp",))
    call = sharding.on_mesh(gumbeljax.log_prob, mesh=mesh, axis_name="tp")
    gradient = jax.jit(jax.grad(lambda h, w, tokens: call(h, w, tokens).sum(), (0, 1)),
                       out_shardings=(None, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("tp"))))
    found = collectives(gradient.lower(*arguments(gumbeljax.log_prob, mesh, "tp", None)).compile())
    assert sorted(c.kind for c in found) == ["all-gather", "all-reduce"]
    assert sum(c.num_bytes for c in found) <= 16 * ROWS * 8 + ROWS * D * 4 + ROWS * 4 * 2


def test_the_counter_counts():
    """What gathers logits, or asks twice, fails the gate; asynchronous pairs and tuples are read."""
    mesh = meshes.mesh_of((8,), ("tp",))

    def gathers_logits(h, w, keys, *, axis_name, vocab_axis):
        logits = lax.all_gather(h @ w.T, axis_name, axis=1, tiled=True, to="invarying")
        return gumbeljax.sample_logits(logits, keys)

    def asks_twice(h, w, keys, *, axis_name, vocab_axis):
        return gumbeljax.sample(h, w, keys, axis_name=axis_name) + gumbeljax.greedy(h, w, axis_name=axis_name)

    for wrong in (gathers_logits, asks_twice):
        call = meshes.manual(wrong, mesh)
        assert not is_one_small_gather(collectives(call.lower(*arguments(wrong, mesh, "tp", None)).compile()), ROWS, 8)
    assert bytes_of("(s32[4,9,4]{2,1,0}, f32[], bf16[3])") == 4 * 144 + 4 + 6

    class Text:
        def as_text(self):
            return "%a = (f32[2], f32[8]) all-gather-start(%x)\n%b = f32[8] all-gather-done(%a)\n%c = s32[2] add(%x, %y)"

    assert collectives(Text()) == [Collective("all-gather", 32)]


def test_bits_arrive_as_they_left():
    """NaN payloads, subnormals, negative zero, ids past 2^24."""
    words = np.array([0x7FC12345, 0x00000001, 0x80000000, 0xFF800001, 2**24 + 1, 2**31 - 1], np.uint32)
    mesh = meshes.mesh_of((8,), ("tp",))
    floats, ids = words.view(np.float32), words.view(np.int32)
    cut = jax.sharding.PartitionSpec("tp")
    gather = jax.jit(jax.shard_map(
        lambda x, y: _mesh.gather((x[0], y[0]), ("tp",)), mesh=mesh, in_specs=(cut, cut),
        out_specs=jax.sharding.PartitionSpec()))
    got = gather(jnp.stack([floats] * 8), jnp.stack([ids] * 8))
    for x in got:
        np.testing.assert_array_equal(np.asarray(x).view(np.uint32), np.stack([words] * 8))


def test_loops_count_as_often_as_they_run():
    mesh = meshes.mesh_of((8,), ("tp",))

    def three_times(x):
        body = lambda x, _: (lax.psum(x, "tp") * 1e-3 + lax.psum(x[0], "tp"), None)  # noqa: E731
        return lax.pmax(lax.scan(body, x, length=3)[0], "tp")

    call = jax.jit(jax.shard_map(three_times, mesh=mesh, in_specs=jax.sharding.PartitionSpec(),
                                 out_specs=jax.sharding.PartitionSpec(), check_vma=False))
    found = executed(call.lower(jnp.ones(5)).compile())
    assert sum(c.num_bytes * count for c, count in found.items()) == 3 * (20 + 4) + 20
    unknown = jax.jit(jax.shard_map(lambda x: lax.while_loop(lambda x: x[0] < 9, lambda x: lax.psum(x, "tp"), x), mesh=mesh,
                                    in_specs=jax.sharding.PartitionSpec(), out_specs=jax.sharding.PartitionSpec(),
                                    check_vma=False))
    with pytest.raises(ValueError, match="not known"):
        executed(unknown.lower(jnp.ones(5)).compile())
