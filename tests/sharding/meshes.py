"""Meshes of virtual CPU devices, and the three ways to draw on them."""

import functools

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from gumbeljax import sharding


def mesh_of(shape, names=("data", "tp"), kind=AxisType.Auto):
    """A mesh over the first devices of this process."""
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(shape), devices=jax.devices()[:int(np.prod(shape))])


def table_spec(axes, vocab_axis):
    return P(axes) if vocab_axis == 0 else P(None, axes)


def manual(fn, mesh, *, axis_name="tp", data_axis=None, vocab_axis=0, check_vma=True, **options):
    """`fn(h, w, third)` in a shard_map; `third` (keys or tokens) has the shape of the batch."""
    call = functools.partial(fn, axis_name=axis_name, vocab_axis=vocab_axis, **options)
    rows = P(data_axis)
    return jax.jit(jax.shard_map(lambda *arguments: call(*arguments), mesh=mesh, check_vma=check_vma, out_specs=rows,
                                 in_specs=(rows, table_spec(axis_name, vocab_axis), rows)))


def explicit(fn, mesh, *, axis_name="tp", data_axis=None, vocab_axis=0, **options):
    """`fn(h, w, third)` on arrays whose types carry their sharding; `mesh` may be of auto axes."""
    mesh = jax.sharding.Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Explicit,) * len(mesh.axis_names))

    def call(h, w, third):
        h = jax.device_put(h, NamedSharding(mesh, P(data_axis)))
        w = jax.device_put(w, NamedSharding(mesh, table_spec(axis_name, vocab_axis)))
        return jax.jit(functools.partial(fn, vocab_axis=vocab_axis, **options))(h, w, third)

    return call


def auto(fn, mesh, *, axis_name="tp", data_axis=None, vocab_axis=0, **options):
    """`fn(h, w, third)` by `on_mesh`, inside jit."""
    call = sharding.on_mesh(fn, mesh=mesh, axis_name=axis_name, data_axis=data_axis)
    return jax.jit(functools.partial(call, vocab_axis=vocab_axis, **options))


WAYS = {"manual": manual, "explicit": explicit, "auto": auto}
