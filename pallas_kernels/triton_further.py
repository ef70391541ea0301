"""The rows whose kept set is larger than the groups with the largest logits: what the kernel of `triton_filtered` does then.

What is above the bound of those groups is known, so the prefix ends below it, and one logit of each group as a sample says
about where: in a span between two logits. All groups with a logit above its low end are listed and read once, which adds up
what lies above the span and writes down the few tokens in it, among which the end is searched. If it is not there, which the
sums tell, it is searched among all tokens. A filter at a time, top_k before top_p.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from pallas_kernels import kept, noise
from pallas_kernels import triton_prefix as prefix
from pallas_kernels import triton_ranks as ranks
from pallas_kernels.kept import Kept, Mass
from pallas_kernels.triton_filter_search import Span, end_in_span
from pallas_kernels.triton_prefix import Bracket, Row, Tokens
from pallas_kernels.triton_ranks import ROUNDS
from pallas_kernels.triton_rows import (
    barrier,
    fold_listed,
    list_down,
    listed_ids,
    scatter,
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


class Written(NamedTuple):
    """Tokens that lie in a span, `[n, 16]`, the rest -inf; whether these are all; and what lies above, float32."""

    x: Any
    ids: Any
    is_all: Any
    above: Any


def write_down(at: Further, number, low, high, end, weigh) -> Written:
    """Reads the listed groups once: the tokens in [low, high), and what those in [high, end) weigh.

    Every place in a block has memory of its own for what it finds, so that no thread waits for another until the end.
    """
    shape, row, slots, in_span = at.shape, at.row, at.memory.slots, at.memory.in_span
    size = shape.streamed
    width = slots.shape[1] // size
    slot = lax.broadcasted_iota(jnp.int32, (size,), 0)

    def look(carry, x, ids):
        above, counts = carry
        is_in = (x >= low) & (x < high)
        in_group = is_in.astype(jnp.int32)
        place = counts[:, None] + prefix.cumsum(in_group) - 1
        scatter(shape, slots, row, width * slot[:, None] + place, ids, is_in & (place < width))
        above += jnp.where((x >= high) & (x < end), weigh(x), 0.0)
        return above, counts + jnp.sum(in_group, axis=1, dtype=jnp.int32)

    start = jnp.zeros((size, noise.GROUP), jnp.float32), jnp.zeros((size,), jnp.int32)
    above, counts = at.tokens(number).fold(look, start)
    barrier(shape)
    first, total = prefix.cumsum(counts) - counts, prefix.number(counts)

    def close_up(i, _):
        """Some of each place."""
        place = jnp.asarray(i, jnp.int32) * noise.GROUP + lax.broadcasted_iota(jnp.int32, (size, noise.GROUP), 1)
        is_there = (place < counts[:, None]) & (place < width)
        found = shape.plt.load(slots.at[row, jnp.where(is_there, width * slot[:, None] + place, 0)])
        place += first[:, None]
        scatter(shape, in_span, row, place, found, is_there & (place < shape.in_span))

    most = jnp.max(counts)
    lax.fori_loop(0, lax.div(most + (noise.GROUP - 1), jnp.int32(noise.GROUP)), close_up, None)
    barrier(shape)
    place = lax.broadcasted_iota(jnp.int32, (shape.in_span // noise.GROUP, noise.GROUP), 0) * noise.GROUP
    place += lax.broadcasted_iota(jnp.int32, place.shape, 1)
    ids = listed_ids(shape, in_span, row, place, total)
    x = tokens_at(shape, at.refs, row, ids, place < total)[1]
    is_all = (most <= width) & (total <= shape.in_span)
    return Written(x, ids, is_all, jnp.sum(jnp.sum(above, axis=1)))


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
    """(key, id, how many groups are listed, which are all that have kept tokens): the end of the shortest prefix whose count or
    mass is at least `target`, of what `of_k` keeps, which measures `base`, float32."""
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
    written = write_down(at, number, *map(kept.logits_of, (low, high, stop)), weigh)
    above = kept.plus(above, in_units(written.above))
    inside = measure(written.x, written.ids)
    is_found = kept.at_least(kept.plus(above, kept.carried(*prefix.total_of(inside, written.x > -jnp.inf))), target)
    is_found &= written.is_all & ~kept.at_least(above, target)
    low, high, *above, left = narrowed(written.x, inside, target, kept.logits_of(high), above)
    is_few = is_found & (left <= RANKED)

    def in_span():
        ref = at.memory.few
        ranks.write_down(shape, ref, at.row, written.ids, (written.x >= low) & (written.x < high))
        return *ranks.end_below(ranks.rank(shape, at.refs, ref, at.row, own, left), by_count, Mass(*above), target), number

    def in_all():
        lowest = kept.ordered_keys(jnp.float32(prefix.LEAST_FINITE))
        number = at.list_from(prefix.LEAST_FINITE)
        tokens = at.tokens(number)
        there = prefix.add_up(tokens, measure, lambda x, ids: x > -jnp.inf)
        near = Span(kept.ordered_keys(low), kept.ordered_keys(high), Mass(*above))  # many tie
        span = kept.either(is_found, near, Span(lowest, top, prefix.nothing()))
        return *end_in_span(tokens, measure, prefix.least_of(target, there), span, shape.vocab), number

    return prefix.branch(is_few, in_span, in_all)


def further_end(at: Further):
    """(end of the prefix that top_k, then top_p keep; how many groups are listed, which are all that have kept tokens)."""
    shape, own = at.shape, at.own
    is_k, is_p = prefix.is_on(own, shape.vocab)

    def by_filter(i, key, id, listed):
        by_count, of_k = i == 0, Kept(key, id)
        if own.top_p is None:
            return end_by(at, by_count, prefix.counted(own.top_k), jnp.float32(shape.vocab), of_k)
        base, total = prefix.everything(own), own.total
        if own.top_k is not None:
            def of_prefix():
                is_in = lambda x, ids: kept.is_kept(kept.ordered_keys(x), ids, of_k)  # noqa: E731
                return tuple(prefix.add_up(at.tokens(listed), prefix.masses(own), is_in))

            base = Mass(*prefix.branch(is_k & ~by_count, of_prefix, lambda: tuple(base)))
            total = jnp.where(by_count, jnp.float32(shape.vocab), total)
        target = kept.share(base, own.top_p)
        if own.top_k is not None:
            target = kept.either(by_count, prefix.counted(own.top_k), target)
        key, id, number = end_by(at, by_count, target, total, of_k)
        if own.top_k is not None:
            id = jnp.where(key == of_k.key, jnp.minimum(id, of_k.id), id)  # more may be tied than top_k left
        return key, id, number

    last = is_p.astype(jnp.int32)
    none = (~is_k).astype(jnp.int32), *prefix.no_end(shape.vocab), jnp.int32(0)
    _, *end, number = lax.while_loop(lambda state: state[0] <= last, lambda state: (state[0] + 1, *by_filter(*state)), none)
    number = prefix.branch(is_k | is_p, lambda: number, lambda: at.list_from(prefix.LEAST_FINITE))
    return Kept(*end), number
