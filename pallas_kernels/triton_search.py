"""`search` on NVIDIA GPUs, through Pallas' Triton backend: some programs a row, which share its groups.

The tiles of a row are put into columns, and with n programs the i-th has the columns whose best bounds have rank i, n + i,
2 n + i, ... among them. It looks at its groups in the order of their bounds until the best score under r is above those. So
what is looked at first is what is likely to win, no program looks at what only its own share of the row recommends, and to
choose takes two reductions and not as many as there are programs. The programs of a row tell each other what they have found
through one number in memory, the leader's score. What it is when they look changes how much they do and never what they find:
a group that could have won is looked at, whoever is first. A tile says its best group and what bounds the others, which follow
one by one.

On one shard of several, a floor ends the search: a shard does not hear of what the others find.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import dual, finish, kept, noise, race, search
from pallas_kernels.logits import Elementwise, model_logits, processed_logits
from pallas_kernels.triton_finish import given, group_option, group_products, like
from pallas_kernels.vectors import pack

MOST = 64  # groups that a shard looks at on average where their bounds alone decide: at most exp(-x) groups on average have a
# score above x, for every p
LEAST, FORCED = -0x7F800001, 0x7F000000  # keys of -inf, and of more than any bound
COLUMNS = 128  # that a row's tiles are put into
WARPS = 16  # of a program


def choose_shares(num_rows: int) -> int:
    """Programs for a row: a few more than groups that are mostly looked at, as far as they run at the same time."""
    return 16 if num_rows <= 8 else 8 if num_rows <= 16 else 4 if num_rows <= 64 else 2


def arguments_of(side: dual.Side, vectors) -> tuple[dict, dict]:
    """(what kernels read of a law, what is fixed of it): its normaliser `[rows]`; `vectors` of `pack`, h, w and dense options,
    unless all is on one token."""
    has_table = side.h is not None
    arrays = {"normalizer": side.normalizer, "vectors": vectors if has_table else None, "h": side.h, "w": side.w,
              "dense": given(side.options)}
    return arrays, {"d_model": side.h.shape[1] if has_table else None, "vocab_axis": side.vocab_axis,
                    "dense": tuple(side.options.dense()), "has_valid": side.options.valid is not None,
                    "scale": side.options.scale, "soft_cap": side.options.soft_cap}


def vectors_at(plt, ref, columns, zero, num_keys) -> tuple[Any, Any]:
    """(t, keys) of `pack` at some columns; t None where there are none."""
    if ref is None:
        return None, ()
    t, *keys = (plt.load(ref.at[zero + i, columns]) for i in (0, *range(2, 2 + num_keys)))
    return lax.bitcast_convert_type(t, jnp.float32), tuple(keys)


def to_memory(key):
    """A key of `kept.ordered_keys` as a number that sorts like it, and that memory full of zeros is below."""
    return lax.bitcast_convert_type(key ^ jnp.int32(kept.LOWEST), jnp.uint32)


def from_memory(number):
    """The key, at least that of -inf."""
    return jnp.maximum(lax.bitcast_convert_type(number, jnp.int32) ^ jnp.int32(kept.LOWEST), LEAST)


def group_logits(plt, refs, law, raw, row, first, vocab):
    """(ids, processed logits) `[16, 1]` of the group whose first id is `first`, from its `products`; -inf past the end."""
    ids = first + lax.broadcasted_iota(jnp.int32, (noise.GROUP, 1), 0)
    *dense, valid = (*refs["dense"], None) if not law["has_valid"] else refs["dense"]
    own = Elementwise(**{name: group_option(plt, ref, row, first, ids, vocab)
                         for name, ref in zip(law["dense"], dense, strict=True)})
    end = vocab if valid is None else jnp.minimum(plt.load(valid.at[pl.ds(0, 1)]), vocab)
    model = model_logits(jnp.sum(raw, axis=1)[:, None], law["scale"], law["soft_cap"], own.weight_scale)
    return ids, processed_logits(model, own, ids < end)


class Row(NamedTuple):
    """A row of a law inside a kernel: what `arguments_of` says, the number of the row, t and normaliser `[1]`."""

    refs: dict
    law: dict
    row: Any
    t: Any
    known: Any  # a `dual.Normalizer`

    def products(self, plt, first, zero, vocab, wanted):
        """`group_products`, or None."""
        if self.refs["h"] is None:
            return None
        return group_products(plt, self.refs["h"], self.refs["w"], self.row, first, zero, vocab=vocab,
                              d_model=self.law["d_model"], vocab_axis=self.law["vocab_axis"], wanted=wanted)


def drawn_in(plt, p: Row, raw, won: race.Race, first, keys, *, sample, vocab):
    """(ids, processed logits, draw) from a group of the row's race, whose first id is `first`, and its products."""
    ids, x = group_logits(plt, p.refs, p.law, raw, p.row, first, vocab)
    return ids, x, finish.draw_in_group(keys, p.t, won, None, jnp.full_like(won.winner, first), ids, x, x, vocab=vocab,
                                        sample=sample)


