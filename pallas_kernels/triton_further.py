"""The rows whose kept set is larger than the groups with the largest logits: what the kernel of `triton_filtered` does then.

What is above the bound of those groups is known, so the prefix ends below it, and one logit of each group as a sample says
about where: in a span between two logits. All groups with a logit above its low end are listed and read once, which adds up
what lies above the span and writes down the few tokens in it, among which the end is searched. If it is not there, which the
sums tell, it is searched among all tokens. A filter at a time, top_k before top_p.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from pallas_kernels import kept, noise, race
from pallas_kernels import triton_prefix as prefix
from pallas_kernels import triton_ranks as ranks
from pallas_kernels.kept import Kept, Mass
from pallas_kernels.triton_filter_search import Span, end_in_span
from pallas_kernels.triton_kept import kept_of
from pallas_kernels.triton_prefix import Bracket, Row, Tokens
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

ROUNDING = 1e-3  # more than what float32 loses of a score; groups where weights vanish are too light to win


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


class Ended(NamedTuple):
    """The end of a prefix, and how many groups are listed, which are all that have kept tokens. Where `has_winner`, one of the
    groups `[n]` that may win does, and the weight of all that is kept is `total`."""

    end: Kept
    number: Any
    has_winner: Any
    first_id: Any
    may_win: Any
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


def end_by(at: Further, by_count, target: Mass, base, of_k: Kept):
    """The end of the shortest prefix whose count or mass is at least `target`, of what `of_k` keeps, which measures `base`,
    float32: the leaves of an `Ended`."""
    shape, own, leading = at.shape, at.own, at.leading

    def measure(x, ids):
        """Whichever it is."""
        if own.top_p is None:
            return Mass((x > -jnp.inf).astype(jnp.int32), jnp.int32(0))
        mass = prefix.masses(own)(x, ids)
        if own.top_k is None:
            return mass
        is_in = kept.is_kept(kept.ordered_keys(x), ids, of_k)
        number = (x > -jnp.inf).astype(jnp.int32)
        return Mass(jnp.where(by_count, number, jnp.where(is_in, mass.whole, 0)), jnp.where(by_count | ~is_in, 0, mass.fine))

    def weigh(x):
        return jnp.where(by_count, 1.0, prefix.weight_of(x, own))

    def in_units(total) -> Mass:
        """A float32 sum of what is weighed."""
        if own.top_p is None:
            return Mass(total.astype(jnp.int32), jnp.int32(0))
        return kept.either(by_count, Mass(total.astype(jnp.int32), jnp.int32(0)), kept.in_units(total, kept.units(own.total)))

    unit = jnp.float32(1.0) if own.top_p is None else jnp.where(by_count, 1.0, 1.0 / kept.units(own.total))
    in_leading = prefix.counted(leading.number)
    if own.top_p is not None:
        in_leading = kept.either(by_count, in_leading, leading.mass)
    is_leading = kept.at_least(in_leading, target)  # it ends among these, of which more are tied than were listed
    above, of_leading = kept.either(is_leading, prefix.nothing(), in_leading), unit * kept.as_float(in_leading)
    there = jnp.where(is_leading, of_leading, base - of_leading)
    top = kept.ordered_keys(own.top) + 1
    start = jnp.where(is_leading, kept.ordered_keys(leading.least), kept.ordered_keys(jnp.float32(prefix.LEAST_FINITE)))
    stop = jnp.where(is_leading, top, jnp.minimum(kept.ordered_keys(leading.least), top))
    samples = spread_load(shape, at.summary.sample, at.row, shape.num_groups, jnp.inf)
    bracket = Bracket(jnp.where(is_leading, leading.least, -jnp.inf), kept.logits_of(stop), there,
                      there + unit * (kept.as_float(above) - kept.as_float(target)))
    low, high = prefix.undecided_span(samples, own, by_count, bracket)
    high = jnp.minimum(jnp.maximum(kept.ordered_keys(high) + (high >= own.top).astype(jnp.int32), start + 1), stop)
    if own.top_k is not None and own.top_p is not None:
        high = jnp.maximum(high, jnp.minimum(of_k.key + 1, stop))  # what is above is kept
    low = jnp.minimum(jnp.maximum(kept.ordered_keys(low), start), high - 1)
    number = at.list_from(kept.logits_of(low))
    written, best = read_once(at, number, *map(kept.logits_of, (low, high, stop)), weigh)
    above = kept.plus(above, in_units(written.above))
    inside = measure(written.x, written.ids)
    is_found = kept.at_least(kept.plus(above, kept.carried(*prefix.total_of(inside, written.x > -jnp.inf))), target)
    is_found &= written.is_all & ~kept.at_least(above, target)
    low, high, *above, left = narrowed(written.x, inside, target, kept.logits_of(high), above)
    is_few = is_found & (left <= RANKED)

    def among_k(key, id):
        return Kept(key, jnp.where(key == of_k.key, jnp.minimum(id, of_k.id), id))  # more may be tied than top_k left

    def in_span():
        ref = at.memory.few
        ranks.write_down(shape, ref, at.row, written.ids, (written.x >= low) & (written.x < high))
        end = among_k(*ranks.end_below(ranks.rank(shape, at.refs, ref, at.row, own, left), by_count, Mass(*above), target))
        weights = jnp.where(kept_of(written.x, written.ids, own, end), prefix.weight_of(written.x, own), 0.0)
        return end, number, jnp.sum(jnp.sum(weights, axis=1))

    def in_all():
        lowest = kept.ordered_keys(jnp.float32(prefix.LEAST_FINITE))
        number = at.list_from(prefix.LEAST_FINITE)
        tokens = at.tokens(number)
        there = prefix.add_up(tokens, measure, lambda x, ids: x > -jnp.inf)
        near = Span(kept.ordered_keys(low), kept.ordered_keys(high), Mass(*above))  # many tie
        span = kept.either(is_found, near, Span(lowest, top, prefix.nothing()))
        end = among_k(*end_in_span(tokens, measure, prefix.least_of(target, there), span, shape.vocab))
        return end, number, jnp.float32(0.0)

    end, number, in_end = prefix.branch(is_few, in_span, in_all)
    limit = (1.0 - ROUNDING) * jnp.max(best.lower)
    has_winner = is_few & (jnp.max(best.second) < limit)  # no place has seen two that may win
    return Ended(end, number, has_winner, best.first_id, best.upper >= limit, in_end + jnp.sum(best.total))


def further_end(at: Further):
    """Of the prefix that top_k, then top_p keep."""
    shape, own = at.shape, at.own
    is_k, is_p = prefix.is_on(own, shape.vocab)

    def by_filter(i, before: Ended):
        by_count, of_k = i == 0, before.end
        if own.top_p is None:
            return end_by(at, by_count, prefix.counted(own.top_k), jnp.float32(shape.vocab), of_k)
        base, total = prefix.everything(own), own.total
        if own.top_k is not None:
            def of_prefix():
                is_in = lambda x, ids: kept.is_kept(kept.ordered_keys(x), ids, of_k)  # noqa: E731
                return tuple(prefix.add_up(at.tokens(before.number), prefix.masses(own), is_in))

            base = Mass(*prefix.branch(is_k & ~by_count, of_prefix, lambda: tuple(base)))
            total = jnp.where(by_count, jnp.float32(shape.vocab), total)
        target = kept.share(base, own.top_p)
        if own.top_k is not None:
            target = kept.either(by_count, prefix.counted(own.top_k), target)
        return end_by(at, by_count, target, total, of_k)

    last, nobody = is_p.astype(jnp.int32), jnp.zeros((shape.streamed,), jnp.int32)
    none = Ended(prefix.no_end(shape.vocab), jnp.int32(0), is_k & ~is_k, nobody, nobody < 0, jnp.float32(0.0))
    _, ended = lax.while_loop(lambda state: state[0] <= last, lambda state: (state[0] + 1, by_filter(*state)),
                              ((~is_k).astype(jnp.int32), none))
    number = prefix.branch(is_k | is_p, lambda: ended.number, lambda: at.list_from(prefix.LEAST_FINITE))
    return ended._replace(number=number)
