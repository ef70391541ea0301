"""The kernel of `triton_filtered` that draws: what it does where the kept set lies in the groups with the largest logits."""

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import finish as finishing
from pallas_kernels import noise, race
from pallas_kernels import triton_prefix as prefix
from pallas_kernels.triton_further import further_end
from pallas_kernels.triton_kept import best_of, in_winner, race_listed, scored
from pallas_kernels.triton_prefix import Row
from pallas_kernels.triton_ranks import Found, bound_of, end_among, guess_of, rank, write_down
from pallas_kernels.triton_rows import (
    column_load,
    list_down,
    listed_ids,
    put,
    row_of,
    split,
    spread_load,
    tokens_of,
)
from pallas_kernels.triton_shapes import RANKED, Shape
from pallas_kernels.triton_span import Further, leading_of


def is_leading(shape: Shape, own: Row, group_top):
    """(which groups, in tiles, have a logit of at least a bound; the bound; whether they are all that have any; how many they
    are, or None where they have to be counted).

    There are at most `listed`, and not fewer than top_k asks for or 3/8 of `listed`; where the bound is inf, there are none.
    """
    is_over = lambda x, low: (x >= low) & (x < jnp.inf)  # noqa: E731
    if shape.num_groups <= shape.listed:
        low = jnp.float32(prefix.LEAST_FINITE)
        return [is_over(x, low) for x in group_top], low, jnp.bool_(True), None
    wanted = jnp.int32(shape.listed * 3 // 8)
    if own.top_k is not None:
        most = jnp.int32(shape.listed - shape.listed // 8)
        wanted = jnp.where(prefix.is_on(own, shape.vocab)[0], jnp.minimum(jnp.maximum(wanted, own.top_k), most), wanted)
    aim = wanted + ((shape.listed - wanted) * 3 >> 3)
    guess = guess_of(prefix.in_lanes(jnp.max, jnp.maximum, group_top), shape.num_groups, aim)
    count = functools.partial(jnp.sum, dtype=jnp.int32)
    over = lambda low: prefix.number(prefix.in_lanes(count, jnp.add, [is_over(x, low) for x in group_top]))  # noqa: E731

    def ends():
        finite = [jnp.where(x > -jnp.inf, x, jnp.inf) for x in group_top]
        return jnp.min(prefix.in_lanes(jnp.min, jnp.minimum, finite)), jnp.max(prefix.in_lanes(jnp.max, jnp.maximum, group_top))

    low, number = bound_of(over, ends, guess, wanted, shape.listed)
    return [is_over(x, low) for x in group_top], low, low == prefix.LEAST_FINITE, number


def end_of(shape: Shape, refs, ref, row, own: Row, x, ids, least, is_whole) -> tuple[Found, Any]:
    """(the end of the prefix, if it lies among the largest few hundred of tokens `[groups, 16]` from `least` on, which are all
    there are, and those below too where it `is_whole`; the logit from which on it was looked for)."""
    wanted = jnp.int32(RANKED * 3 // 8)
    if own.top_k is not None:
        wanted = jnp.maximum(jnp.minimum(own.top_k, RANKED - RANKED // 8), wanted)
    over = lambda low: prefix.number(x >= low)  # noqa: E731
    # Not below the bound of the groups: others have tokens there.
    ends = lambda: (jnp.maximum(jnp.min(jnp.min(jnp.where(x > -jnp.inf, x, jnp.inf), axis=1)), least), own.top)  # noqa: E731
    from_, number = bound_of(over, ends, least, wanted, RANKED)
    write_down(shape, ref, row, ids, x >= from_)
    ranked = rank(shape, refs, ref, row, own, number)
    return end_among(ranked, own, is_whole & (from_ == prefix.LEAST_FINITE), shape.vocab), from_


def settle(*refs, shape: Shape, trees):
    """One row: the end of its prefix, and the draw."""
    refs, given, out, draw, memory = split(refs, trees)
    row = pl.program_id(0)
    group_top = spread_load(shape, given.group_top, row, shape.num_groups, -jnp.inf)  # first: the rest waits for less then
    own = row_of(shape, refs, row)
    tops, totals = column_load(shape, given.top, row, -jnp.inf), column_load(shape, given.total, row, 0.0)

    def with_mass():
        top, total = race.mass_of(tops, totals, own.t)
        return own._replace(top=top, total=total)

    if shape.has_prefix:  # of which the groups need not know the mass: it is added up while their tokens are fetched
        listed, least, is_whole, num_listed = is_leading(shape, own, group_top)
    else:
        own, num_listed = with_mass(), None
        listed = [prefix.is_above(x, own) for x in group_top]
    counted = list_down(shape, memory.groups, row, listed, shape.listed, prefix.places_in_lanes)
    num_listed = counted if num_listed is None else num_listed
    place = lax.broadcasted_iota(jnp.int32, (shape.listed,), 0)
    groups = listed_ids(shape, memory.groups, row, place, num_listed)
    ids, _, x = tokens_of(shape, refs, row, groups, place < num_listed)
    if shape.has_prefix:
        own = with_mass()
    has_law = finishing.has_law(own.top, own.total)
    is_k, is_p = (has_law & on for on in prefix.is_on(own, shape.vocab))
    if own.top_k is not None:
        own = own._replace(top_k=jnp.where(is_k, own.top_k, 0))
    if own.top_p is not None:
        own = own._replace(top_p=jnp.where(is_p, own.top_p, 1.0))
    if shape.has_prefix:
        found, from_ = end_of(shape, refs, memory.few, row, own, x, ids, least, is_whole)
        is_drawn = ~has_law | found.is_found | (is_whole & ~(is_k | is_p))  # the tokens listed have all that are kept
        if own.min_p is not None:  # it ends before the others do
            is_drawn |= ~prefix.is_above(from_, own) & ~(is_k & is_p)
        end = found.end
    else:
        is_drawn, end = ~has_law | (num_listed <= shape.listed), prefix.no_end(shape.vocab)

    def here():
        return end, best_of(scored(own, end, jnp.max(x, axis=1), ids, x, noise.GROUP * groups))

    def further():
        if not shape.has_prefix:
            number = list_down(shape, memory.groups, row, listed, shape.num_groups, prefix.places_in_order)
            return end, race_listed(shape, refs, own, end, memory.groups, row, number)
        ended = further_end(Further(shape, refs, given, memory, row, own, leading_of(own, x, ids, least)))

        def of_contenders():
            ids, _, x = tokens_of(shape, refs, row, lax.div(ended.first_id, jnp.int32(noise.GROUP)), ended.may_win)
            raced = best_of(scored(own, ended.end, jnp.max(x, axis=1), ids, x, ended.first_id))
            return raced._replace(total=ended.total)

        def of_all():
            return race_listed(shape, refs, own, ended.end, memory.groups, row, ended.number)

        return ended.end, prefix.branch(ended.has_winner, of_contenders, of_all)

    last, raced = prefix.branch(is_drawn, here, further)
    put(shape, (out, draw), row, (last, in_winner(shape, refs, own, last, given, raced, row)))
