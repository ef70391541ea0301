"""Fill a ``Llama`` with the tensors of a checkpoint, whatever file they come from."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from gumbeljax.models.config import LlamaConfig
from gumbeljax.models.llama import Llama


def hf_name(path: tuple) -> str:
    """Name of a parameter in a Hugging Face checkpoint, from its path in ``Llama``.

    >>> hf_name(("layers", 3, "self_attn", "q_proj", "kernel"))
    'model.layers.3.self_attn.q_proj.weight'
    >>> hf_name(("lm_head", "embedding"))
    'lm_head.weight'
    """
    *modules, leaf = (str(part) for part in path)
    prefix = "" if modules[0] == "lm_head" else "model."
    return prefix + ".".join(modules) + (".bias" if leaf == "bias" else ".weight")


def assemble(config: LlamaConfig, read_fn: Callable[[str], np.ndarray], dtype=jnp.float32) -> Llama:
    """A ``Llama`` whose parameters come from ``read_fn(hf_name)``.

    Args:
      config: the checkpoint's configuration.
      read_fn: returns one tensor by its Hugging Face name, matrices as ``(out, in)``; raises ``ValueError`` when the
        checkpoint lacks it.
      dtype: dtype of parameters, activations and cache.

    Raises:
      ValueError: a missing tensor, or one whose shape is not the configuration's.
    """
    # eval_shape: the random initialisation that loading would overwrite is never computed.
    graphdef, state = nnx.split(nnx.eval_shape(lambda: Llama(config, dtype, rngs=nnx.Rngs(0))))
    loaded = []
    for path, variable in nnx.to_flat_state(state):
        name = hf_name(path)
        array = read_fn(name)
        if path[-1] == "kernel":
            array = array.T
        if array.shape != variable.shape:
            raise ValueError(
                f"tensor {name} must have shape {variable.shape} (kernels as in, out), got {array.shape}; "
                "the checkpoint and its configuration do not belong together."
            )
        loaded.append((path, variable.replace(jax.device_put(np.ascontiguousarray(array, dtype=jnp.dtype(dtype))))))
    return nnx.merge(graphdef, nnx.from_flat_state(loaded))