def share_of_search(plt, p: Row, q: Row, keys, factor, told_ref, share, leader_ref, leader_at, won: race.Race | None = None, *,
                    sample, vocab, width, shares, floor):
    """What one program does: `search.Found` `[1]` without a bound, of its share of the groups; and with a race of the row, the
    token drawn in it and its log-probability, or NO_ID and 0 from programs that did not look at the group that won. That group
    is looked at first, even with factor 0.

    `p.known` needs no token where there is a race.
    """
    zero = share - share  # a start that is not a constant: JAX refuses slices that it can see to end out of bounds
    tiles, in_tile = pl.cdiv(vocab, width), width // noise.GROUP
    padded = pl.next_power_of_2(tiles)
    columns = min(COLUMNS, padded)
    shape = padded // columns, columns
    tile = columns * lax.broadcasted_iota(jnp.int32, shape, 0) + lax.broadcasted_iota(jnp.int32, shape, 1)
    best, second, winner = race.untold(plt.load(told_ref.at[tile, p.row], mask=tile < tiles, other=0))

    def ranked(score):
        """Bounds as integers that sort like them, the number of the tile in their last bits."""
        bound = jnp.where((tile < tiles) & (factor > 0.0)[:, None], search.bounds(score, p.t[:, None], p_column), -jnp.inf)
        return (kept.ordered_keys(bound) & -padded) | tile

    p_column = jax.tree.map(lambda x: x[:, None], p.known)
    none, of_best, of_others = (ranked(x) for x in (jnp.full_like(best, -jnp.inf), best, second))
    bound_of = lambda rank: kept.logits_of(rank | (padded - 1))  # noqa: E731  (the largest that its integer leaves open)
    if won is not None:
        first_of_won = jnp.max(jnp.where(won.winner == race.NO_ID, 0, won.winner))
        is_won = tile == lax.div(first_of_won, jnp.int32(width))
        of_best = jnp.where(is_won, (FORCED & -padded) | tile, of_best)
        winner = jnp.where(is_won, lax.div(lax.rem(first_of_won, jnp.int32(width)), jnp.int32(noise.GROUP)), winner)
    of_column = jnp.max(of_best, axis=0)
    rank = jnp.sum(of_column[:, None] > of_column[None, :], axis=0, dtype=jnp.int32)
    is_mine = (lax.rem(rank, jnp.int32(shares)) == share)[None, :]

    def next_of(done):
        """(bound of each tile of this program, the largest), where `done` groups of each tile are behind it."""
        left = jnp.where(done == 0, of_best, jnp.where(done < in_tile, of_others, none))
        left = jnp.where(is_mine, left, none)
        return left, jnp.max(left)

    def look(state):
        done, rank, leader, drawn, log_drawn, high, low, token, log_p, mass = state
        is_next = next_of(done)[0] == rank
        number = jnp.max(jnp.where(is_next, winner + done, 0))
        done = jnp.where(is_next, done + 1, done)
        first = (rank & (padded - 1)) * width + noise.GROUP * lax.rem(number, jnp.int32(in_tile))
        # All loads before all else that waits.
        is_asked = jnp.sum(factor) > 0.0
        raw_p, raw_q = p.products(plt, first, zero, vocab, True), q.products(plt, first, zero, vocab, is_asked)
        known = p.known
        if won is None:
            ids, x = group_logits(plt, p.refs, p.law, raw_p, p.row, first, vocab)
        else:
            ids, x, own = drawn_in(plt, p, raw_p, won, first, keys, sample=sample, vocab=vocab)
            is_it = first == first_of_won
            known = known._replace(token=jnp.where(is_it, own.token, -1), token_log_prob=own.tempered_log_prob)
            drawn, log_drawn = jnp.where(is_it, own.token, drawn), jnp.where(is_it, own.tempered_log_prob, log_drawn)
        side = dual.Side(p.refs["h"], None, p.t, Elementwise(), known)
        log_ps = jnp.where(x == -jnp.inf, -jnp.inf, dual.log_law(x, ids, side))
        side = dual.Side(q.refs["h"], None, q.t, Elementwise(), q.known)
        if raw_q is None:
            log_qs = dual.log_law(None, ids, side)
        else:
            x = group_logits(plt, q.refs, q.law, raw_q, q.row, first, vocab)[1]
            log_qs = jnp.where(x == -jnp.inf, -jnp.inf, dual.log_law(x, ids, side))
        new = search.score_groups(dual.log_residual(log_ps, log_qs, factor), log_ps, keys, first[None], sample=sample)
        better = (new.high > high) | ((new.high == high) & (new.low > low))
        pick = lambda new, old: jnp.where(better, new, old)  # noqa: E731
        high, low, mass = pick(new.high, high), pick(new.low, low), mass + new.mass
        # Nobody stops for what may be rounding: then all is looked at.
        mine = jnp.where((high > -jnp.inf) & (mass > search.NEGLIGIBLE), high + low, -jnp.inf)
        mine = kept.ordered_keys(jnp.max(mine))
        heard = from_memory(plt.atomic_max(leader_ref, leader_at, to_memory(mine)))
        # The body reads all that the loop carries: Triton's layouts crash on a number that only the condition reads.
        leader = jnp.maximum(jnp.maximum(heard, mine), leader)
        token, log_p = pick(new.token, token), pick(new.log_p, log_p)
        return done, next_of(done)[1], leader, drawn, log_drawn, high, low, token, log_p, mass

    def goes_on(state):
        _, rank, leader, *_ = state
        return bound_of(rank) > jnp.maximum(floor, kept.logits_of(leader))

    number = lambda value, dtype: jnp.full((1,), value, dtype)  # noqa: E731
    nothing = (number(race.NO_ID, jnp.int32), number(0.0, jnp.float32), number(-jnp.inf, jnp.float32),
               number(0.0, jnp.float32), number(race.NO_ID, jnp.int32), number(-jnp.inf, jnp.float32),
               number(0.0, jnp.float32))
    done = jnp.zeros_like(tile)
    leader = from_memory(plt.load(leader_ref.at[leader_at]))
    start = done, next_of(done)[1], leader, *nothing
    *_, drawn, log_drawn, high, low, token, log_p, mass = lax.while_loop(goes_on, look, start)
    return search.Found(high, low, token, log_p, mass, None), drawn, log_drawn


