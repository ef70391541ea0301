"""What a Llama-family checkpoint says about itself, in one record."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

FAMILIES = {f"{name}ForCausalLM": name.lower() for name in ("Llama", "Mistral", "Qwen2", "Qwen3")}


class LlamaConfig(NamedTuple):
    """Shape and options of a decoder of the Llama family. Hashable: it may be a static argument."""

    vocab: int
    d_model: int
    d_ff: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float = 10_000.0
    rope_divisors: tuple[float, ...] | None = None  # long-context scaling: one divisor per rotary frequency
    rms_eps: float = 1e-5
    has_qkv_bias: bool = False  # Qwen2
    has_qk_norm: bool = False  # Qwen3
    is_tied: bool = True  # the head is the embedding table
    max_positions: int = 8192
    windows: tuple[int | None, ...] | None = None  # per layer: attention sees the last so many positions; None: all


def rope_frequencies(config: LlamaConfig) -> tuple[float, ...]:
    """Rotary frequencies ``theta^(-2i / head_dim)``, divided by the checkpoint's long-context divisors."""
    half = config.head_dim // 2
    frequencies = [config.rope_theta ** (-2 * i / config.head_dim) for i in range(half)]
    divisors = config.rope_divisors or (1.0,) * half
    return tuple(f / d for f, d in zip(frequencies, divisors, strict=True))


def llama3_divisors(
    head_dim: int, theta: float, factor: float, low_freq_factor: float, high_freq_factor: float, original: int
) -> tuple[float, ...]:
    """Divisors of the ``llama3`` rope scaling: long wavelengths by ``factor``, short ones not, a ramp in between.

    With ``wavelength = 2 pi / f`` and ``s = (original / wavelength - low) / (high - low)`` clipped to [0, 1] the scaled
    frequency is ``f * ((1 - s) / factor + s)``.

    Source: Llama 3.1 model card and reference code, Meta, 2024.
    """
    divisors = []
    for i in range(head_dim // 2):
        wavelength = 2 * math.pi * theta ** (2 * i / head_dim)
        ramp = (original / wavelength - low_freq_factor) / (high_freq_factor - low_freq_factor)
        ramp = min(max(ramp, 0.0), 1.0)
        divisors.append(1 / ((1 - ramp) / factor + ramp))
    return tuple(divisors)


def from_hf(fields: Mapping[str, Any], source: str = "config.json") -> LlamaConfig:
    """Read a Hugging Face ``config.json``.

    Args:
      fields: the parsed JSON.
      source: how to call the file in an error.

    Raises:
      ValueError: an architecture, activation, bias or rope scaling that this decoder does not compute.
    """
    names = fields.get("architectures") or [f"of model_type {fields.get('model_type')!r}"]
    if names[0] not in FAMILIES:
        raise ValueError(
            f"architectures in {source} must be one of {', '.join(FAMILIES)}, got {names[0]}; "
            "convert the checkpoint or pass a model of the Llama family."
        )
    family = FAMILIES[names[0]]
    head_dim = fields.get("head_dim") or fields["hidden_size"] // fields["num_attention_heads"]
    refused = {
        "hidden_act": fields.get("hidden_act", "silu") != "silu",
        "mlp_bias": bool(fields.get("mlp_bias")),
        "attention_bias": bool(fields.get("attention_bias")),
    }
    for name, is_refused in refused.items():
        if is_refused:
            raise ValueError(
                f"{name} in {source} must be its plain Llama value, got {fields[name]!r}; "
                "this decoder has silu and no MLP or output bias, so use another checkpoint."
            )
    # transformers 5 writes rope_parameters; older files have rope_theta and rope_scaling.
    rope = dict(fields.get("rope_parameters") or fields.get("rope_scaling") or {})
    theta = float(rope.get("rope_theta") or fields.get("rope_theta") or 10_000.0)
    return LlamaConfig(
        vocab=fields["vocab_size"],
        d_model=fields["hidden_size"],
        d_ff=fields["intermediate_size"],
        num_layers=fields["num_hidden_layers"],
        num_heads=fields["num_attention_heads"],
        num_kv_heads=fields.get("num_key_value_heads") or fields["num_attention_heads"],
        head_dim=head_dim,
        rope_theta=theta,
        rope_divisors=_hf_divisors(rope, head_dim, theta, source),
        rms_eps=float(fields.get("rms_norm_eps", 1e-6)),
        has_qkv_bias=family == "qwen2",
        has_qk_norm=family == "qwen3",
        is_tied=bool(fields.get("tie_word_embeddings", False)),
        max_positions=fields.get("max_position_embeddings", 8192),
        windows=_hf_windows(fields, family),
    )


def _hf_windows(fields: Mapping[str, Any], family: str) -> tuple[int | None, ...] | None:
    """Sliding windows by layer. Mistral slides in every layer; the Qwens only when told to, from ``max_window_layers`` on."""
    window, num_layers = fields.get("sliding_window"), fields["num_hidden_layers"]
    if window is None or family == "llama" or (family != "mistral" and not fields.get("use_sliding_window")):
        return None
    first = 0 if family == "mistral" else fields.get("max_window_layers", num_layers)
    kinds = fields.get("layer_types") or ["sliding_attention" if i >= first else "full_attention" for i in range(num_layers)]
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _hf_divisors(rope: Mapping[str, Any], head_dim: int, theta: float, source: str) -> tuple[float, ...] | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None
    if kind == "linear":
        return (float(rope["factor"]),) * (head_dim // 2)
    if kind == "llama3":
        return llama3_divisors(
            head_dim,
            theta,
            rope["factor"],
            rope["low_freq_factor"],
            rope["high_freq_factor"],
            rope["original_max_position_embeddings"],
        )
    raise ValueError(
        f"rope_type in {source} must be default, linear or llama3, got {kind!r}; use a checkpoint without that rope scaling."
    )
