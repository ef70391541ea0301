"""The rows whose kept set is larger than the groups with the largest logits: what the kernel of `triton_filtered` does then.

What is above the bound of those groups is known, so the prefix ends below it, and one logit of each group as a sample says
about where: in a span between two logits. All groups with a logit above its low end are listed and read once, which adds up
what lies above the span and writes down the few tokens in it, among which the end is searched. If it is not there, which the
sums tell, it is searched among all tokens. A filter at a time, top_k before top_p.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from pallas_kernels import kept
from pallas_kernels import triton_prefix as prefix
from pallas_kernels import triton_ranks as ranks
from pallas_kernels.kept import Kept, Mass
from pallas_kernels.triton_filter_search import Span, end_in_span
from pallas_kernels.triton_kept import kept_of
from pallas_kernels.triton_prefix import Bracket
from pallas_kernels.triton_rows import spread_load
from pallas_kernels.triton_shapes import RANKED
from pallas_kernels.triton_span import Further, narrowed, read_once

ROUNDING = 1e-3  # more than what float32 loses of a score; groups where weights vanish are too light to win


class Ended(NamedTuple):
    """The end of a prefix, and how many groups are listed, which are all that have kept tokens. Where `has_winner`, one of the
    groups `[n]` that may win does, and the weight of all that is kept is `total`."""

    end: Kept
    number: Any
    has_winner: Any
    first_id: Any
    may_win: Any
    total: Any


def end_by(at: Further, by_count, target: Mass, base, of_k: Kept) -> Ended:
    """The end of the shortest prefix whose count or mass is at least `target`, of what `of_k` keeps, which measures `base`,
    float32."""
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
    top = prefix.after(kept.ordered_keys(own.top))
    start = jnp.where(is_leading, kept.ordered_keys(leading.least), kept.ordered_keys(jnp.float32(prefix.LEAST_FINITE)))
    stop = jnp.where(is_leading, top, jnp.minimum(kept.ordered_keys(leading.least), top))
    samples = spread_load(shape, at.summary.sample, at.row, shape.num_groups, jnp.inf)
    bracket = Bracket(jnp.where(is_leading, leading.least, -jnp.inf), kept.logits_of(stop), there,
                      there + unit * (kept.as_float(above) - kept.as_float(target)))
    low, high = prefix.undecided_span(samples, own, by_count, bracket)
    high = jnp.where(high >= own.top, top, kept.ordered_keys(high))
    high = jnp.minimum(jnp.maximum(high, prefix.after(start)), stop)
    if own.top_k is not None and own.top_p is not None:
        high = jnp.maximum(high, jnp.minimum(prefix.after(of_k.key), stop))  # what is above is kept
    low = jnp.minimum(jnp.maximum(kept.ordered_keys(low), start), high - 1)
    number = at.list_from(kept.logits_of(low))
    written, best = read_once(at, number, kept.logits_of(low), kept.logits_of(high), kept.logits_of(stop), weigh)
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


def further_end(at: Further) -> Ended:
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
