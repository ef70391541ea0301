"""The rows whose kept set lies in the groups with the largest logits: a kernel of `triton_filtered`, which draws in them."""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import finish as finishing
from pallas_kernels import kept, noise, race
from pallas_kernels import triton_prefix as prefix
from pallas_kernels.finish import Draw
from pallas_kernels.triton_filter_search import search
from pallas_kernels.triton_kept import drawn, kept_of, race_of
from pallas_kernels.triton_prefix import Span, Tokens
from pallas_kernels.triton_rows import (
    barrier,
    column_load,
    few_of,
    listed_ids,
    put,
    row_of,
    scatter,
    split,
    spread_iota,
    spread_load,
    tokens_of,
)
from pallas_kernels.triton_shapes import DRAWN, IN_SPAN, SETTLED, WHOLE, Shape, State


def settle(*refs, shape: Shape, trees):
    """One row: the end of its prefix, or where to look for it."""
    refs, given, out, draw, list_ref, few_ref = split(refs, trees)
    row = pl.program_id(0)
    group_top = spread_load(shape, given.group_top, row, shape.num_groups, -jnp.inf)  # first: the rest waits for less then
    own = row_of(shape, refs, row)
    top, total = race.mass_of(column_load(shape, given.top, row, -jnp.inf), column_load(shape, given.total, row, 0.0), own.t)
    own = own._replace(top=top, total=total)
    has_law = finishing.has_law(top, total)
    is_k, is_p = (has_law & on for on in prefix.is_on(own, shape.vocab))
    if own.top_k is not None:
        own = own._replace(top_k=jnp.where(is_k, own.top_k, 0))
    if own.top_p is not None:
        own = own._replace(top_p=jnp.where(is_p, own.top_p, 1.0))

    count = functools.partial(jnp.sum, dtype=jnp.int32)
    over = lambda low: prefix.number(prefix.in_lanes(count, jnp.add, [x >= low for x in group_top]))  # noqa: E731
    finite = lambda tiles: [jnp.where(x > -jnp.inf, x, jnp.inf) for x in tiles]  # noqa: E731
    least = lambda tiles: jnp.min(prefix.in_lanes(jnp.min, jnp.minimum, finite(tiles)))  # noqa: E731
    lowest = least(group_top)
    is_whole = over(prefix.LEAST_FINITE) <= shape.listed
    wanted = jnp.int32(shape.listed // 2)
    if own.top_k is not None:
        wanted = jnp.minimum(jnp.maximum(wanted, own.top_k), shape.listed - shape.listed // 8)

    def halve(state):
        low, high, num_over, rounds = state
        middle = 0.5 * low + 0.5 * high
        num = over(middle)
        fits = num <= shape.listed
        return jnp.where(fits, low, middle), jnp.where(fits, middle, high), jnp.where(fits, num, num_over), rounds + 1

    _, high, num_over, _ = lax.while_loop(lambda state: ~is_whole & (state[2] < wanted) & (state[3] < 24), halve,
                                          (lowest, top, over(top), jnp.int32(0)))
    lowest_listed = jnp.where(is_whole, prefix.LEAST_FINITE, jnp.where(num_over > shape.listed, jnp.inf, high))
    listed = [(x >= lowest_listed) & (x < jnp.inf) for x in group_top]
    places, num_listed = prefix.places_in_lanes([x.astype(jnp.int32) for x in listed])
    for place, ids, is_listed in zip(places, spread_iota(shape.num_groups), listed, strict=True):
        scatter(shape, list_ref, row, place, ids, is_listed & (place < shape.listed))
    barrier(shape)
    place = lax.broadcasted_iota(jnp.int32, (shape.listed,), 0)
    groups = listed_ids(shape, list_ref, row, place, num_listed)
    ids, model, x = tokens_of(shape, refs, row, groups, place < num_listed)
    span = Span(kept.ordered_keys(lowest_listed), kept.ordered_keys(top) + 1, prefix.nothing())
    found = search(Tokens(((x, ids),)), own, span, few_of(shape, refs, few_ref, row), is_whole, shape.vocab)
    is_drawn = ~has_law | is_whole | found.is_found  # the tokens listed have all that are kept
    if own.min_p is not None:  # it ends before the others do
        is_drawn |= ~prefix.is_above(lowest_listed, own) & ~(is_k & is_p)

    def guessed():
        samples = spread_load(shape, given.sample, row, shape.num_groups, jnp.inf)
        start = least(samples)
        low, high = prefix.undecided_span(samples, own, is_k, start, shape.vocab)
        low = kept.ordered_keys(jnp.where(low > start, low, prefix.LEAST_FINITE))
        high = kept.ordered_keys(high) + (high >= top).astype(jnp.int32)
        return jnp.where(is_k & is_p, jnp.int32(WHOLE), jnp.int32(IN_SPAN)), low, high

    def drawn_here():
        first_ids = noise.GROUP * groups
        raced = race_of(own, found.end, jnp.max(x, axis=1), ids, x, first_ids)
        is_winner = (first_ids == raced.winner)[:, None]
        of_winner = lambda a: jnp.max(jnp.where(is_winner, a, -jnp.inf), axis=0)  # noqa: E731
        of_group = raced.winner + lax.broadcasted_iota(jnp.int32, (noise.GROUP,), 0)
        kept_x = jnp.where(kept_of(x, ids, own, found.end), x, -jnp.inf)
        return drawn(shape, own, raced, given, row, of_group, of_winner(model), of_winner(kept_x))

    none = lambda: Draw(jnp.int32(-1), *[jnp.float32(jnp.nan)] * 4)  # noqa: E731
    put(shape, draw, row, prefix.branch(is_drawn, drawn_here, none))

    def done():
        low = kept.ordered_keys(jnp.float32(prefix.LEAST_FINITE))
        return jnp.where(is_drawn, jnp.int32(DRAWN), jnp.int32(SETTLED)), low, low

    rest = guessed if shape.has_prefix else done
    kind, low, high = prefix.branch(is_drawn | ~(is_k | is_p), done, rest)
    put(shape, out, row, State(kind, top, total, low, high, found.end))
