"""The kept set of a vocabulary that is cut over mesh axes: what the shards tell each other to find it.

It is the set of `pallas_kernels.kept`: a prefix of one order of all tokens, whose end is decided by sums of integers, and those
are the same on every mesh. A call makes these exchanges, each only if a filter needs it:

    1. every shard's largest logit, and its sum of weights; for top_k and top_p also its 64 first tokens, as logits and ids
    2. for top_p, the mass of what top_k left, summed

The first tokens of all shards, down to the earliest of the shards' last ones, are the head of the order, without a gap. If the
prefix ends in the head, every device finds the end on its own. If some row's does not, all shards search for it in rounds: 15
places where it could end, the masses up to there summed over the shards, and a 16th of the interval is left. A logit takes 8
rounds, an id among equal logits one for every 4 bits of the vocabulary's size. Whether a round is made depends on numbers
that all shards have heard alone, so they make the same ones.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from gumbeljax import _mesh
from gumbeljax._typing import Array
from pallas_kernels import kept as search
from pallas_kernels import race
from pallas_kernels.kept import LOWEST, Filters, Kept, Mass

CANDIDATES = 64  # tokens that a shard sends
BITS = 4  # of the interval that a round decides
LEAST, MOST = -0x7F800001, 0x7F800000  # keys of -inf and of inf


class Head(NamedTuple):
    """The first tokens of all shards, `[rows, n]`, in no order; the key is `LOWEST` where one behind `last` may be missing."""

    keys: Array
    ids: Array
    last: Kept


class Tokens(NamedTuple):
    """The tokens of this shard, `[rows, width]`, with ids of the whole vocabulary."""

    keys: Array
    ids: Array


class Found(NamedTuple):
    """The kept set of this shard `[width, rows]`, and the mass of the tempered law of all, `[rows]` (total None: not asked)."""

    kept: Array
    top: Array
    total: Array | None


def first_tokens(x: Array, first) -> tuple[Array, Array]:
    """(keys, ids) `[rows, n]` of the first tokens of logits `[width, rows]`: they lie in the groups with the largest maxima."""
    x = search.orderly(x)
    maxima = jnp.max(search.grouped(x, -jnp.inf), axis=1).T
    groups = lax.top_k(maxima, min(CANDIDATES, maxima.shape[1]))[1]
    ids, pick = search.members(jnp.sort(groups, axis=1), x.shape[0])  # in order of id, so that of equals the first are taken
    values, place = lax.top_k(pick(x, -jnp.inf), min(CANDIDATES, x.shape[0]))
    return search.ordered_keys(values), first + jnp.take_along_axis(ids, place, axis=1)


def exchange(x: Array, t, first, axes, with_head: bool, with_total: bool):
    """(top, total or None, Head or None) of all shards, from this one's logits `[width, rows]`: one all-gather."""
    top, _, total = race.mass_over(x, t, jnp.int32(0))
    numbers = [top, total] if with_total else [top]
    said = [lax.bitcast_convert_type(jnp.stack(numbers), jnp.int32)]
    if with_head:
        said += [a.T for a in first_tokens(x, first)]
    heard = _mesh.gather((jnp.concatenate(said),), axes)[0]  # [shards, what is said, rows]
    floats = lax.bitcast_convert_type(heard[:, :len(numbers)], jnp.float32)
    top, total = race.mass_of(floats[:, 0], floats[:, 1], t) if with_total else (jnp.max(floats[:, 0], axis=0), None)
    if not with_head:
        return top, total, None
    keys, ids = jnp.split(heard[:, len(numbers):], 2, axis=1)  # [shards, n, rows]
    last = jnp.max(keys[:, -1], axis=0)
    last = Kept(last, race.first_where(keys[:, -1] == last, ids[:, -1]))
    if keys.shape[1] == x.shape[0]:  # all there are
        last = Kept(jnp.full_like(last.key, LEAST), last.id)
    keys, ids = (a.reshape(-1, a.shape[-1]).T for a in (keys, ids))
    is_head = search.is_kept(keys, ids, Kept(last.key[:, None], last.id[:, None]))
    return top, total, Head(jnp.where(is_head, keys, LOWEST), ids, last)


def sum_over_shards(mass: Mass, axes) -> Mass:
    """The masses of all shards, added up."""
    return search.carried(*lax.psum(jnp.stack(mass), axes))


def end_of_prefix(head: Head, tokens: Tokens, head_mass: Mass, mass: Mass, target: Mass, is_moot, axes, vocab: int) -> Kept:
    """The end of the shortest prefix with the target's mass; any end where `is_moot`."""
    in_head = jax.tree.map(lambda m: jnp.where(head.keys > LOWEST, m, 0), head_mass)
    key, id = search.end_of_prefix(head.keys, head.ids, in_head, target, vocab)
    id = jnp.where(key == head.last.key, jnp.minimum(id, head.last.id), id)  # more may be tied with the last
    is_found = is_moot | search.at_least(search.add_up(in_head, True), target) | (head.last.key <= LEAST)
    return in_rounds(tokens, mass, target, Kept(key, id), is_found, axes, vocab)


