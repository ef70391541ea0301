"""The kept prefix among few tokens of a row inside a kernel: how many come before each of them, and their mass.

A search by halves takes a reduction over the program for every halving, one after the other. To compare each of 256 tokens with
each takes two, and tells the rank of all of them and the mass before them, so that top_k, top_p and both are decided at once.
"""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from pallas_kernels import kept, noise
from pallas_kernels import triton_prefix as prefix
from pallas_kernels.kept import Kept, Mass
from pallas_kernels.triton_prefix import Row
from pallas_kernels.triton_rows import barrier, listed_ids, scatter, tokens_at
from pallas_kernels.triton_shapes import RANKED, Inputs, Shape

WIDTH = 32  # tokens are `[RANKED // WIDTH, WIDTH]`, and compared with `WIDTH` at a time: a warp reduces a row of them alone
RANK = 20  # bits for the fine words of all of them; the rank is above
ROUNDS = 24  # of halving, at most


class Found(NamedTuple):
    """The end of the prefix that top_k and top_p keep, and whether the tokens given settle it."""

    end: Kept
    is_found: Any


class Ranked(NamedTuple):
    """Tokens and what comes before them, `[RANKED // WIDTH, WIDTH]`; logits from `number` on, a scalar, are -inf."""

    x: Any
    ids: Any
    rank: Any
    mass: Any  # their own; None without top_p, as the next
    above: Any  # of those before them, carried
    number: Any