def _kernel(
    *refs,  # of each law what `arguments_of` lists; rows of both laws i32, factor f32, leader u32 [searches]; scores i32
    # [tiles, all rows]; outputs [shares, searches]; leader again
    structure, laws, num_keys, plt, shares, **options,
):
    num_inputs = structure.num_leaves
    target, draft, (place_ref, draft_place_ref, factor_ref, _), told_ref = jax.tree.unflatten(structure, refs[:num_inputs])
    *out_refs, leader_ref = refs[num_inputs:]
    search_id, share = (f(pl.program_id(0), jnp.int32(shares)) for f in (lax.div, lax.rem))  # int32 under x64 too
    rows = [plt.load(ref.at[search_id]) for ref in (place_ref, draft_place_ref)]
    (t, keys), (t_q, _) = (vectors_at(plt, refs["vectors"], pl.ds(row, 1), share - share, num)
                           for refs, row, num in ((target, rows[0], num_keys), (draft, rows[1], 0)))
    p, q = (Row(refs, law, row, t, jax.tree.map(lambda ref, row=row: plt.load(ref.at[pl.ds(row, 1)]), refs["normalizer"]))
            for refs, law, row, t in zip((target, draft), laws, rows, (t, t_q), strict=True))
    found, *_ = share_of_search(plt, p, q, keys, plt.load(factor_ref.at[pl.ds(search_id, 1)]), told_ref, share, leader_ref,
                                (search_id,), shares=shares, **options)
    for ref, value in zip(out_refs, found, strict=False):
        plt.store(ref.at[share, pl.ds(search_id, 1)], value)


def search_rows(scores: race.Scores, target: dual.Side, draft: dual.Side, keys, asked: search.Asked, *, plt, sample, vocab,
                is_shard=False, most=None, shares=None, interpret=False) -> search.Found:
    """As `search.search`; without a limit, or, on a shard or with `most`, with one on bounds in place of one on groups: that
    which leaves so many on average."""
    num_rows, most = asked.factor.shape[0], MOST if is_shard and most is None else most
    shares, floor = shares or choose_shares(num_rows), -math.inf if most is None else -math.log(most)
    (p, p_law), (q, q_law) = (arguments_of(side, None if side.h is None else pack(side.t, words))
                              for side, words in ((target, keys), (draft, ())))
    inputs = p, q, (*asked, jnp.zeros((num_rows,), jnp.uint32)), scores.told
    flat, structure = jax.tree.flatten(inputs)
    like_all = functools.partial(like, flat)
    out_shape = [like_all((shares, num_rows), kind) for kind in (jnp.float32,) * 2 + (jnp.int32,) + (jnp.float32,) * 2]
    body = functools.partial(_kernel, structure=structure, laws=(p_law, q_law), num_keys=len(keys), sample=sample, plt=plt,
                             vocab=vocab, width=scores.width, shares=shares, floor=floor)
    place = len(jax.tree.leaves(inputs[:3])) - 1
    high, low, token, log_p, mass, _ = pl.pallas_call(
        body, grid=(num_rows * shares,), out_shape=[*out_shape, like_all((num_rows,), jnp.uint32)],
        input_output_aliases={place: len(out_shape)}, interpret=interpret, name="gumbeljax_residual_search",
        compiler_params=plt.CompilerParams(num_warps=WARPS, num_stages=1))(*flat)
    bound = None if most is None else jnp.full_like(high, floor)
    return search.best_of(search.Found(high, low, token, log_p, mass, bound))
