"""Under 64-bit mode and forbidden rank promotion; lowered for GPUs; one trace for values that change."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

import gumbeljax
from gumbeljax import _compat, smc
from gumbeljax.speculative import (
    Law,
    acceptance,
    chains_acceptance,
    coupled_acceptance,
    position_keys,
    verify,
    verify_chains,
    verify_coupled,
)  # fmt: skip

H, W = jax.random.normal(jax.random.key(0), (3, 4, 16)), jax.random.normal(jax.random.key(1), (40, 16))


def test_64_bit_mode_and_no_rank_promotion():
    with jax.enable_x64(True), jax.numpy_rank_promotion("raise"):
        keys = position_keys(jax.random.split(jax.random.key(0), 3), 5, 4)
        drafted = gumbeljax.sample(H[:, :3], W, keys[:, :3])
        two = lambda x: jnp.stack([x, x], 1)  # noqa: E731
        q = Law(H[:, :3], W, temperature=np.array([1.0, 0.5, 2.0]))
        for options in ({}, {"top_p": 0.8}):
            p = Law(H, W, logit_bias=np.zeros(40), **options)
            outs = [verify(p, q, drafted, keys), verify(p, None, drafted, keys), verify_coupled(p, drafted, keys),
                    verify_chains(p._replace(h=two(H)), Law(two(H[:, :3]), W), two(drafted), keys)]
            for out in outs:
                assert [x.dtype.name for x in out[:3]] == ["int32", "int32", "float32"]
        a, b = jnp.zeros((2, 40)), jnp.ones((2, 40)).at[0, 0].set(3)
        for f in (acceptance, coupled_acceptance, lambda a, b: chains_acceptance(a, b, 2)):
            assert f(a, b).dtype == jnp.float32
        state = smc.init({"x": jnp.zeros((2, 8), jnp.int32)}, jnp.zeros((2, 8)), mask=jnp.arange(8) < 5)

        def step(state, key):
            return smc.step(state, key, propose_fn=lambda p, keys: (p, jnp.zeros(keys.shape)),
                            log_weight_fn=lambda p, aux: aux - jnp.broadcast_to(jnp.arange(8.0), (2, 8)))

        last, info = jax.lax.scan(step, state, jax.random.split(jax.random.key(0), 3))  # the carry keeps its types
        assert info.ancestors.dtype == jnp.int32 and info.resampled.any() and smc.choose(last, jax.random.key(1)).shape == (2,)
        cut = smc.cut_tokens(jnp.zeros((2, 3), jnp.int32), jnp.zeros(2, bool), 2, eos=1)
        assert smc.log_weight(H[:2, 0, :3], H[:2, 1, :3], kept=cut.kept).dtype == jnp.float32


@pytest.mark.parametrize("rows, calls", [(2, "triton"), (16, "mosaic")])
def test_lowers_for_a_gpu(rows, calls):
    """The passes over each table are the kernels of `sample` and `log_prob`, with the streams of verification."""
    if (_compat.pallas_triton() if calls == "triton" else _compat.pallas_mosaic()) is None:
        pytest.skip("this jax has no such backend")
    shape = lambda *s: jax.ShapeDtypeStruct(s, jnp.bfloat16)  # noqa: E731

    def run(h, w, draft_h, draft_w, drafted, key):
        return verify(Law(h, w), Law(draft_h, draft_w), drafted, key)

    mesh = AbstractMesh((), (), abstract_device=AbstractDevice("NVIDIA H200", 132, "gpu"))
    with jax.sharding.use_abstract_mesh(mesh), warnings.catch_warnings():
        _compat.quiet_triton_deprecation()
        lowered = jax.jit(run).trace(
            shape(rows, 5, 128), shape(4096, 128), shape(rows, 4, 64), shape(4096, 64),
            jax.ShapeDtypeStruct((rows, 4), jnp.int32), jax.eval_shape(lambda: jax.random.key(0))
        ).lower(lowering_platforms=("cuda",))
    assert calls in lowered.as_text().lower()


def test_values_do_not_retrace():
    traces = []

    @jax.jit
    def run(h, temperature, lens, mask, key):
        traces.append(1)
        return verify(Law(h, W, temperature=temperature, mask=mask), None, jnp.zeros((3, 3), jnp.int32), key, draft_lens=lens)

    for i in range(3):
        run(H, jnp.float32(i), jnp.full(3, i), jnp.arange(40) >= i, jax.random.key(i))
    assert len(traces) == 1
