"""One pass over many groups of a row: what lies above a span between two logits, the tokens in it, and who may win the race.

Until the end of the kept prefix is found in the span, a group has two scores, without its tokens in the span and with them. It
can only have won if the latter is at least the largest of the former: mostly one group is left.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from pallas_kernels import kept, noise, race
from pallas_kernels import triton_prefix as prefix
from pallas_kernels.kept import Mass
from pallas_kernels.triton_prefix import Row, Tokens
from pallas_kernels.triton_ranks import ROUNDS
from pallas_kernels.triton_rows import (
    barrier,
    fold_listed,
    list_down,
    listed_ids,
    scatter,
    spread_iota,
    spread_load,
    tokens_at,
)
from pallas_kernels.triton_shapes import RANKED, Inputs, Memory, Shape, Summary


class Leading(NamedTuple):
    """What is known of a row from its leading groups: the least logit of which they have all tokens, and what these are."""

    least: Any
    number: Any
    mass: Any  # None without top_p


def leading_of(own: Row, x, ids, least) -> Leading:
    """From their tokens."""
    mass = None
    if own.top_p is not None:
        mass = kept.carried(*prefix.total_of(prefix.masses(own)(x, ids), x >= least))
    return Leading(least, prefix.number(x >= least), mass)


class Further(NamedTuple):
    """Where a program looks further: the row, its memory, and what it knows."""

    shape: Shape
    refs: Inputs
    summary: Summary
    memory: Memory
    row: Any
    own: Row
    leading: Leading

    def list_from(self, low):
        """Lists the groups with a logit of at least `low`; how many they are."""
        shape = self.shape
        group_top = spread_load(shape, self.summary.group_top, self.row, shape.num_groups, -jnp.inf)
        barrier(shape)  # what was listed before has been read
        is_listed = [x >= low for x in group_top]
        return list_down(shape, self.memory.groups, self.row, is_listed, shape.num_groups, prefix.places_in_order)

    def tokens(self, number) -> Tokens:
        """Of the groups that are listed."""
        def fold(f, init):
            without = lambda carry, x, ids, _: f(carry, x, ids)  # noqa: E731
            return fold_listed(self.shape, self.refs, self.memory.groups, self.row, number, without, init)

        return Tokens(fold, self.shape.streamed)


class Contenders(NamedTuple):
    """Of each place in a block `[n]`: of the groups that it has seen, the largest score without the tokens in the span, the
    largest with them, of which group, and the second largest; and the weight of what is kept for certain. Scores are
    `mass / -log(u)`, which is cheap; rounding is allowed for at the end."""

    lower: Any
    upper: Any
    first_id: Any
    second: Any
    total: Any


class Written(NamedTuple):
    """Tokens that lie in a span, `[n, 16]`, the rest -inf; whether these are all; and what lies above, float32."""

    x: Any
    ids: Any
    is_all: Any
    above: Any


def nobody(size: int) -> Contenders:
    """Of no group."""
    none = jnp.zeros((size,), jnp.float32)
    return Contenders(none, none, jnp.zeros((size,), jnp.int32), none, none)


def read_once(at: Further, number, low, high, end, weigh) -> tuple[Written, Contenders]:
    """Reads the listed groups: the tokens in [low, high), what those in [high, end) weigh, and what their groups score.

    A word for each group says which of its tokens are in the span; all are written down afterwards.
    """
    shape, row, own, ref = at.shape, at.row, at.own, at.memory.bits
    size = shape.streamed
    bit = jnp.int32(1) << lax.broadcasted_iota(jnp.int32, (1, noise.GROUP), 1)
    slot = lax.broadcasted_iota(jnp.int32, (size,), 0)
    of_groups = lambda where, what: jnp.sum(jnp.where(where, what, 0), axis=1, dtype=what.dtype)  # noqa: E731

    def look(carry, x, ids, groups):
        del ids
        above, best, block = carry
        place, weights = block * size + slot, prefix.weight_of(x, own)
        is_in, is_over = (x >= low) & (x < high), x >= high
        scatter(shape, ref, row, place, of_groups(is_in, bit), place < number)
        sure = of_groups(is_over if own.min_p is None else is_over & prefix.is_above(x, own), weights)
        with_span = sure + of_groups(is_in, weights)
        first = noise.GROUP * groups  # from a load: each thread makes its own noise
        speed = jnp.where(own.t > 0.0, 1.0 / race.group_noise(own.keys, 0, first, noise.exponential), 1.0)
        lower, upper = (speed * jnp.where(own.t > 0.0, a, jnp.minimum(a, 1.0)) for a in (sure, with_span))
        is_best = upper > best.upper
        best = Contenders(
            jnp.maximum(best.lower, lower), jnp.maximum(best.upper, upper), jnp.where(is_best, first, best.first_id),
            jnp.maximum(best.second, jnp.minimum(best.upper, upper)), best.total + sure)
        return above + of_groups(is_over & (x < end), weigh(x)), best, block + 1

    start = jnp.zeros((size,), jnp.float32), nobody(size), jnp.int32(0)
    above, best, _ = fold_listed(shape, at.refs, at.memory.groups, row, number, look, start)
    barrier(shape)
    place = spread_iota(shape.num_groups)
    bits, groups = (spread_load(shape, x, row, shape.num_groups, 0) for x in (ref, at.memory.groups))
    bits = [jnp.where(a < number, x, 0) for a, x in zip(place, bits, strict=True)]
    places, total = prefix.places_in_lanes([lax.population_count(x) for x in bits])

    def write_down(state):
        """One token of each group that has any left."""
        left = []
        for first, bits, place in zip(groups, *state, strict=True):
            lowest = bits & -bits
            ids = noise.GROUP * first + lax.population_count(lowest - 1)
            scatter(shape, at.memory.in_span, row, place, ids, (bits != 0) & (place < shape.in_span))
            left.append((bits ^ lowest, place + 1))
        return tuple(map(list, zip(*left, strict=True)))

    is_any = lambda state: jnp.max(prefix.in_lanes(jnp.max, jnp.maximum, state[0])) > 0  # noqa: E731
    lax.while_loop(is_any, write_down, (bits, places))
    barrier(shape)
    place = lax.broadcasted_iota(jnp.int32, (shape.in_span // noise.GROUP, noise.GROUP), 0) * noise.GROUP
    place += lax.broadcasted_iota(jnp.int32, place.shape, 1)
    ids = listed_ids(shape, at.memory.in_span, row, place, total)
    x = tokens_at(shape, at.refs, row, ids, place < total)[1]
    return Written(x, ids, total <= shape.in_span, jnp.sum(above)), best


def narrowed(x, mass: Mass, target: Mass, high, above: Mass):
    """(low, high, mass from high on, two words, how many are left between): logits between which a prefix ends that ends among
    these tokens, below `high`. It is halved until `RANKED` are left, or until that does not help."""
    def halve(state):
        low, high, above_whole, above_fine, left, rounds = state
        middle = 0.5 * low + 0.5 * high
        is_over = (x >= middle) & (x < high)
        over, number = prefix.total_of(mass, is_over), prefix.number(is_over)
        whole, fine = kept.carried(above_whole + over.whole, above_fine + over.fine)
        yes = kept.at_least(Mass(whole, fine), target)
        return (jnp.where(yes, middle, low), jnp.where(yes, high, middle), jnp.where(yes, above_whole, whole),
                jnp.where(yes, above_fine, fine), jnp.where(yes, number, left - number), rounds + 1)

    low = jnp.min(jnp.min(jnp.where(x > -jnp.inf, x, jnp.inf), axis=1))
    start = low, high, *above, prefix.number(x > -jnp.inf), jnp.int32(0)
    return lax.while_loop(lambda state: (state[4] > RANKED) & (state[5] < ROUNDS), halve, start)[:5]
