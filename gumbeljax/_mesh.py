"""Mesh axes: which of them cut the vocabulary or the rows, and the all-gather of a call.

Inside `shard_map` the type of an array says over which mesh axes it varies (unless the user has switched that check off),
and outside of it an explicit sharding is part of the type. Both are read here, when a call is traced.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gumbeljax._compat import varying
from gumbeljax._typing import Array

AxisName = str | tuple[str, ...]


def names_of(axis_name, argument: str = "axis_name") -> tuple[str, ...]:
    """One name or several as a tuple; None is none."""
    if axis_name is None:
        return ()
    names = (axis_name,) if isinstance(axis_name, str) else axis_name
    if not isinstance(names, tuple | list) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"{argument} must be the name of a mesh axis or a tuple of names; got {axis_name!r}: pass names.")
    if len(set(names)) != len(names):
        raise ValueError(f"{argument} must name a mesh axis once; got {axis_name!r}: leave the second out.")
    return tuple(names)


def quoted(names) -> str:
    """Names as the messages print them."""
    return ", ".join(map(repr, sorted(names)))


def explicit_axes(x, axis: int) -> tuple[str, ...]:
    """The explicit mesh axes that cut an axis of x, as its type says."""
    sharding = jax.typeof(x).sharding if isinstance(x, jax.Array) else None
    if sharding is None or not sharding.spec:
        return ()
    kinds = dict(zip(sharding.mesh.axis_names, sharding.mesh.axis_types, strict=True))
    return tuple(name for name in names_of(sharding.spec[axis]) if kinds[name] == jax.sharding.AxisType.Explicit)


def is_checked(axis: str) -> bool:
    """Whether types say what varies over this axis: inside a `shard_map` that was not given `check_vma=False`."""
    return axis in varying(lax.axis_index(axis))


def _is_bound(axis: str) -> bool:
    try:
        lax.axis_size(axis)
    except NameError:
        return False
    return True


def vocabulary_axes(axis_name: AxisName | None, w, **same) -> tuple[str, ...]:
    """Checked mesh axes over which `w` is cut; `same`: arguments that every shard of the vocabulary must share."""
    if axis_name is None:
        if axes := varying(w):
            raise ValueError(f"axis_name must name the mesh axes that cut the vocabulary; got None with a w that varies over "
                             f"{quoted(axes)}: pass axis_name, or axis_name=() if every shard holds a whole table.")
        return ()
    axes = names_of(axis_name)
    for axis in axes:
        if not _is_bound(axis):
            raise ValueError(f"axis_name must name axes of a shard_map around the call; got {axis!r}, which is none: call "
                             "gumbeljax.sample_sharded, or put the call into jax.shard_map.")
        if not is_checked(axis):
            continue
        if axis not in varying(w) and lax.axis_size(axis) > 1:
            raise ValueError(f"w must be cut over axis_name; got one that is the same all over {axis!r}: shard it in in_specs, "
                             f"or leave {axis!r} out of axis_name.")
        for name, x in same.items():
            if axis in varying(x):
                raise ValueError(f"{name} must be the same on all shards of the vocabulary; got one that varies over {axis!r}: "
                                 "give it no such axis in in_specs, or gather it with to='invarying'.")
    return axes


def check_rows(h, key, row_offset, axes: tuple[str, ...], way_out: str | None = None) -> None:
    """Refuses to draw with the same noise on two shards of the rows, and with two noises in one row; `axes` cut the
    vocabulary. `way_out`: the keys that would do, where there is no row_offset. An h of one axis is one row, whose own key it
    may be where types do not say."""
    if wrong := varying(key) & set(axes):
        raise ValueError(f"key must be the same on all shards of the vocabulary; got one that varies over {quoted(wrong)}: "
                         "give it no such axis in in_specs, since the noise of every token is its own already.")
    manual = [a for a in jax.sharding.get_abstract_mesh().manual_axes if a not in axes and lax.axis_size(a) > 1]
    if all(map(is_checked, manual)):
        cut = varying(h) - set(axes) - varying(key) - (varying(row_offset) if row_offset is not None else frozenset())
    else:  # types say nothing: any other axis may cut the rows
        is_one = row_offset is None and h.ndim > 1 and hasattr(key, "dtype") and key.ndim == (0 if is_typed(key) else 1)
        cut = frozenset(manual if is_one else ())
    if cut:
        axis = sorted(cut)[0]
        offset = f"one key per row, sharded like h, or row_offset=jax.lax.axis_index({axis!r}) * (rows of a shard)"
        raise ValueError(f"key must differ between the shards of the rows; got the same one all over {quoted(cut)}: pass "
                         f"{way_out or offset}.")


def is_typed(key) -> bool:
    """Whether a key is a typed one, not raw words."""
    return jnp.issubdtype(key.dtype, jax.dtypes.prng_key)


def vary(tree, axes: tuple[str, ...] = ()):
    """Every leaf typed as varying over all the axes that any leaf varies over, and over `axes`."""
    leaves = jax.tree.leaves(tree)
    union = frozenset(a for a in axes if is_checked(a)).union(*map(varying, leaves))

    def cast(x):
        missing = tuple(sorted(union - varying(x)))
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(cast, tree)


def num_shards(axes: tuple[str, ...]) -> int:
    """How many pieces the mesh axes cut a vocabulary into."""
    return math.prod(lax.axis_size(axis) for axis in axes)


def first_id(axes: tuple[str, ...], width: int) -> Array:
    """Id of this shard's first token, int32; several axes count with the last one fastest, as in a PartitionSpec."""
    return (lax.axis_index(axes) * width).astype(jnp.int32)


def gather(values: tuple[Array, ...], axes: tuple[str, ...]) -> tuple[Array, ...]:
    """Every shard's numbers of 32 bits, stacked along a new axis 0: one all-gather, and the bits arrive as they left.

    Floats alone are sent as floats, so that they can be differentiated; ids never are.
    """
    as_is = all(x.dtype == jnp.float32 for x in values)
    packed = jnp.stack([x if as_is else lax.bitcast_convert_type(x, jnp.int32) for x in values])
    is_manual = set(axes) <= set(jax.sharding.get_abstract_mesh().manual_axes)  # else `vmap` has named the axis
    gathered = jnp.moveaxis(lax.all_gather(packed, axes, to="invarying" if is_manual else "varying"), 1, 0)
    return tuple(x if as_is else lax.bitcast_convert_type(x, v.dtype) for x, v in zip(gathered, values, strict=True))


def gather_all(tree, axes: tuple[str, ...]):
    """As `gather`, for the leaves `[rows]` and `[n, rows]` of a tree, whatever their n: still one all-gather."""
    leaves, shape = jax.tree.flatten(tree)
    words = [lax.bitcast_convert_type(x, jnp.int32).reshape(-1, x.shape[-1]) for x in leaves]
    heard = gather((jnp.concatenate(words),), axes)[0]
    ends = np.cumsum([len(x) for x in words])
    parts = jnp.split(heard, ends[:-1], axis=1)
    return jax.tree.unflatten(shape, [lax.bitcast_convert_type(part, x.dtype).reshape(-1, *x.shape)
                                      for part, x in zip(parts, leaves, strict=True)])
