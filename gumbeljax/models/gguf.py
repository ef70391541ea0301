"""Read GGUF files: configuration, tensors (dequantised), tokenizer metadata. The ``gguf`` package does the parsing."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from gumbeljax.models.config import LlamaConfig

FAMILIES = ("llama", "qwen2", "qwen3")

_TENSORS = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def gguf_name(name: str) -> str:
    """GGUF name of a tensor, from its Hugging Face name.

    >>> gguf_name("model.layers.3.self_attn.q_proj.weight")
    'blk.3.attn_q.weight'
    >>> gguf_name("model.norm.weight")
    'output_norm.weight'
    """
    module, _, leaf = name.rpartition(".")
    if module.startswith("model.layers."):
        _, _, index, module = module.split(".", 3)
        return f"blk.{index}.{_TENSORS[module]}.{leaf}"
    return f"{_TENSORS[module]}.{leaf}"


def unpermute(array: np.ndarray, num_heads: int) -> np.ndarray:
    """Undo the row order of q and k in GGUF files of architecture "llama".

    Those files pair rotary dimensions (2i, 2i + 1); this decoder, like Hugging Face, pairs (i, i + head_dim / 2).
    """
    pairs = array.reshape(num_heads, -1, 2, *array.shape[1:])
    return pairs.swapaxes(1, 2).reshape(array.shape)


class GGUFFile:
    """An open GGUF file: ``fields`` by key, ``tensors`` by name."""

    def __init__(self, path: Path):
        try:
            reader = gguf.GGUFReader(path)
        except (ValueError, IndexError, KeyError) as error:
            raise ValueError(f"model {path} must be a readable GGUF file, got: {error}; download it again.") from error
        self.path = path
        self._reader = reader
        self.tensors = {tensor.name: tensor for tensor in reader.tensors}
        self.family = self.get("general.architecture")

    def get(self, key: str, default: Any = None) -> Any:
        field = self._reader.get_field(key)
        return default if field is None else field.contents()

    def need(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise ValueError(f"metadata {key} must be in {self.path.name}, got none; convert the checkpoint again.")
        return value

    def tensor(self, name: str) -> np.ndarray:
        if name not in self.tensors:
            raise ValueError(f"tensor {name} must be in {self.path.name}, got none; convert the checkpoint again.")
        tensor = self.tensors[name]
        try:
            array = gguf.dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            raise ValueError(
                f"tensor {name} in {self.path.name} must have a type that the gguf package can dequantise, "
                f"got {tensor.tensor_type.name}; use a Q4_K, Q8_0, F16 or BF16 file."
            ) from error
        return array.reshape(tuple(reversed(tensor.shape.tolist())))


def read_config(file: GGUFFile) -> LlamaConfig:
    """Configuration of a GGUF file of the Llama family."""
    family = file.family
    if family not in FAMILIES:
        raise ValueError(
            f"general.architecture in {file.path.name} must be one of {', '.join(FAMILIES)}, got {family!r}; "
            "pass a model of the Llama family."
        )
    if file.get(f"{family}.expert_count", 0):
        raise ValueError(
            f"{family}.expert_count in {file.path.name} must be 0, got {file.get(f'{family}.expert_count')}; "
            "mixtures of experts are not supported, so pass a dense model."
        )
    d_model, num_heads = file.need(f"{family}.embedding_length"), file.need(f"{family}.attention.head_count")
    head_dim = file.get(f"{family}.attention.key_length") or d_model // num_heads
    if file.get(f"{family}.rope.dimension_count", head_dim) != head_dim:
        raise ValueError(
            f"{family}.rope.dimension_count in {file.path.name} must equal the head size {head_dim}, "
            f"got {file.get(f'{family}.rope.dimension_count')}; partial rotary embeddings are not supported."
        )
    return LlamaConfig(
        vocab=int(file.tensors["token_embd.weight"].shape[1]) if "token_embd.weight" in file.tensors else 0,
        d_model=d_model,
        d_ff=file.need(f"{family}.feed_forward_length"),
        num_layers=file.need(f"{family}.block_count"),
        num_heads=num_heads,
        num_kv_heads=file.get(f"{family}.attention.head_count_kv") or num_heads,
        head_dim=head_dim,
        rope_theta=float(file.get(f"{family}.rope.freq_base", 10_000.0)),
        rope_divisors=_divisors(file, head_dim),
        rms_eps=float(file.need(f"{family}.attention.layer_norm_rms_epsilon")),
        has_qkv_bias=family == "qwen2",
        has_qk_norm=family == "qwen3",
        is_tied="output.weight" not in file.tensors,
        max_positions=file.get(f"{family}.context_length", 8192),
    )


def _divisors(file: GGUFFile, head_dim: int) -> tuple[float, ...] | None:
    # Converters of Llama 3.1 and later store the divisors of their rope scaling as a tensor.
    if "rope_freqs.weight" in file.tensors:
        return tuple(file.tensor("rope_freqs.weight").astype(float).tolist())
    kind = file.get(f"{file.family}.rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind == "linear":
        return (float(file.need(f"{file.family}.rope.scaling.factor")),) * (head_dim // 2)
    raise ValueError(
        f"{file.family}.rope.scaling.type in {file.path.name} must be none or linear, got {kind!r}; "
        "use a checkpoint without that rope scaling."
    )


def reader(file: GGUFFile, config: LlamaConfig) -> Callable[[str], np.ndarray]:
    """Tensors by Hugging Face name, as ``assemble`` wants them."""

    def read(name: str) -> np.ndarray:
        array = file.tensor(gguf_name(name))
        if file.family == "llama" and ".q_proj." in name:
            return unpermute(array, config.num_heads)
        if file.family == "llama" and ".k_proj." in name:
            return unpermute(array, config.num_kv_heads)
        return array

    return read
