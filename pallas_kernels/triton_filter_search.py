"""The end of a kept prefix anywhere in a row, inside a kernel that streams its tokens: what to do where no guess helped."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from pallas_kernels import kept
from pallas_kernels.kept import Kept, Mass
from pallas_kernels.triton_prefix import MOST, Tokens, cumsum, number, total_of


class Span(NamedTuple):
    """Where a prefix ends: at a key in [low, high), which is finite; `above` is the mass from `high` on."""

    low: Any
    high: Any
    above: Mass


def end_in_span(tokens: Tokens, measure, target: Mass, span: Span, vocab: int) -> Kept:
    """The end of the shortest prefix whose mass is at least `target`, which all tokens together have.

    The span is cut in the middle of its logits and in the middle of its keys by turns; what is below the least logit above a
    cut falls away with it, so that few logits with many ties are found soon.
    """
    def halve(state):
        low, high, above_whole, above_fine, by_value = state
        value = 0.5 * kept.logits_of(low) + 0.5 * kept.logits_of(high)
        middle = jnp.where(by_value, kept.ordered_keys(value), (low >> 1) + (high >> 1) + (low & high & 1))
        middle = jnp.minimum(jnp.maximum(middle, low + 1), high - 1)

        def look(carry, x, ids):
            keys = kept.ordered_keys(x)
            is_over = (keys >= middle) & (keys < high)
            mass, least = total_of(measure(x, ids), is_over), jnp.min(jnp.min(jnp.where(is_over, keys, MOST), axis=1))
            return carry[0] + mass.whole, carry[1] + mass.fine, jnp.minimum(carry[2], least)

        *mass, least = tokens.fold(look, (above_whole, above_fine, jnp.int32(MOST)))
        whole, fine = kept.carried(*mass)
        yes = kept.at_least(Mass(whole, fine), target)
        return (jnp.where(yes, least, low), jnp.where(yes, high, middle), jnp.where(yes, above_whole, whole),
                jnp.where(yes, above_fine, fine), ~by_value)

    start = span.low, span.high, *span.above, jnp.bool_(True)
    key, _, *above, _ = lax.while_loop(lambda state: state[0] + 1 < state[1], halve, start)
    whole, fine = measure(kept.logits_of(key), jnp.int32(-1))  # equal logits have equal masses
    too_few = lambda n: ~kept.at_least(kept.carried(above[0] + n * whole, above[1] + n * fine), target)  # noqa: E731
    most = jnp.minimum(lax.div(jnp.int32(1 << kept.WHOLE), jnp.maximum(whole, 1)) + 1, vocab)  # more is more than everything
    needed = kept.bisect(too_few, jnp.int32(0), most, vocab.bit_length())[1]

    def count_ties(carry, x, ids):
        count, last = carry
        tied = (kept.ordered_keys(x) == key).astype(jnp.int32)
        of_group = jnp.sum(tied, axis=1, dtype=jnp.int32)
        place = (count + cumsum(of_group) - of_group)[:, None] + cumsum(tied)
        return count + number(of_group), jnp.maximum(last, jnp.max(jnp.where((tied > 0) & (place == needed), ids, -1), axis=1))

    last = jnp.max(tokens.fold(count_ties, (jnp.int32(0), jnp.full((tokens.size,), -1, jnp.int32)))[1])
    return Kept(key, jnp.where(last < 0, vocab, last))