def guess_of(lane_top, num_groups: int, wanted):
    """A value that about `wanted` numbers may reach, given the largest of every lane, `[lanes]`; -inf if nothing can be said.

    So many numbers reach a value that is the largest of a share of the lanes. Of eight lanes the largest of the lesser ones of
    four pairs is about the median, and no outlier; among these values, which are few, is one of about that rank.
    """
    lanes = lane_top.shape[0]
    middle = jnp.max(jnp.min(lane_top.reshape(lanes // 8, 4, 2), axis=2), axis=1)
    rank = jnp.sum(lane_top[:, None] > middle[None], axis=0, dtype=jnp.int32)
    empty = jnp.exp2(jnp.log2(1.0 - wanted.astype(jnp.float32) / num_groups) * (num_groups / lanes))
    return jnp.max(jnp.where(rank.astype(jnp.float32) >= lanes * (1.0 - empty), middle, -jnp.inf))


def bound_of(over, ends, guess, wanted, most: int):
    """(value, number): a value that from `wanted` to `most` things reach, and how many do: `guess`, or what halving finds
    between the `ends()`, the least finite thing and the largest. A value may be reached by fewer, if it is the lowest there is,
    or where many tie; it is inf where more than `most` are the largest.
    """
    guess = jnp.maximum(guess, prefix.LEAST_FINITE)
    number = over(guess)

    def halve(state):
        low, high, num_over, rounds = state
        middle = 0.5 * low + 0.5 * high
        num = over(middle)
        fits = num <= most
        return jnp.where(fits, low, middle), jnp.where(fits, middle, high), jnp.where(fits, num, num_over), rounds + 1

    def search():
        (least, largest), is_low = ends(), number > most
        state = (jnp.where(is_low, jnp.maximum(guess, least), least), jnp.where(is_low, largest, guess),
                 jnp.where(is_low, 0, number), jnp.int32(0))
        goes_on = lambda s: (s[2] < wanted) & (s[3] < ROUNDS) & (s[0] < s[1])  # noqa: E731
        _, high, num_over, _ = lax.while_loop(goes_on, halve, state)
        return jnp.where(num_over > 0, high, jnp.inf), num_over

    is_done = (number <= most) & ((number >= wanted) | (guess == prefix.LEAST_FINITE))
    return prefix.branch(is_done, lambda: (guess, number), search)


def write_down(shape: Shape, ref, row, ids, is_in):
    """Writes down the ids of tokens `[groups, 16]` where `is_in` says so, as many as `RANKED`.

    One store of all of them: Triton moves what it needs to other threads, once, and would for each store of a column.
    """
    lane = lax.broadcasted_iota(jnp.int32, (1, noise.GROUP), 1)
    bits = jnp.sum(jnp.where(is_in, jnp.int32(1) << lane, 0), axis=1, dtype=jnp.int32)
    count = lax.population_count(bits)
    first = prefix.cumsum(count) - count
    places = first[:, None] + lax.population_count(bits[:, None] & ((jnp.int32(1) << lane) - 1))
    scatter(shape, ref, row, places, ids, is_in & (places < RANKED))


def rank(shape: Shape, refs: Inputs, ref, row, own: Row, number) -> Ranked:
    """Of the first `number` tokens that are written down."""
    barrier(shape)
    place = lax.broadcasted_iota(jnp.int32, (RANKED // WIDTH, WIDTH), 0) * WIDTH
    place += lax.broadcasted_iota(jnp.int32, place.shape, 1)
    ids = listed_ids(shape, ref, row, place, number)
    x = tokens_at(shape, refs, row, ids, place < number)[1]
    mass = None if own.top_p is None else prefix.masses(own)(x, ids)
    words = () if mass is None else (mass.whole, mass.fine + (1 << RANK))
    for i, word in enumerate((lax.bitcast_convert_type(x, jnp.int32), *words), 1):
        shape.plt.store(ref.at[row, RANKED * i + place], word)
    barrier(shape)

    def compare(chunk, sums):
        """With some of them, which lie along the middle axis."""
        others = jnp.asarray(chunk, jnp.int32) * WIDTH + lax.broadcasted_iota(jnp.int32, (WIDTH,), 0)
        loaded = [shape.plt.load(ref.at[row, RANKED * i + others]) for i in range(2 + len(words))]
        other_ids, bits, *their = (a[None, :, None] for a in loaded)
        other = lax.bitcast_convert_type(bits, jnp.float32)
        is_before = (other > x[:, None]) | ((other == x[:, None]) & (other_ids < ids[:, None]))
        return tuple(a + jnp.where(is_before, word, 0) for a, word in zip(sums, their or [1], strict=True))

    nothing = jnp.zeros((RANKED // WIDTH, WIDTH, WIDTH), jnp.int32)
    chunks = lax.div(number + (WIDTH - 1), jnp.int32(WIDTH))
    sums = lax.fori_loop(0, chunks, compare, (nothing,) * max(len(words), 1))
    *whole, rank = (jnp.sum(a, axis=1, dtype=jnp.int32) for a in sums)
    if mass is None:
        return Ranked(x, ids, rank, None, None, number)
    return Ranked(x, ids, rank >> RANK, mass, kept.carried(whole[0], rank & ((1 << RANK) - 1)), number)


def of_all(reduce, a):
    """Rows of a warp first: what is left is reduced by every warp alone."""
    return reduce(reduce(a, axis=0))


def end_among(tokens: Ranked, own: Row, is_all, vocab: int) -> Found:
    """Among tokens that are all above some logit, and all that exist if `is_all`."""
    is_k, is_p = prefix.is_on(own, vocab)
    place = lax.broadcasted_iota(jnp.int32, tokens.x.shape, 0) * WIDTH + lax.broadcasted_iota(jnp.int32, tokens.x.shape, 1)
    is_kept, k_found, p_found = place < tokens.number, ~is_k, is_k & ~is_k
    if own.top_k is not None:
        is_kept &= ~is_k | (tokens.rank < own.top_k)
        k_found |= is_all | (tokens.number >= own.top_k)
    if own.top_p is not None:
        add = functools.partial(of_all, functools.partial(jnp.sum, dtype=jnp.int32))
        there = kept.carried(*(add(jnp.where(is_kept, words, 0)) for words in tokens.mass))
        target = kept.share(kept.either(is_k, there, prefix.everything(own)), own.top_p)
        p_found = is_p & k_found & (is_all | kept.at_least(there, target))
        is_kept &= ~is_p | ~kept.at_least(tokens.above, prefix.least_of(target, there))  # what comes before is not enough
    is_found = ~(is_p & ~k_found) & ((is_k & k_found) | p_found)
    return Found(kept.either(is_found, last_of(tokens, is_kept), prefix.no_end(vocab)), is_found)


def end_below(tokens: Ranked, by_count, above: Mass, target: Mass) -> Kept:
    """The end of the shortest prefix whose count or mass is at least `target`, where these are the tokens among which it is and
    `above` is that of those before all of them."""
    before = prefix.counted(tokens.rank)
    if tokens.above is not None:
        before = kept.either(by_count, Mass(tokens.rank, jnp.zeros_like(tokens.rank)), tokens.above)
    place = lax.broadcasted_iota(jnp.int32, tokens.x.shape, 0) * WIDTH + lax.broadcasted_iota(jnp.int32, tokens.x.shape, 1)
    return last_of(tokens, (place < tokens.number) & ~kept.at_least(kept.plus(above, before), target))


def last_of(tokens: Ranked, is_kept) -> Kept:
    """The last of those that are kept."""
    last = of_all(jnp.min, jnp.where(is_kept, tokens.x, jnp.inf))
    return Kept(kept.ordered_keys(last), of_all(jnp.max, jnp.where(is_kept & (tokens.x == last), tokens.ids, -1)))
