"""How the kernels of `triton_filtered` read and write their rows."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import noise
from pallas_kernels.kept import Filters
from pallas_kernels.logits import Elementwise, model_logits, processed_logits
from pallas_kernels.triton_prefix import Row
from pallas_kernels.triton_shapes import LANES, Inputs, Shape


def split(refs, trees):
    """The flat list of refs as these structures, in turn."""
    refs, out = list(refs), []
    for tree in trees:
        out.append(jax.tree.unflatten(tree, refs[:tree.num_leaves]))
        refs = refs[tree.num_leaves:]
    return out


def tokens_at(shape: Shape, refs: Inputs, row, ids, exists):
    """(model logits, processed logits) of token ids of one row, of any shape; -inf where they do not `exist`.

    The ids are all in the vocabulary: with a mask, and a predicate for each of its words, one load waits for another.
    """
    raw, *dense = (shape.plt.load(ref.at[ids] if len(ref.shape) == 1 else ref.at[row, ids]) for ref in (refs.raw, *refs.dense))
    if not shape.dense and shape.scale is None and shape.soft_cap is None:
        x = jnp.where(exists, raw, -jnp.inf)
        return x, x
    dense = (x != 0 if x.dtype == jnp.int8 else x for x in dense)
    own = Elementwise(**dict(zip(shape.dense, dense, strict=True)))
    model = model_logits(raw, shape.scale, shape.soft_cap, own.weight_scale)
    return processed_logits(model, Elementwise(), exists), processed_logits(model, own, exists)


def ids_of(shape: Shape, groups, is_there):
    """(ids, whether they exist) of groups `[n]`, each `[n, 16]`; the ids are all in the vocabulary."""
    ids = noise.GROUP * groups[:, None] + lax.broadcasted_iota(jnp.int32, (1, noise.GROUP), 1)
    exists = jnp.broadcast_to(is_there[:, None], ids.shape)
    if shape.vocab % noise.GROUP:
        exists &= ids < shape.vocab
        ids = jnp.minimum(ids, shape.vocab - 1)
    return ids, exists


def tokens_of(shape: Shape, refs: Inputs, row, groups, is_there):
    """(ids, model logits, processed logits) of groups `[n]` of the vocabulary, each `[n, 16]`; -inf where not `is_there`."""
    ids, exists = ids_of(shape, groups, is_there)
    return ids, *tokens_at(shape, refs, row, ids, exists)


def groups_from(start, size: int, number: int):
    """(groups `[size]`, which of them to look at): those from `start` on. The last few of a row come with some before them, so
    that reads need neither a mask nor more than one address."""
    groups = lax.broadcasted_iota(jnp.int32, (size,), 0)
    if number < size:
        return jnp.minimum(groups, number - 1), groups < number
    groups += jnp.minimum(start, number - size)
    return groups, groups >= start


def listed_ids(shape: Shape, ref, row, places, number):
    """The first `number` ids of a list, `[rows, n]`, at some places; 0 from there on. Reads without a mask, too."""
    is_there = places < number
    return jnp.where(is_there, shape.plt.load(ref.at[row, jnp.where(is_there, places, 0)]), 0)


def block_of(shape: Shape, program, rows: int):
    """(row, block, its groups, which of them to look at), the last blocks of all rows first: the product has just written them,
    some may still be in the L2."""
    block = shape.num_blocks - 1 - lax.div(program, jnp.int32(rows))
    return lax.rem(program, jnp.int32(rows)), block, *groups_from(block * shape.block, shape.block, shape.num_groups)


def row_of(shape: Shape, refs: Inputs, row, top: Any = None, total: Any = None) -> Row:
    """Loads what is given of a row; `top` and `total` are of its logits, once they are known."""
    word = lambda i: shape.plt.load(refs.by_row.at[jnp.int32(i), row])  # noqa: E731
    first = 2 + shape.num_keys
    filters = {name: lax.bitcast_convert_type(word(first + i), jnp.int32 if name == "top_k" else jnp.float32)
               for i, name in enumerate(shape.filters)}
    t = lax.bitcast_convert_type(word(0), jnp.float32)
    return Row(tuple(word(2 + i) for i in range(shape.num_keys)), t, top, total, *map(filters.get, Filters._fields))


def put(shape: Shape, refs, where, values):
    """Stores scalars."""
    jax.tree.map(lambda ref, value: shape.plt.store(ref.at[where], value), refs, values)


def column_load(shape: Shape, ref, row, other):
    """`[next power of 2]`: the column of a row in `[blocks, rows]`."""
    size = ref.shape[0]
    place = lax.broadcasted_iota(jnp.int32, (pl.next_power_of_2(size),), 0)
    return shape.plt.load(ref.at[place, row], mask=place < size, other=other)


def spread_iota(size: int):
    """Tiles `[n, LANES]`: 0, 1, ... to at least `size`. A thread has a column, and adds it up alone. Two tiles, whose sizes are
    powers of two, often hold fewer numbers than one."""
    whole = pl.next_power_of_2(size)
    first = whole // 2
    rest = max(LANES, pl.next_power_of_2(max(size - first, 1)))
    sizes = (whole,) if first + rest >= whole else (first, rest)

    def tile(start, size):
        lanes = min(LANES, size)
        row, lane = (lax.broadcasted_iota(jnp.int32, (size // lanes, lanes), axis) for axis in range(2))
        return start + row * lanes + lane

    return [tile(*x) for x in zip((0, first), sizes, strict=False)]


def spread_load(shape: Shape, ref, row, size: int, other):
    """The first `size` entries of a row, in tiles like those of `spread_iota`.

    To each place its sign is added, 0: Triton cannot tell, gives a thread no four neighbours, and need not move them later.
    """
    apart = lambda place: place + (place >> 31)  # noqa: E731
    return [shape.plt.load(ref.at[row, apart(place)], mask=place < size, other=other) for place in spread_iota(size)]


def scatter(shape: Shape, ref, row, places, values, mask):
    """Stores values at places of a row. The interpreter stores what is there also where the mask is false: so, nowhere."""
    places = jnp.where(mask, places, ref.shape[1]) if shape.interpret else places
    shape.plt.store(ref.at[row, places], values, mask=mask)


def list_down(shape: Shape, ref, row, is_listed, most: int, places_of):
    """Writes down the groups, in tiles, that are to be listed, as many as `most`, where `places_of` puts them; how many they
    are."""
    places, number = places_of([x.astype(jnp.int32) for x in is_listed])
    for place, ids, is_in in zip(places, spread_iota(shape.num_groups), is_listed, strict=True):
        scatter(shape, ref, row, place, ids, is_in & (place < most))
    barrier(shape)
    return number


def fold_listed(shape: Shape, refs: Inputs, ref, row, number, f, init):
    """`carry = f(carry, logits, ids, groups)` over blocks `[groups, 16]` of the groups that are listed, as many as `number`.

    The tokens of the next block are on their way meanwhile, and which groups the one after it has.
    """
    size = shape.streamed
    place = lax.broadcasted_iota(jnp.int32, (size,), 0)
    groups_at = lambda places: listed_ids(shape, ref, row, places, number)  # noqa: E731
    logits_at = lambda places, groups: tokens_of(shape, refs, row, groups, places < number)[2]  # noqa: E731

    def one(block, state):
        groups, x, next_groups, carry = state
        places = (jnp.asarray(block, jnp.int32) + 1) * size + place
        next_x, after_next = logits_at(places, next_groups), groups_at(places + size)
        return next_groups, next_x, after_next, f(carry, x, ids_of(shape, groups, place < number)[0], groups)

    groups = groups_at(place)
    start = groups, logits_at(place, groups), groups_at(place + size), init
    return lax.fori_loop(0, lax.div(number + (size - 1), jnp.int32(size)), one, start)[3]


def barrier(shape: Shape):
    """What threads of a program stored can be read by the others."""
    if not shape.interpret:
        shape.plt.debug_barrier()
