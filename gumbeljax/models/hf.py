"""Read Hugging Face checkpoint folders: ``config.json`` and ``*.safetensors``, one file or sharded with an index."""

import json
from collections.abc import Callable
from pathlib import Path

import jax  # noqa: F401  (brings ml_dtypes, which registers bfloat16 with NumPy: safetensors looks it up by name)
import numpy as np
from safetensors import SafetensorError, safe_open

from gumbeljax.models.config import LlamaConfig, from_hf


def read_json(path: Path) -> dict:
    """One JSON file of a checkpoint folder; a missing or broken one gets one sentence."""
    if not path.is_file():
        raise ValueError(f"{path.name} must be in the model folder {path.parent}, got none; download it again.")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} must be JSON, got: {error}; download it again.") from error


def read_config(folder: Path) -> LlamaConfig:
    """Configuration of a Hugging Face checkpoint folder."""
    fields = read_json(folder / "config.json")
    try:
        return from_hf(fields, str(folder / "config.json"))
    except KeyError as error:
        raise ValueError(
            f"{folder / 'config.json'} must have the entry {error.args[0]}, got none; download it again."
        ) from error


def reader(folder: Path) -> Callable[[str], np.ndarray]:
    """Tensors by name, each read from its shard when asked for."""
    index = folder / "model.safetensors.index.json"
    files = sorted(folder.glob("*.safetensors"))
    if index.is_file():
        shards = {name: folder / shard for name, shard in read_json(index)["weight_map"].items()}
        missing = sorted({str(shard.name) for shard in shards.values() if not shard.is_file()})
        if missing:
            raise ValueError(f"shard {missing[0]} named by {index} must be there, got none; download it again.")
    elif len(files) == 1:
        with _open(files[0]) as file:
            shards = dict.fromkeys(file.keys(), files[0])
    else:
        raise ValueError(
            f"the model folder {folder} must have one *.safetensors file or model.safetensors.index.json, "
            f"got {len(files)} files and no index; download it again."
        )
    # Kept open: opening a shard parses its header, and there are hundreds of tensors.
    opened = {}

    def read(name: str) -> np.ndarray:
        if name not in shards:
            raise ValueError(f"tensor {name} must be in {folder}, got none; download the checkpoint again.")
        shard = shards[name]
        if shard not in opened:
            opened[shard] = _open(shard)
        try:
            return opened[shard].get_tensor(name)
        except (SafetensorError, TypeError) as error:
            raise ValueError(f"tensor {name} in {shard} must be readable, got: {error}; download it again.") from error

    return read


def _open(path: Path):
    try:
        return safe_open(path, framework="numpy")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} must be a readable safetensors file, got: {error}; download it again.") from error
