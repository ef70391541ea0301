"""Tensor parallelism of the Llama family: which parameter is cut over the devices, and how.

The rules are those of every tensor-parallel transformer: what makes heads or MLP units is cut by its output, what takes
them by its input, so that a layer needs one sum over the devices behind attention and one behind the MLP; the
embedding and the head are cut over the vocabulary. XLA puts the sums in; `gumbeljax.sample_sharded` draws.

A part whose size the devices do not divide stays whole on each: SmolLM2's 9 heads and 3 key-value heads are cut over 3
devices, and on 2 its attention is replicated while MLP and head are cut.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from gumbeljax import _mesh
from gumbeljax.models import DecodeFn, as_decode_fn
from gumbeljax.models.llama import Llama
from gumbeljax.sharding import pad_vocab, sample_sharded
from pallas_kernels.noise import GROUP


class Parallel(NamedTuple):
    """A model on a mesh, as `gumbeljax.decode.generate` takes it."""

    decode_fn: DecodeFn
    params: nnx.State  # cut by `specs`
    w: jax.Array  # [padded vocab, d_model], cut over the vocabulary
    init_cache: Callable  # (batch, max_length) -> an empty cache, cut by heads
    sample_fn: Callable  # give it to generate(..., sample_fn=)


def specs(path: tuple, shape: tuple[int, ...], config, num_shards: int, axes: tuple[str, ...]) -> P:
    """The PartitionSpec of one parameter, by its path in the module, such as `layers.3.self_attn.q_proj.kernel`."""
    names = [str(getattr(part, "key", part)) for part in path]
    cut_heads = config.num_heads % num_shards == 0 and config.num_kv_heads % num_shards == 0
    cut_units = config.d_ff % num_shards == 0
    by_output = {"q_proj": cut_heads, "k_proj": cut_heads, "v_proj": cut_heads, "gate_proj": cut_units, "up_proj": cut_units}
    by_input = {"o_proj": cut_heads, "down_proj": cut_units}
    for name in names:
        if by_output.get(name):
            return P(*(None,) * (len(shape) - 1), axes)  # kernels [in, out] and biases [out]
        if by_input.get(name):
            return P(axes)
        if name in ("embed_tokens", "lm_head") and shape[0] % num_shards == 0:
            return P(axes)
    return P()


def parallelize(model: Llama, *, mesh: Mesh, axis_name: str | tuple[str, ...], **sample_options) -> Parallel:
    """Put a model on a mesh of auto axes, cut over `axis_name`.

    Args:
      model: whole, on any device. A tied table whose vocabulary needs padding is stored twice.
      mesh: axes of other names hold copies.
      axis_name: the mesh axes that cut heads, MLP units and vocabulary.
      sample_options: of `gumbeljax.sample`, the same for every draw.

    Returns:
      `Parallel`: give its parts to `gumbeljax.decode.generate`. The text is that of one device, up to near-ties within
      the rounding of sums whose order has changed.

    Raises:
      ValueError: a name that is no auto axis of the mesh.
    """
    axes = _mesh.names_of(axis_name)
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    for name in axes:
        if kinds.get(name) != jax.sharding.AxisType.Auto:
            raise ValueError(f"axis_name must name auto axes of the mesh, got {name!r} with axes {kinds}; make the mesh with "
                             "axis_types=(jax.sharding.AxisType.Auto,) * (number of axes).")
    num_shards = math.prod(mesh.shape[name] for name in axes)
    config = model.config
    cut = nnx.merge(*nnx.split(model))  # the same arrays
    for layer in cut.layers:
        layer.self_attn.implementation = "xla"  # XLA cuts attention over heads; a kernel it would run whole on each device
    decode_fn, params = as_decode_fn(cut)
    place = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))  # noqa: E731
    params = jax.tree.map_with_path(lambda path, x: place(x, specs(path, x.shape, config, num_shards, axes)), params)
    # Shards that start at multiples of 16 draw the tokens of one device; where the table needs no padding, it is the head.
    whole = config.vocab % (GROUP * num_shards) == 0
    w = nnx.merge(decode_fn.graphdef, params).head() if whole else place(pad_vocab(model.head(), num_shards), P(axes))
    by_heads = config.num_kv_heads % num_shards == 0 and config.num_heads % num_shards == 0
    cache_sharding = NamedSharding(mesh, P(None, None, axes) if by_heads else P())

    def init_cache(batch: int, max_length: int):
        return jax.jit(lambda: model.init_cache(batch, max_length), out_shardings=cache_sharding)()

    sample_fn = partial(sample_sharded, mesh=mesh, axis_name=axis_name, valid_vocab=config.vocab, **sample_options)
    return Parallel(decode_fn, params, w, init_cache, sample_fn)
