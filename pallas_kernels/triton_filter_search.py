"""The kept prefix of one row inside a kernel: the search of `kept`, over tokens that a program holds or streams.

Tokens come in blocks `[groups, 16]`; a single one stays in registers, so that a search over few tokens touches little memory.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import kept
from pallas_kernels.kept import Kept, Mass
from pallas_kernels.triton_prefix import (
    FEW,
    MOST,
    Few,
    Row,
    Span,
    Tokens,
    add_up,
    branch,
    cumsum,
    everything,
    fold,
    has_mass,
    is_on,
    least_of,
    masses,
    no_end,
    nothing,
    number,
    ones,
    total_of,
)


def end_of_prefix(tokens: Tokens, measure, target: Mass, span: Span, few: Few, vocab: int) -> Kept:
    """The end of the shortest prefix whose mass is at least `target`; it lies in the span.

    While the span holds more than a few tokens it is cut in the middle of its logits and in the middle of its keys by turns.
    The few are written down and read again, one by a thread, and a round cuts their span into 16.
    """
    in_span = lambda keys: (keys >= span.low) & (keys < span.high)  # noqa: E731

    def measured(x, ids):
        return kept.ordered_keys(x), measure(x, ids)

    held = None if tokens.held is None else measured(*tokens.held)

    def fold_measured(f, init):
        """As `fold`, with keys and masses, those of `held` computed once."""
        if held is not None:
            return f(init, *held)
        return fold(tokens, lambda carry, x, ids: f(carry, *measured(x, ids)), init)

    def halve(state):
        low, high, above_whole, above_fine, left, by_value = state
        value = 0.5 * kept.logits_of(low) + 0.5 * kept.logits_of(high)
        middle = jnp.where(by_value, kept.ordered_keys(value), (low >> 1) + (high >> 1) + (low & high & 1))
        middle = jnp.minimum(jnp.maximum(middle, low + 1), high - 1)

        def look(carry, keys, mass):
            whole, fine, least, number_over = carry
            is_over = (keys >= middle) & (keys < high)
            mass = total_of(mass, is_over)
            return (whole + mass.whole, fine + mass.fine, jnp.minimum(least, jnp.min(jnp.where(is_over, keys, MOST))),
                    number_over + number(is_over))

        *mass, least, number_over = fold_measured(look, (above_whole, above_fine, jnp.int32(MOST), jnp.int32(0)))
        whole, fine = kept.carried(*mass)
        yes = kept.at_least(Mass(whole, fine), target)
        return (jnp.where(yes, least, low), jnp.where(yes, high, middle), jnp.where(yes, above_whole, whole),
                jnp.where(yes, above_fine, fine), jnp.where(yes, number_over, left - number_over), ~by_value)

    left = fold_measured(lambda left, keys, mass: left + number(in_span(keys)), jnp.int32(0))
    low, high, *above, left, _ = lax.while_loop(lambda state: (state[0] + 1 < state[1]) & (state[4] > FEW), halve,
                                                (span.low, span.high, *span.above, left, jnp.bool_(True)))

    def write_down(count, x, ids):
        is_in = (kept.ordered_keys(x) >= low) & (kept.ordered_keys(x) < high)
        in_group = is_in.astype(jnp.int32)
        of_group = jnp.sum(in_group, axis=1, dtype=jnp.int32)
        few.store((count + cumsum(of_group) - of_group)[:, None] + cumsum(in_group) - 1, ids, is_in)
        return count + number(of_group)

    def cut_in_16():
        fold(tokens, write_down, jnp.int32(0))
        keys, mass = jax.tree.map(lambda a: jnp.max(a, axis=0)[:, None], measured(*few.load(left)))

        def cut(ends):
            def edges(shape):
                """15 keys inside, and the high end."""
                gap = lax.bitcast_convert_type(ends[1] - ends[0], jnp.uint32)
                step = lax.broadcasted_iota(jnp.uint32, shape, len(shape) - 1) + jnp.uint32(1)
                width = (gap >> jnp.uint32(4)) * step + (((gap & jnp.uint32(15)) * step) >> jnp.uint32(4))
                return ends[0] + lax.bitcast_convert_type(width, jnp.int32)

            yes = kept.at_least(kept.plus(Mass(*above), total_of(mass, keys >= edges((1, 16)), axis=0)), target)
            return jnp.max(jnp.where(yes, edges((16,)), ends[0])), jnp.min(jnp.where(yes, ends[1], edges((16,))))

        return lax.while_loop(lambda ends: ends[0] + 1 < ends[1], cut, (low, high))[0]

    key = branch(low + 1 < high, cut_in_16, lambda: low)
    is_tied = lambda keys, mass: (keys == key) & has_mass(mass)  # noqa: E731
    num_tied = fold_measured(lambda count, keys, mass: count + number(is_tied(keys, mass)), jnp.int32(0))

    def first_ids():
        """The id of the last of as many tied tokens as it takes. Where there are more blocks than one, ids are in order."""
        def look_at_tie(carry, keys, mass):
            over, tied = total_of(mass, (keys > key) & (keys < span.high)), is_tied(keys, mass)
            most = [jnp.int32(0) if m is None else jnp.max(jnp.where(tied, m, 0)) for m in mass]
            return carry[0] + over.whole, carry[1] + over.fine, *map(jnp.maximum, carry[2:], most)

        *over, whole, fine = fold_measured(look_at_tie, (*span.above, jnp.int32(0), jnp.int32(0)))  # equal logits, equal masses
        over = kept.carried(*over)

        def too_few(n):
            return ~kept.at_least(kept.carried(over.whole + n * whole, over.fine + n * fine), target)

        needed = kept.bisect(too_few, jnp.int32(0), num_tied, vocab.bit_length())[1]

        if tokens.held is not None:
            ids, tied = tokens.held[1], is_tied(*held)
            fewer = lambda id: number(tied & (ids < id)) < needed  # noqa: E731
            return kept.bisect(fewer, jnp.int32(0), jnp.int32(vocab), vocab.bit_length())[0]

        def count_ties(carry, x, ids):
            count, last = carry
            tied = is_tied(*measured(x, ids)).astype(jnp.int32)
            of_group = jnp.sum(tied, axis=1, dtype=jnp.int32)
            place = (count + cumsum(of_group) - of_group)[:, None] + cumsum(tied)
            return count + number(of_group), jnp.maximum(last, jnp.max(jnp.where((tied > 0) & (place == needed), ids, -1)))

        return fold(tokens, count_ties, (jnp.int32(0), jnp.int32(-1)))[1]

    return Kept(key, branch(num_tied > 1, first_ids, lambda: jnp.int32(vocab)))


class Found(NamedTuple):
    """The end of the prefix that top_k and top_p keep, and whether the tokens given settle it."""

    end: Kept
    is_found: Any


def search(tokens: Tokens, row: Row, span: Span, few: Few, is_whole, vocab: int) -> Found:
    """The prefix that top_k, then top_p keep. The tokens given have all tokens in the span, and `is_whole` says that they have
    all those below it that exist, too. A span with a mass above it has only one of the two filters on.

    Where the end is not in the span the prefix is longer, and this says that it was not found.
    """
    is_k, is_p = is_on(row, vocab)
    end, k_found, p_found = no_end(vocab), ~is_k, is_k & ~is_k
    in_span = lambda x, ids: (kept.ordered_keys(x) >= span.low) & (kept.ordered_keys(x) < span.high)  # noqa: E731
    if row.top_k is not None:
        there = add_up(tokens, ones, in_span, span.above)
        k_found = ~is_k | is_whole | ((there.whole >= row.top_k) & (span.above.whole < row.top_k))
        target = Mass(jnp.minimum(row.top_k, there.whole), jnp.int32(0))
        end = branch(is_k & k_found, lambda: end_of_prefix(tokens, ones, target, span, few, vocab), lambda: no_end(vocab))
    if row.top_p is not None:
        measure, of_k = masses(row), end
        is_inside = lambda x, ids: kept.is_kept(kept.ordered_keys(x), ids, of_k)  # noqa: E731
        inside, base = measure, everything(row)
        if row.top_k is not None:
            inside = lambda x, ids: Mass(*(jnp.where(is_inside(x, ids), m, 0) for m in measure(x, ids)))  # noqa: E731
            base = kept.either(is_k, branch(is_k & is_p, lambda: add_up(tokens, measure, is_inside, nothing()), nothing), base)
        target = kept.share(base, row.top_p)
        there = add_up(tokens, inside, in_span, span.above)
        enough = kept.at_least(there, target) & ~kept.at_least(span.above, target)
        p_found = is_p & k_found & (is_whole | enough)
        target = least_of(target, there)
        key, id = branch(p_found, lambda: end_of_prefix(tokens, inside, target, span, few, vocab), lambda: of_k)
        end = Kept(key, jnp.where(key == of_k.key, jnp.minimum(id, of_k.id), id))  # more may be tied than top_k left
    return Found(end, ~(is_p & ~k_found) & ((is_k & k_found) | p_found))
