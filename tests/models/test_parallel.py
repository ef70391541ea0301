"""Tensor-parallel decoding gives the text of one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from benchmarks.collectives import collectives
from gumbeljax import models
from gumbeljax.decode import generate
from gumbeljax.models.parallel import parallelize
from tests.models.golden import FOLDER, read_tiny, smollm2_path, write_folder
from tests.sharding import meshes

NEW = 24


def text(decode_fn, params, w, prompts, cache, **options):
    """Half of the rows greedy, half sampled."""
    t = np.resize([0.0, 1.0], len(prompts)).astype(np.float32)
    out = generate(decode_fn, params, w, prompts, cache, jax.random.key(0), max_new_tokens=NEW, temperature=t, **options)
    return out.tokens, out.state.cache


def alone(model, prompts):
    decode_fn, params = models.as_decode_fn(model)
    return text(decode_fn, params, model.head(), prompts, model.init_cache(len(prompts), prompts.shape[1] + NEW))[0]


def on_devices(model, prompts, parallel):
    cache = parallel.init_cache(len(prompts), prompts.shape[1] + NEW)
    return text(parallel.decode_fn, parallel.params, parallel.w, prompts, cache, sample_fn=parallel.sample_fn)


@pytest.fixture(scope="module")
def smollm2():
    """The model, a prompt twice, its text on one device."""
    loaded = models.load(smollm2_path())
    prompts = np.stack([np.load(FOLDER / "smollm2.npz")["prompt_0"]] * 2)
    return loaded.model, prompts, alone(loaded.model, prompts)


@pytest.mark.parametrize("devices, heads_are_cut", [(3, True), (2, False)])
def test_smollm2(smollm2, devices, heads_are_cut):
    """On 3 devices the heads are cut three ways; on 2, 9 heads stay whole, and MLP and head are cut."""
    model, prompts, want = smollm2
    parallel = parallelize(model, mesh=meshes.mesh_of((devices,), ("tp",)), axis_name="tp")
    layer = parallel.params["layers"][0]
    assert layer["self_attn"]["q_proj"]["kernel"].sharding.spec == (P(None, "tp") if heads_are_cut else P())
    assert layer["mlp"]["down_proj"]["kernel"].sharding.spec == P("tp")
    assert parallel.w.sharding.spec == P("tp") and parallel.w is parallel.params["embed_tokens"]["embedding"][...]
    tokens, cache = on_devices(model, prompts, parallel)
    np.testing.assert_array_equal(tokens, want)
    golden = np.load(FOLDER / "smollm2.npz")["tokens_0"]
    np.testing.assert_array_equal(tokens[0], golden[:NEW])
    assert cache.keys[0].sharding.spec == (P(None, None, "tp") if heads_are_cut else P())


@pytest.mark.parametrize("name, shape", [("tiny_llama", (1, 2)), ("tiny_qwen2", (2, 2)), ("tiny_qwen3", (1, 4))])
def test_biases_norms_and_heads_that_do_not_divide(name, shape, tmp_path):
    tiny = read_tiny(name)
    model = models.load(write_folder(tmp_path / "model", tiny)).model
    prompts = tiny.tokens[:, :9]
    mesh = meshes.mesh_of(shape)
    parallel = parallelize(model, mesh=mesh, axis_name="tp")
    assert parallel.w.shape[0] % (16 * shape[1]) == 0
    np.testing.assert_array_equal(on_devices(model, prompts, parallel)[0], alone(model, prompts))


def test_a_step_moves_sums_and_twenty_bytes(tmp_path):
    """Two sums a layer and one for the embedding, each of a hidden state; one small all-gather for the draw."""
    tiny = read_tiny("tiny_llama")
    model = models.load(write_folder(tmp_path / "model", tiny)).model
    config, batch, shards = model.config, 2, 2
    parallel = parallelize(model, mesh=meshes.mesh_of((shards,), ("tp",)), axis_name="tp")

    def step(params, w, tokens, positions, cache, key):
        h, cache = parallel.decode_fn(params, tokens, positions, cache)
        return parallel.sample_fn(h[:, 0], w, key), cache

    positions = jnp.zeros((batch, 1), jnp.int32)
    compiled = jax.jit(step, donate_argnums=4).lower(
        parallel.params, parallel.w, positions, positions, parallel.init_cache(batch, 8), jax.random.key(0)).compile()
    found = collectives(compiled)
    sums = [c for c in found if c.kind == "all-reduce"]
    assert len(sums) <= 2 * config.num_layers + 1 and all(c.num_bytes <= 4 * batch * config.d_model for c in sums)
    assert [c.num_bytes for c in found if c.kind != "all-reduce"] == [20 * batch * shards]


def test_the_mesh_must_have_auto_axes():
    model = models.Llama(models.LlamaConfig(32, 8, 16, 1, 2, 1, 4), rngs=nnx.Rngs(0))
    mesh = meshes.mesh_of((2,), ("tp",), AxisType.Explicit)
    with pytest.raises(ValueError, match=r"^axis_name must name auto axes of the mesh, got 'tp'"):
        parallelize(model, mesh=mesh, axis_name="tp")
