"""Run a call on a mesh: how each argument is cut, and the `shard_map` around it."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from gumbeljax import _checks, _keys
from gumbeljax._mesh import explicit_axes, quoted
from gumbeljax.processing import LISTS, Processors, TokenCounts, checked, filters, numbers_of, token_lists

PER_TOKEN = ("logit_bias", "mask")  # options whose last axis is the vocabulary
STATIC = ("valid_vocab", "num_samples", "scale", "soft_cap")  # options that are constants, NumPy's numbers too
DECIDED = ("h", "w", "key", "axis_name", "row_offset")  # arguments that are not options of the call on a shard


class Layout(NamedTuple):
    """How a call is cut. Hashable."""

    mesh: Any  # a mesh, abstract or not
    axes: frozenset[str]  # its axes that become manual
    vocabulary: tuple[str, ...]  # axes that cut the vocabulary
    rows: tuple  # of a PartitionSpec, one entry for each axis of the batch


class Call(NamedTuple):
    """A call that shares one compiled function with its equals."""

    fn: Callable
    layout: Layout
    vocab_axis: int
    constants: tuple[tuple[str, Any], ...]

    def spec(self, name: str, shape: tuple[int, ...], batch_shape: tuple[int, ...], width: int):
        """How an option is cut: its first axes as the batch, the last as the vocabulary."""
        rows, vocabulary = self.layout.rows, self.layout.vocabulary or None
        if name in PER_TOKEN + TokenCounts._fields and shape[-1:] == (width,):
            return P(*rows, vocabulary) if len(shape) > 1 else P(vocabulary)
        behind = 1 if name in (*LISTS, "bias_values") else 0  # a list [n] is that of all rows, also when n is their number
        return P(*rows) if len(shape) == len(batch_shape) + behind and shape[:len(batch_shape)] == batch_shape else P()

    def specs(self, options, batch_shape: tuple[int, ...], width: int):
        """`spec` of every leaf of a tree of options, by its name."""
        name_of = lambda path: str(getattr(path[-1], "name", getattr(path[-1], "key", "")))  # noqa: E731
        return jax.tree.map_with_path(lambda path, x: self.spec(name_of(path), x.shape, batch_shape, width), options)


def explicit_layout(h, w, vocab_axis: int) -> Layout | None:
    """The layout that the types of h and w ask for, or None when neither is cut over an explicit axis."""
    cut = [x for x in (h, w) if any(explicit_axes(x, axis) for axis in range(np.ndim(x)))]
    if not cut:
        return None
    mesh = jax.typeof(cut[0]).sharding.mesh
    h_spec = tuple(jax.typeof(h).sharding.spec) if isinstance(h, jax.Array) else (None,) * np.ndim(h)
    w_spec = tuple(jax.typeof(w).sharding.spec) if isinstance(w, jax.Array) else (None, None)
    for name, entry in (("h", h_spec[-1]), ("w", w_spec[1 - vocab_axis])):
        if entry is not None:
            raise ValueError(f"{name} must be whole along d_model; got one that is cut over {entry!r} there: gather it with "
                             "jax.reshard.")
    of_vocabulary = w_spec[vocab_axis]
    vocabulary = (of_vocabulary,) if isinstance(of_vocabulary, str) else tuple(of_vocabulary or ())
    explicit = {name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Explicit}
    return Layout(mesh, frozenset(explicit), vocabulary, h_spec[:-1])


def check_axes(layout: Layout, batch_shape: tuple[int, ...], width: int) -> None:
    """Rows and vocabulary have mesh axes of their own, and are cut evenly."""
    of_rows = [(entry,) if isinstance(entry, str) else tuple(entry or ()) for entry in layout.rows]
    if both := set(layout.vocabulary).intersection(*[sum(of_rows, ())]):
        raise ValueError(f"h must not be cut over the mesh axes of the vocabulary; got {quoted(both)} for both: gather h with "
                         "jax.reshard, or cut its rows over another axis.")
    shards = int(np.prod([layout.mesh.shape[name] for name in layout.vocabulary], initial=1))
    if width % shards:
        raise ValueError(f"w must have a vocabulary that {shards} shards divide; got {width}: pad it once with "
                         "gumbeljax.sharding.pad_vocab and pass valid_vocab.")
    for size, names in zip(batch_shape, of_rows, strict=True):
        parts = int(np.prod([layout.mesh.shape[name] for name in names], initial=1))
        if size % parts:
            raise ValueError(f"h must have a number of rows that {parts} shards divide; got {size}: pad the batch.")


@functools.lru_cache(maxsize=512)
def _compiled(call: Call):
    """The jitted function of (h, w, key, row_offset, options)."""
    layout, constants = call.layout, dict(call.constants)

    def on_shard(h, w, key, options):
        key = {} if key is None else {"key": key}
        axis_name = {"axis_name": layout.vocabulary}
        return call.fn(h=h, w=w, **key, **options, **constants, **axis_name)

    def run(h, w, key, row_offset, options):
        batch_shape, width = h.shape[:-1], _checks.table_of(w).shape[call.vocab_axis]
        # Bad arguments are told with the shapes that the user gave.
        check = {k: v for k, v in constants.items() if k != "implementation"}
        third = {} if key is None else {"key": key}
        jax.eval_shape(lambda options: call.fn(**options, **check), unplaced({"h": h, "w": w, **third, **options}))
        check_axes(layout, batch_shape, width)
        w_spec = P(layout.vocabulary or None) if call.vocab_axis == 0 else P(None, layout.vocabulary or None)
        specs = (P(*layout.rows), jax.tree.map(lambda _: w_spec, w))  # the scales of a quantised w are cut with it
        if key is not None:
            # A row's key is that of its place in the whole batch.
            words = _keys.row_keys(key, batch_shape, row_offset)
            data = jax.numpy.stack(words, axis=-1).reshape(*batch_shape, 2)
            key = jax.random.wrap_key_data(data, impl="threefry2x32")
        in_specs = (*specs, None if key is None else P(*layout.rows), call.specs(options, batch_shape, width))
        return on_shards(on_shard, layout, in_specs, P(*layout.rows), (h, w, key, options))

    return jax.jit(run)


def unplaced(tree):
    """Shapes and dtypes of a tree, without shardings."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def on_shards(fn: Callable, layout: Layout, in_specs, out_specs, arguments: tuple):
    """A `shard_map` of the layout, whose arguments are put where it wants them. `in_specs` have a spec for every leaf."""
    kinds = dict(zip(layout.mesh.axis_names, layout.mesh.axis_types, strict=True))
    if any(kinds[name] == AxisType.Explicit for name in layout.axes):
        put = lambda x, spec: jax.reshard(x, NamedSharding(layout.mesh, spec))  # noqa: E731
        arguments = jax.tree.map(put, arguments, in_specs)
    return jax.shard_map(fn, mesh=layout.mesh, axis_names=layout.axes, in_specs=in_specs, out_specs=out_specs)(*arguments)


