"""A cut vocabulary on GPUs: every call lowers for one inside `shard_map`, and on several the tokens are those of one."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import gumbeljax
from gumbeljax import _compat
from gumbeljax.speculative import Law, verify, verify_chains, verify_coupled

DRAFT_LEN = 4


def verified(h, w, draft_h, draft_w, drafts, keys, *, axes):
    return verify(Law(h, w, temperature=0.7, axis_name=axes), Law(draft_h, draft_w, axis_name=axes), drafts, keys)


def chains(h, w, draft_h, draft_w, drafts, keys, *, axes):
    two = lambda x: jnp.stack([x, x], axis=1)  # noqa: E731
    return verify_chains(Law(two(h), w, axis_name=axes), Law(two(draft_h), draft_w, axis_name=axes), two(drafts), keys)


def filtered(h, w, draft_h, draft_w, drafts, keys, *, axes):
    return verify(Law(h, w, top_p=0.9, axis_name=axes), Law(draft_h, draft_w, axis_name=axes), drafts, keys)


def coupled(h, w, draft_h, draft_w, drafts, keys, *, axes):
    return verify_coupled(Law(h, w, axis_name=axes), drafts, keys)


def distinct(h, w, draft_h, draft_w, drafts, keys, *, axes):
    return gumbeljax.sample_with_log_probs(h[:, 0], w, keys[:, 0], num_samples=8, replace=False, axis_name=axes)


def plain(h, w, draft_h, draft_w, drafts, keys, *, axes):
    return gumbeljax.sample_with_log_probs(h[:, 0], w, keys[:, 0], axis_name=axes)


CALLS = {  # and the kernels that the lowered text names
    "verify": (verified, ("residual_race", "mosaic")), "chains": (chains, ("residual_race", "residual_mass", "mosaic")),
    "coupled": (coupled, ("mosaic",)), "distinct": (distinct, ("triton",)), "filters": (filtered, ()),
    "plain": (plain, ("mosaic",))}
ROWS = P("data")
SPECS = {"in_specs": (ROWS, P("tp"), ROWS, P("tp"), ROWS, ROWS), "out_specs": ROWS}


def arguments(rows, vocab, d_model=256, dtype=jnp.bfloat16):
    """Logits that are exact in any order of summation."""
    keys = jax.random.split(jax.random.key(0), 4)
    whole = lambda key, *shape: jax.random.randint(key, shape, -1, 2).astype(dtype)  # noqa: E731
    h, w, draft_w = whole(keys[0], rows, DRAFT_LEN + 1, d_model), whole(keys[1], vocab, d_model) / 8, whole(
        keys[2], vocab, d_model // 2) / 8
    draft_h = h[:, :-1, :d_model // 2]
    drafts = gumbeljax.sample(draft_h, draft_w, keys[3])
    return h, w, draft_h, draft_w, drafts, jax.random.split(jax.random.key(1), (rows, DRAFT_LEN + 1))


@pytest.mark.skipif(None in (_compat.pallas_triton(), _compat.pallas_mosaic()), reason="this jax lacks a Pallas backend")
@pytest.mark.parametrize("name", ["verify", "distinct"])
def test_lowers_for_gpus_inside_of_a_shard_map(name):
    call, kernels = CALLS[name]
    mesh = AbstractMesh((2, 4), ("data", "tp"), axis_types=(AxisType.Auto,) * 2,
                        abstract_device=AbstractDevice("NVIDIA H200", 132, "gpu"))
    shapes = jax.eval_shape(functools.partial(arguments, 16, 8192))
    with jax.sharding.use_abstract_mesh(mesh), warnings.catch_warnings():
        _compat.quiet_triton_deprecation()
        mapped = jax.jit(jax.shard_map(functools.partial(call, axes="tp"), **SPECS))
        text = mapped.trace(*shapes).lower(lowering_platforms=("cuda",)).as_text().lower()
    assert all(kernel in text for kernel in kernels)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CALLS)
def test_tokens_of_one_gpu(name):
    devices = jax.devices("gpu")
    shards = max((n for n in (8, 4, 2) if n <= len(devices)), default=1)
    if shards == 1:
        pytest.skip("one GPU is visible")
    call, _ = CALLS[name]
    mesh = jax.sharding.Mesh(np.array(devices[:shards]).reshape(1, shards), ("data", "tp"), axis_types=(AxisType.Auto,) * 2)
    arrays = arguments(24, 128 * 16 * 8)
    want = jax.jit(functools.partial(call, axes=None))(*arrays)
    got = jax.jit(jax.shard_map(functools.partial(call, axes="tp"), mesh=mesh, **SPECS))(*arrays)
    for a, b in zip(got, want, strict=True):
        compare = np.testing.assert_array_equal if a.dtype == jnp.int32 else functools.partial(
            np.testing.assert_allclose, rtol=1e-4, atol=1e-4)
        compare(np.asarray(a), np.asarray(b))