def in_rounds(tokens: Tokens, mass: Mass, target: Mass, end: Kept, is_found, axes, vocab: int) -> Kept:
    """The end of the prefix where `is_found` does not say that it is `end`: its key, then its id, each the last number at which
    a falling predicate holds. Ids fall, so they are searched as their negatives."""
    def places(low, high):
        gap, j = lax.bitcast_convert_type(high - low, jnp.uint32)[:, None], jnp.arange(1, 2**BITS, dtype=jnp.uint32)
        inside = (gap >> BITS) * j + (((gap & (2**BITS - 1)) * j) >> BITS)  # gap * j / 16, which may not fit
        return low[:, None] + lax.bitcast_convert_type(inside, jnp.int32)

    def one_round(state):
        low, high, key, in_ids = state
        at = places(low, high)
        ends = Kept(jnp.where(in_ids[:, None], key[:, None], at), jnp.where(in_ids[:, None], -at, vocab))
        is_in = search.is_kept(tokens.keys[:, None], tokens.ids[:, None], jax.tree.map(lambda a: a[..., None], ends))
        here = search.add_up(jax.tree.map(lambda m: m[:, None], mass), is_in)
        holds = search.at_least(sum_over_shards(here, axes), jax.tree.map(lambda a: a[:, None], target))
        holds |= at == low[:, None]  # as agreed: so a row that is done stays, and no target can keep an interval open
        low, high = jnp.max(jnp.where(holds, at, low[:, None]), axis=1), jnp.min(jnp.where(holds, high[:, None], at), axis=1)
        is_closed = high - low == 1
        turn = is_closed & ~in_ids  # from the key to the ids: that of the whole tie holds, none of it does not
        return (jnp.where(turn, -vocab, low), jnp.where(turn, 1, high), jnp.where(turn, low, key), in_ids | is_closed)

    def is_open(state):
        low, high, _, in_ids = state
        return jnp.any(~in_ids | (high - low != 1))

    start = jnp.where(is_found, -end.id, LOWEST), jnp.where(is_found, 1 - end.id, MOST + 1), end.key, is_found
    start, target = _mesh.vary((start, target))
    low, _, key, _ = lax.while_loop(is_open, one_round, start)
    return Kept(key, -low)


def kept_set(x: Array, t, filters: Filters, axes, *, with_total: bool) -> Found:
    """What the filters leave of processed logits `[width, rows]`, one shard's of several; NaN logits stay, to be seen later.

    t and filters are the same on all shards. `with_total`: the caller needs the mass of the tempered law.
    """
    x = lax.optimization_barrier(x)  # one value for every use, here and on the devices that hear of it
    width, vocab = x.shape[0], x.shape[0] * _mesh.num_shards(axes)
    first = _mesh.first_id(axes, width)
    top_k, top_p, min_p = filters
    top, total, head = exchange(x, t, first, axes, with_head=top_k is not None or top_p is not None,
                                with_total=with_total or top_p is not None)
    out = x > -jnp.inf
    if min_p is not None:
        out &= search.is_above(x, t, top, min_p)
    if head is None:
        return Found(out | jnp.isnan(x), top, total)
    keys = search.ordered_keys(x).T
    tokens = Tokens(keys, first + lax.broadcasted_iota(jnp.int32, keys.shape, 1))
    is_moot = ~(jnp.isfinite(top) & (t > 0.0))  # no law, or the greedy token's
    is_in = jnp.ones_like(keys, bool)
    if top_k is not None:
        is_off = (top_k <= 0) | (top_k >= vocab)
        count_of, count = (Mass(jnp.ones_like(a), jnp.zeros_like(a)) for a in (head.keys, keys))
        end = end_of_prefix(head, tokens, count_of, count, Mass(top_k, jnp.zeros_like(top_k)), is_moot | is_off, axes, vocab)
        end = jax.tree.map(lambda a, b: jnp.where(is_off, a, b), Kept(jnp.int32(LOWEST), jnp.int32(vocab)), end)
        is_in, in_head = (search.is_kept(a.keys, a.ids, jax.tree.map(lambda e: e[:, None], end)) for a in (tokens, head))
    if top_p is not None:
        weight = lax.optimization_barrier(search.weights(x, t, top)).T
        weight_of = search.weights(search.logits_of(head.keys).T, t, top).T
        mass_of, mass = search.fixed_point(weight_of, total), search.fixed_point(weight, total)
        if top_k is not None:
            mass_of, mass = (jax.tree.map(lambda m, i=i: jnp.where(i, m, 0), m) for m, i in ((mass_of, in_head), (mass, is_in)))
        base = sum_over_shards(search.add_up(mass, True), axes)
        target = search.share(base, top_p)
        target = jax.tree.map(lambda a, b: jnp.where(search.at_least(base, target), a, b), target, base)  # it is rounded
        is_off = top_p >= 1.0
        end = end_of_prefix(head, tokens, mass_of, mass, target, is_moot | is_off, axes, vocab)
        is_in &= is_off[:, None] | search.is_kept(keys, tokens.ids, jax.tree.map(lambda e: e[:, None], end))
    return Found(out & is_in.T | jnp.isnan(x), top, total)
