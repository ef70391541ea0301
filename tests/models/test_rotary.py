"""Norms, rotary embedding and the write as one kernel: interpreted against XLA's route, lowered for CUDA; models on a GPU."""

import warnings
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from gumbeljax import _compat, kv_cache, models
from gumbeljax.models import llama, parallel, rotary
from gumbeljax.models.rotary import Rope
from pallas_kernels import triton_rotate

plt = _compat.pallas_triton()
EPS = 1e-6


def inputs(dtype, *, num_heads=6, num_kv_heads=3, head_dim=32, has_norms=True, seq=5, num_pages=8):
    """Two rows of which some tokens have no slot, over a cache that holds something already."""
    keys = jax.random.split(jax.random.key(0), 7)
    q, k, v = (jax.random.normal(key, (2, seq, n, head_dim), dtype)
               for key, n in zip(keys, (num_heads, num_kv_heads, num_kv_heads), strict=False))  # fmt: skip
    angles = jax.random.normal(keys[3], (2, seq, head_dim // 2)) * 9
    scales = tuple(1 + jax.random.normal(key, (head_dim,), dtype) / 4 for key in keys[4:6]) if has_norms else None
    sides = jax.random.normal(keys[6], (2, num_pages, 4, num_kv_heads, head_dim), dtype)
    cache = kv_cache.PagedCache((sides[0],), (sides[1],), kv_cache.init_paged(1, 2, 16, 1, 1, page_size=4).pages)
    positions = jnp.arange(seq) + jnp.array([[0], [-2]])
    return q, k, v, Rope(jnp.cos(angles), jnp.sin(angles)), scales, *sides, kv_cache.locate(append(cache), positions)


def append(cache):
    return kv_cache.append(cache, jnp.array([4, 9]))


def interpreted(q, k, v, rope, scales, keys, values, slots):
    flat = lambda x: x.reshape(-1, *x.shape[2:])  # noqa: E731
    qkv = flat(jnp.concatenate([q, k, v], axis=2))
    out, keys, values = triton_rotate.rotate_and_write(
        qkv, flat(rope.cos), flat(rope.sin), scales, keys, values, flat(slots.pages), flat(slots.offsets), eps=EPS, plt=plt,
        interpret=True)  # fmt: skip
    return out.reshape(q.shape), keys, values


@pytest.mark.skipif(plt is None, reason="this jax has no Pallas Triton backend")
@pytest.mark.parametrize("dtype, tolerance", [(jnp.float32, 1e-5), (jnp.bfloat16, 3e-2)], ids=["f32", "bf16"])
@pytest.mark.parametrize("has_norms", [True, False])
@pytest.mark.parametrize("num_heads, num_kv_heads, head_dim", [(6, 3, 32), (4, 4, 16), (8, 1, 128)])
def test_kernel_is_the_plain_route(num_heads, num_kv_heads, head_dim, has_norms, dtype, tolerance):
    x = inputs(dtype, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, has_norms=has_norms)
    assert 0 < np.sum(np.asarray(x[-1].pages) < 8) < 10  # some tokens are written, some are not
    for got, want in zip(interpreted(*x), rotary._by_xla(EPS, *x), strict=True):
        assert got.dtype == dtype
        np.testing.assert_allclose(np.asarray(got, np.float32), np.asarray(want, np.float32), atol=tolerance, rtol=tolerance)
    before, after = np.asarray(x[5], np.float32), np.asarray(interpreted(*x)[1], np.float32)
    assert np.sum(np.any(before != after, axis=(2, 3))) == np.sum(np.asarray(x[-1].pages) < 8)


def lowered(f, *arguments):
    mesh = AbstractMesh((), (), abstract_device=AbstractDevice("NVIDIA H200", 132, "gpu"))
    with jax.sharding.use_abstract_mesh(mesh), warnings.catch_warnings():
        warnings.simplefilter("error")
        return jax.jit(f).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.skipif(plt is None, reason="this jax has no Pallas Triton backend")
@pytest.mark.parametrize("has_norms", [True, False])
def test_the_kernel_is_chosen_lowers_and_has_a_gradient(has_norms):
    x = inputs(jnp.bfloat16, has_norms=has_norms)
    f = partial(rotary.rotate_and_write, eps=EPS)
    assert "gumbeljax_rotate" in lowered(f, *x) and "gumbeljax_rotate" not in lowered(partial(f, implementation="xla"), *x)

    def loss(f, *floats):
        return sum(jnp.sum(out.astype(jnp.float32) ** 2) for out in f(*floats, x[-1]))

    assert "gumbeljax_rotate" in lowered(jax.value_and_grad(partial(loss, f)), *x[:-1])
    odd = inputs(jnp.bfloat16, head_dim=24)
    assert "gumbeljax_rotate" not in lowered(f, *odd)


CONFIG = models.LlamaConfig(
    vocab=64, d_model=32, d_ff=48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, has_qk_norm=True, windows=(None, 3)
)


def test_one_row_runs_as_two_on_a_gpu(monkeypatch):
    """The same hidden states and cache, wherever the row's token stands."""
    model = models.Llama(CONFIG, rngs=nnx.Rngs(0))
    for cache in (model.init_cache(1, 8), kv_cache.append(model.init_paged_cache(1, 8, page_size=2), jnp.array([6]))):
        _, cache = model(jnp.array([[3, 1, 4, 1]]), jnp.arange(4)[None], cache)
        token, position = jnp.array([[5]]), jnp.array([[4]])
        h, plain = model(token, position, cache)
        with monkeypatch.context() as patch:
            patch.setattr(llama, "device_facts", lambda x: type("Facts", (), {"platform": "gpu"}))
            assert "2,32" in str(jax.make_jaxpr(model)(token, position, cache))
            h_gpu, gpu = model(token, position, cache)
        np.testing.assert_allclose(h_gpu, h, atol=1e-5)
        for a, b in zip(jax.tree.leaves(gpu), jax.tree.leaves(plain), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5)


def by_xla(model):
    model = nnx.merge(*nnx.split(model))
    for layer in model.layers:
        layer.self_attn.implementation = "xla"
    return model


def test_a_decode_step_lowers_for_a_gpu_with_both_kernels():
    model = models.Llama(CONFIG, jnp.bfloat16, rngs=nnx.Rngs(0))
    cache = kv_cache.append(model.init_paged_cache(3, 32), jnp.array([6, 6, 6]))
    one = jnp.ones((3, 1), jnp.int32)
    text = lowered(lambda *x: model(*x), one, one, cache)
    assert text.count("gumbeljax_rotate") >= 1 and text.count("gumbeljax_attention") >= 1
    assert "gumbeljax" not in lowered(lambda *x: by_xla(model)(*x), one, one, cache)


def test_a_model_on_a_mesh_runs_no_kernel_of_its_own():
    model = models.Llama(CONFIG, rngs=nnx.Rngs(0))
    mesh = jax.make_mesh((2,), ("x",), (AxisType.Auto,))
    cut = parallel.parallelize(model, mesh=mesh, axis_name="x")
    layers = nnx.merge(cut.decode_fn.graphdef, cut.params).layers
    assert [layer.self_attn.implementation for layer in layers] == ["xla", "xla"]
    assert [layer.self_attn.implementation for layer in model.layers] == [None, None]


@pytest.mark.gpu
@pytest.mark.parametrize("rows, seq", [(1, 1), (64, 1), (8, 16)])
def test_kernel_on_the_device(rows, seq):
    """Qwen3-1.7B's heads."""
    keys = jax.random.split(jax.random.key(0), 6)
    q, k, v = (jax.random.normal(key, (rows, seq, n, 128), jnp.bfloat16) for key, n in zip(keys, (16, 8, 8), strict=False))
    angles = jax.random.normal(keys[3], (rows, seq, 64))
    scales = tuple(1 + jax.random.normal(key, (128,), jnp.bfloat16) / 4 for key in keys[4:])
    cache = kv_cache.append(kv_cache.init_paged(1, rows, 64, 8, 128, jnp.bfloat16), jnp.full(rows, 40))
    slots = kv_cache.locate(cache, jnp.broadcast_to(jnp.arange(seq) + 17, (rows, seq)))
    x = q, k, v, Rope(jnp.cos(angles), jnp.sin(angles)), scales, cache.keys[0], cache.values[0], slots
    names = (None, "xla")
    got, want = (jax.jit(partial(rotary.rotate_and_write, eps=EPS, implementation=name))(*x) for name in names)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), atol=3e-2, rtol=3e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("is_paged", [True, False])
def test_a_model_on_the_device_with_both_kernels_and_without(rows, is_paged):
    """A prompt of 9, which also crosses the window of the second layer, then three steps: hidden states and what is cached."""
    model = models.Llama(CONFIG, jnp.bfloat16, rngs=nnx.Rngs(0))
    tokens = jax.random.randint(jax.random.key(1), (rows, 12), 0, CONFIG.vocab)

    def run(model):
        cache = model.init_paged_cache(rows, 16, page_size=4) if is_paged else model.init_cache(rows, 16)
        cache = kv_cache.over_paged(lambda cache: kv_cache.append(cache, jnp.full(rows, 12)), cache)
        step, hs = jax.jit(lambda *x: model(*x)), []
        for start, end in ((0, 9), (9, 10), (10, 11), (11, 12)):
            positions = jnp.broadcast_to(jnp.arange(start, end), (rows, end - start))
            h, cache = step(tokens[:, start:end], positions, cache)
            hs.append(h)
        return jnp.concatenate(hs, axis=1), cache.keys, cache.values

    for a, b in zip(jax.tree.leaves(run(model)), jax.tree.leaves(run(by_xla(model))), strict=True):
        a, b = (np.asarray(x, np.float32) for x in (a, b))
        assert np.isfinite(a).all() and np.abs(a - b).max() <= 0.05 * np.abs(b).max()