def as_operand(x, name: str):
    """An option as an array that is not yet on any device; None for a constant of the call."""
    if isinstance(x, np.generic):
        return None if name in STATIC else np.asarray(x)
    if hasattr(x, "dtype"):
        return x
    if name == "temperature" or isinstance(x, list | tuple):
        is_traced = any(map(_checks.is_traced, jax.tree.leaves(x)))
        return jax.numpy.asarray(x) if is_traced else np.asarray(x, np.float32 if name == "temperature" else None)
    return None


def separate(options: Mapping[str, Any], batch_shape: tuple[int, ...], width: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The options of a call on a table of `width` tokens as (arrays, constants); values that are known are checked now: on the
    shards they are not."""
    vocab, arrays, constants = _checks.vocabulary(options.get("valid_vocab"), width), {}, {}
    filters(options.get("top_k"), options.get("top_p"), options.get("min_p"), batch_shape)
    for name, value in options.items():
        if name in DECIDED or value is None:
            continue
        if name == "temperature":
            _checks.temperature(value, batch_shape)
        if name == "mask":
            value = _checks.checked_mask(value, name)
            if value.dtype != np.bool_:  # words do not end where shards do
                bits = _checks.unpacked_bits(jax.numpy.asarray(value), name, batch_shape, width)
                value = bits.reshape(*value.shape[:-1], -1)
        if name == "processors":
            numbers_of(checked(value), batch_shape)
        if name == "tokens" and not isinstance(value, jax.Array):
            value = np.asarray(_checks.token_ids(value, batch_shape)).reshape(batch_shape)
        if isinstance(value, Mapping) and name in PER_TOKEN:
            value = _checks.dense_bias(value, name, width, vocab)
        if isinstance(value, Processors):
            # Ids that are known are checked now, too.
            lists = {n: x for n in LISTS if (x := getattr(value, n)) is not None}
            lists = {n: np.asarray(x, np.int32) if isinstance(x, list | tuple) and not x else x for n, x in lists.items()}
            for n, x in lists.items():
                token_lists(x, n, batch_shape, vocab)
            fields = {n: x if x is None or isinstance(x, TokenCounts) else x if hasattr(x, "dtype") else np.asarray(x)
                      for n, x in (value._asdict() | lists).items()}
            arrays[name] = value._replace(**fields)
            continue
        operand = as_operand(value, name)
        if operand is None:
            constants[name] = value
        else:
            arrays[name] = operand
    return arrays, constants


def run(fn: Callable, layout: Layout, h, w, options: dict[str, Any]):
    """`fn(h, w, **options)` on the shards of a layout; `options` are those of the whole call."""
    vocab_axis, table = options.get("vocab_axis", 0) % 2, _checks.table_of(w)
    arrays, constants = separate(options, np.shape(h)[:-1], table.shape[vocab_axis])
    call = Call(fn, layout, vocab_axis, tuple(sorted(constants.items())))
    return _compiled(call)(h, w, options.get("key"), options.get("row_offset"), arrays)


def _ndim(x: Any, name: str) -> int:
    return 0 if x is None else np.ndim(x if hasattr(x, "dtype") else _checks.as_array(x, name))


def follows_shardings[F: Callable](fn: F) -> F:
    """A function of (h, w, ...) that runs on the shards when the type of h or w carries an explicit sharding."""
    signature = inspect.signature(fn)

    @functools.wraps(fn)
    def wrapper(*args, **kwargs):
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError:
            return fn(*args, **kwargs)  # whose message it is
        h, w, vocab_axis = given["h"], given["w"], given.get("vocab_axis", 0)
        is_plain = given.get("axis_name") is None and given.get("method") != "categorical" and isinstance(vocab_axis, int)
        table, name = _checks.table_of(w), "w.qvalue" if _checks.is_quantized(w) else "w"
        if is_plain and _ndim(h, "h") and _ndim(table, name) == 2 and vocab_axis in (0, 1, -1, -2):
            layout = explicit_layout(h, table, vocab_axis % 2)
            if layout is not None:
                return run(wrapper, layout, h, w, {k: v for k, v in given.items() if k not in ("h", "w")})
        return fn(*args, **kwargs)

    return wrapper  # pyright: ignore[reportReturnType]
