"""Products of few rows with what surrounds them: interpreted against XLA's route, chosen and lowered for CUDA."""

import warnings
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractDevice, AbstractMesh

from gumbeljax import _compat, kv_cache, models
from gumbeljax.models import projection
from pallas_kernels import triton_project
from pallas_kernels.triton_project import ProjectTiles

plt = _compat.pallas_triton()
EPS = 1e-6
pytestmark = pytest.mark.skipif(plt is None, reason="this jax has no Pallas Triton backend")


def inputs(rows, d_in, columns, *, has_norm, has_residual, dtype=jnp.bfloat16):
    keys = jax.random.split(jax.random.key(0), 3 + len(columns))
    x = 3 * jax.random.normal(keys[0], (rows, d_in), dtype)
    scale = 1 + jax.random.normal(keys[1], (d_in,), dtype) / 4 if has_norm else None
    residual = jax.random.normal(keys[2], (rows, sum(columns)), dtype) if has_residual else None
    return x, tuple(jax.random.normal(key, (d_in, n), dtype) / d_in**0.5 for key, n in zip(keys[3:], columns, strict=True)), \
        scale, residual  # fmt: skip


CALLS = {
    "three with a norm": ((64, 32, 32), True, False, False), "gated": ((96, 96), True, False, True),
    "residual": ((48,), False, True, False), "plain": ((64, 16), False, False, False),
}


@pytest.mark.parametrize("rows, d_in", [(1, 128), (2, 576), (3, 96), (4, 256)])
@pytest.mark.parametrize("name", CALLS)
def test_kernel_is_the_plain_route(name, rows, d_in):
    columns, has_norm, has_residual, is_gated = CALLS[name]
    x = inputs(rows, d_in, columns, has_norm=has_norm, has_residual=has_residual)
    assert triton_project.why_not(x[0], x[1], has_norm=has_norm) is None
    want = projection._by_xla(EPS, is_gated, *x)
    for tiles in (None, ProjectTiles(columns=16, d_in=32)):
        got = triton_project.project(*x, eps=EPS, is_gated=is_gated, plt=plt, tiles=tiles, interpret=True)
        assert got.dtype == want.dtype and got.shape == want.shape
        np.testing.assert_allclose(np.asarray(got, np.float32), np.asarray(want, np.float32), atol=3e-2, rtol=2e-2)


def test_many_rows_without_a_norm():
    x = inputs(50, 96, (32, 32), has_norm=False, has_residual=False)
    want = projection._by_xla(EPS, True, *x)
    got = triton_project.project(*x, is_gated=True, plt=plt, interpret=True)
    np.testing.assert_allclose(np.asarray(got, np.float32), np.asarray(want, np.float32), atol=3e-2, rtol=2e-2)


@pytest.mark.parametrize("x, columns, word", [
    ((65, 64), (32,), "64 rows"), ((1, 65), (32,), "evenly"), ((1, 64), (24,), "evenly"), ((1, 64), (32, 8), "evenly")])
def test_what_the_kernel_cannot_run(x, columns, word):
    weights = [jnp.zeros((x[1], n), jnp.bfloat16) for n in columns]
    assert word in triton_project.why_not(jnp.zeros(x, jnp.bfloat16), weights)
    assert "bfloat16" in triton_project.why_not(jnp.zeros((1, 64)), [jnp.zeros((64, 32))])
    five = jnp.zeros((5, 64), jnp.bfloat16), [jnp.zeros((64, 32), jnp.bfloat16)]
    assert triton_project.why_not(*five) is None and "4 rows" in triton_project.why_not(*five, has_norm=True)


def lowered(f, *arguments):
    mesh = AbstractMesh((), (), abstract_device=AbstractDevice("NVIDIA H200", 132, "gpu"))
    with jax.sharding.use_abstract_mesh(mesh), warnings.catch_warnings():
        warnings.simplefilter("error")
        return jax.jit(f).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


def model_of(dtype=jnp.bfloat16, **config):
    sizes = {"vocab": 64, "d_model": 64, "d_ff": 96, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
    return models.Llama(models.LlamaConfig(**sizes | {"has_qk_norm": True} | config), dtype, rngs=nnx.Rngs(0))


def step(model, rows, seq=1):
    cache = kv_cache.append(model.init_paged_cache(rows, 32), jnp.full(rows, 6))
    return lambda *x: model(*x), jnp.ones((rows, seq), jnp.int32), jnp.full((rows, seq), 5), cache


def test_a_model_runs_the_kernel_for_few_tokens_alone(monkeypatch):
    assert "gumbeljax_project" not in lowered(*step(model_of(), 1))
    monkeypatch.setattr(projection, "MOST_ROWS", 4)
    for rows, seq, count in ((1, 1, 8), (4, 1, 8), (1, 4, 8), (5, 1, 0), (2, 3, 0)):
        assert lowered(*step(model_of(), rows, seq)).count('name = "gumbeljax_project') == count
    assert "gumbeljax_project" not in lowered(*step(model_of(jnp.float32), 1))
    assert "gumbeljax_project" not in lowered(*step(model_of(has_qkv_bias=True), 1))
    by_xla = model_of()
    for layer in by_xla.layers:
        layer.self_attn.implementation = "xla"
    assert "gumbeljax_project" not in lowered(*step(by_xla, 1))


def test_it_has_a_gradient():
    columns, has_norm, has_residual, is_gated = CALLS["gated"]
    x = inputs(2, 64, columns, has_norm=has_norm, has_residual=has_residual)

    def loss(run, *x):
        return jnp.sum(run(EPS, is_gated, *x).astype(jnp.float32) ** 2)

    assert "gumbeljax_project" in lowered(jax.value_and_grad(partial(loss, projection._by_triton), argnums=(0, 1, 2)), *x)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("d_in, columns, has_norm, has_residual, is_gated", [
    (2048, (2048, 1024, 1024), True, False, False), (2048, (2048,), False, True, False),
    (2048, (6144, 6144), True, False, True), (6144, (2048,), False, True, False), (576, (576, 192, 192), True, False, False)])
def test_kernel_on_the_device(rows, d_in, columns, has_norm, has_residual, is_gated):
    x = inputs(rows, d_in, columns, has_norm=has_norm, has_residual=has_residual)
    got, want = (jax.jit(partial(f, EPS, is_gated))(*x) for f in (projection._by_triton, projection._by_xla))
    np.testing.assert_allclose(np.asarray(got, np.float32), np.asarray(want, np.float32), atol=3e-2, rtol=2e-2)
