"""Verification on arrays whose types say how they are cut over explicit mesh axes: the same call, on the shards."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from gumbeljax import _checks, _keys, _mesh, _partition
from gumbeljax._partition import Layout
from gumbeljax.speculative.law import Law, spread


class Part(NamedTuple):
    """How one law is cut, and its constants. Hashable."""

    layout: Layout
    vocab_axis: int
    constants: tuple[tuple[str, Any], ...]


class Call(NamedTuple):
    """A call that shares one compiled function with its equals. `inner`: axes of a target's rows behind the batch."""

    fn: Callable
    parts: tuple[Part, ...]
    inner: int


def layouts_of(laws: list[Law], inner: int) -> list[Layout] | None:
    """How each law is cut, all with the rows of the first that is cut at all; None where no table or hidden state is."""
    found = []
    for law in laws:
        table = None if law.w is None else _checks.table_of(law.w)
        is_plain = table is None or np.ndim(table) != 2 or law.axis_name is not None or law.vocab_axis not in (0, 1, -1, -2)
        found.append(None if is_plain else _partition.explicit_layout(law.h, table, law.vocab_axis % 2))
    first = next((layout for layout in found if layout is not None), None)
    if first is None or min(np.ndim(law.h) for law in laws) < 1 + inner:
        return None
    batch, behind = first.rows[:-inner], first.rows[-inner:]
    if names := [name for entry in behind for name in ((entry,) if isinstance(entry, str) else entry or ())]:
        raise ValueError(f"h must be whole along its positions; got one that is cut over {_mesh.quoted(names)} there: gather "
                         "it with jax.reshard.")
    rows = (*batch, *(None,) * inner)
    return [Layout(first.mesh, first.axes, () if layout is None else layout.vocabulary, rows) for layout in found]


@functools.lru_cache(maxsize=512)
def _compiled(call: Call):
    """The jitted function of (laws as dicts, tokens, key, lens)."""
    first, inner = call.parts[0].layout, call.inner
    rows = P(*first.rows[:-inner])

    def law_of(arrays, part: Part, is_cut: bool) -> Law:
        return Law(**arrays, **dict(part.constants), axis_name=part.layout.vocabulary if is_cut else None)

    def verify(laws, tokens, key, lens, is_cut):
        made = [law_of(arrays, part, is_cut) for arrays, part in zip(laws, call.parts, strict=True)]
        return call.fn(made[0], made[1] if len(made) > 1 else None, tokens, key, lens)

    def specs_of(arrays, part: Part):
        options = {name: x for name, x in arrays.items() if name not in ("h", "w")}
        layout, shape = part.layout, arrays["h"].shape[:-1]
        width = arrays["h"].shape[-1]
        out = {"h": P(*layout.rows)}
        if "w" in arrays:
            width = _checks.table_of(arrays["w"]).shape[part.vocab_axis]
            spec = P(layout.vocabulary or None) if part.vocab_axis == 0 else P(None, layout.vocabulary or None)
            out["w"] = jax.tree.map(lambda _: spec, arrays["w"])
        _partition.check_axes(layout, shape, width)
        return out | _partition.Call(call.fn, layout, part.vocab_axis, ()).specs(options, shape, width)

    def run(laws, tokens, key, lens):
        # Bad arguments are told with the shapes that the user gave.
        jax.eval_shape(functools.partial(verify, is_cut=False), *_partition.unplaced((laws, tokens, key, lens)))
        shape = laws[0]["h"].shape[:-1]
        words = _keys.row_keys(key, (*shape[:len(shape) - inner], shape[-1]))  # of the places in the whole batch
        data = jax.numpy.stack(words, axis=-1).reshape(*shape[:len(shape) - inner], shape[-1], 2)
        key = jax.random.wrap_key_data(data, impl="threefry2x32")
        of_lens = jax.tree.map(lambda x: rows if x.ndim else P(), lens)
        in_specs = ([specs_of(arrays, part) for arrays, part in zip(laws, call.parts, strict=True)], rows, rows, of_lens)
        return _partition.on_shards(functools.partial(verify, is_cut=True), first, in_specs, rows, (laws, tokens, key, lens))

    return jax.jit(run)


def on_shards(fn: Callable, target: Law, draft: Law | None, tokens, key, lens, *, inner: int):
    """`fn(target, draft, tokens, key, lens)` on the shards that explicit types ask for, or None where none does.

    `inner`: 1 for targets `[*batch, positions]`, 2 for `[*batch, chains, positions]`.
    """
    laws = [law for law in (target, draft) if isinstance(law, Law)]
    layouts = layouts_of(laws, inner) if laws and isinstance(target, Law) else None
    if layouts is None:
        return None
    parts, arrays = [], []
    for law, layout in zip(laws, layouts, strict=True):
        h, vocab_axis = law.h, law.vocab_axis % 2
        width = np.shape(h)[-1] if law.w is None else _checks.table_of(law.w).shape[vocab_axis]
        shape = np.shape(h)[:-1]
        options = {name: spread(x, name, shape) for name, x in law._asdict().items() if name not in ("h", "w", "axis_name")}
        own, constants = _partition.separate(options, shape, width)
        own |= {"h": h} if law.w is None else {"h": h, "w": law.w}
        arrays.append(own)
        parts.append(Part(layout, vocab_axis, tuple(sorted(constants.items()))))
    call = Call(fn, tuple(parts), inner)
    tokens, lens = (x if x is None or hasattr(x, "dtype") else np.asarray(x) for x in (tokens, lens))
    return _compiled(call)(arrays, tokens, key, lens)
