"""`search` on NVIDIA GPUs, through Pallas' Triton backend: some programs a row, which share its groups by rank.

With n programs, the i-th looks at the groups whose bounds have rank i, n + i, 2 n + i, ..., until the best score under r is
above those. Every program ranks the tiles of the row for itself: what is looked at first is what is likely to win, and no
program looks at what only its own share of the row recommends. The programs of a row tell each other what they have found
through one number in memory, `leader`. What it is when they look changes how much they do and never what they find: a group
that could have won is looked at, whoever is first. A tile says its best group and what bounds the others, which follow one by
one.

On one shard of several, a floor ends the search: a shard does not hear of what the others find.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import dual, kept, noise, race, search
from pallas_kernels.logits import Elementwise, model_logits, processed_logits
from pallas_kernels.triton_finish import given, group_option, group_products, like
from pallas_kernels.triton_merge import pack

MOST = 64  # groups that a shard looks at on average where their bounds alone decide: at most exp(-x) groups on average have a
# score above x, for every p
LEAST = -0x7F800001  # the key of -inf
WARPS, CHUNK = 16, 2048  # of a program; coordinates that it reads at a time


def choose_shares(num_rows: int) -> int:
    """Programs for a row: a few more than groups that are mostly looked at, as far as they run at the same time."""
    return 8 if num_rows <= 16 else 4 if num_rows <= 64 else 2


def arguments_of(side: dual.Side, keys=()) -> tuple[dict, dict]:
    """(what kernels read of a law, what is fixed of it): its normaliser `[rows]`; temperatures and keys as `pack` puts them, h,
    w and dense options, unless all is on one token."""
    has_table = side.h is not None
    arrays = {"normalizer": side.normalizer, "vectors": pack(side.t, keys) if has_table else None, "h": side.h, "w": side.w,
              "dense": given(side.options)}
    return arrays, {"d_model": side.h.shape[1] if has_table else None, "vocab_axis": side.vocab_axis,
                    "dense": tuple(side.options.dense()), "has_valid": side.options.valid is not None,
                    "scale": side.options.scale, "soft_cap": side.options.soft_cap}


def law_of_rows(plt, refs, rows, zero, num_keys=0, **masking):
    """(t, keys, normaliser) of some rows of a law."""
    t, *keys = (None,) if refs["vectors"] is None else (
        plt.load(refs["vectors"].at[zero + i, rows], **masking) for i in (0, *range(2, 2 + num_keys)))
    known = jax.tree.map(lambda ref: plt.load(ref.at[rows], **masking), refs["normalizer"])
    return t if t is None else lax.bitcast_convert_type(t, jnp.float32), tuple(keys), known


def _kernel(
    *refs,  # of each law what `arguments_of` lists; rows of both laws i32, factor f32, leader i32 [searches]; scores i32
    # [tiles, all rows]; outputs [shares, searches]; leader again
    structure, laws, num_keys, sample, plt, vocab, width, shares, floor,
):
    num_inputs = structure.num_leaves
    target, draft, (place_ref, draft_place_ref, factor_ref, _), told_ref = jax.tree.unflatten(structure, refs[:num_inputs])
    *out_refs, leader_ref = refs[num_inputs:]
    row, share = (f(pl.program_id(0), jnp.int32(shares)) for f in (lax.div, lax.rem))  # int32 under x64 too
    zero = row - row  # a start that is not a constant: JAX refuses slices that it can see to end out of bounds, masked or not
    place, draft_place = (plt.load(ref.at[row]) for ref in (place_ref, draft_place_ref))
    factor = plt.load(factor_ref.at[pl.ds(row, 1)])
    t, keys, known = law_of_rows(plt, target, pl.ds(place, 1), zero, num_keys)

    tiles, in_tile = pl.cdiv(vocab, width), width // noise.GROUP
    padded = pl.next_power_of_2(tiles)
    tile = lax.broadcasted_iota(jnp.int32, (padded,), 0)
    best, second, winner = race.untold(plt.load(told_ref.at[tile, place], mask=tile < tiles, other=0))

    def ranked(score):
        """Bounds as integers that sort like them, the number of the tile in their last bits."""
        bound = jnp.where((tile < tiles) & (factor > 0.0), search.bounds(score, t, known), -jnp.inf)
        return (kept.ordered_keys(bound) & -padded) | tile

    none, of_best, of_others = (ranked(x) for x in (jnp.full_like(best, -jnp.inf), best, second))
    bound_of = lambda rank: kept.logits_of(rank | (padded - 1))  # noqa: E731  (the largest that its integer leaves open)

    def next_of(done):
        """(groups of each tile that are done, rank and number in its tile of this program's next group)."""
        mine, number = jnp.int32(0), jnp.zeros_like(tile)
        for i in range(shares):
            left = jnp.where(done == 0, of_best, jnp.where(done < in_tile, of_others, none))
            first = jnp.max(left)
            is_first, is_mine = left == first, share == i
            mine, number = jnp.where(is_mine, first, mine), jnp.where(is_mine & is_first, winner + done, number)
            done = jnp.where(is_first, done + 1, done)
        return done, mine, jnp.max(number)

    def log_law(refs, law, row, first):
        t, _, known = law_of_rows(plt, refs, pl.ds(row, 1), zero)
        side = dual.Side(refs["h"], None, t, Elementwise(), known)
        tokens = first + lax.broadcasted_iota(jnp.int32, (noise.GROUP, 1), 0)
        if refs["h"] is None:
            return dual.log_law(None, tokens, side)
        raw = group_products(plt, refs["h"], refs["w"], row, first, zero, vocab=vocab, d_model=law["d_model"],
                             vocab_axis=law["vocab_axis"], chunk=min(CHUNK, pl.next_power_of_2(law["d_model"])))
        *dense, valid = (*refs["dense"], None) if not law["has_valid"] else refs["dense"]
        own = Elementwise(**{name: group_option(plt, ref, row, first, tokens, vocab)
                             for name, ref in zip(law["dense"], dense, strict=True)})
        end = vocab if valid is None else jnp.minimum(plt.load(valid.at[pl.ds(0, 1)]), vocab)
        x = processed_logits(model_logits(raw[:, None], law["scale"], law["soft_cap"], own.weight_scale), own, tokens < end)
        return jnp.where(x == -jnp.inf, -jnp.inf, dual.log_law(x, tokens, side))

    def look(state):
        done, mine, number, leader, high, low, token, log_p, mass = state
        first = (mine & (padded - 1)) * width + noise.GROUP * lax.rem(number, jnp.int32(in_tile))
        log_ps, log_qs = (log_law(*of_law, first) for of_law in zip((target, draft), laws, (place, draft_place), strict=True))
        new = search.score_groups(dual.log_residual(log_ps, log_qs, factor), log_ps, keys, first[None], sample=sample)
        better = (new.high > high) | ((new.high == high) & (new.low > low))
        pick = lambda new, old: jnp.where(better, new, old)  # noqa: E731
        high, low, mass = pick(new.high, high), pick(new.low, low), mass + new.mass
        # Nobody stops for what may be rounding: then all is looked at.
        mine = kept.ordered_keys(jnp.max(jnp.where((high > -jnp.inf) & (mass > search.NEGLIGIBLE), high + low, -jnp.inf)))
        # The body reads all that the loop carries: Triton's layouts crash on a number that only the condition reads.
        leader = jnp.maximum(jnp.maximum(plt.atomic_max(leader_ref, (row,), mine), mine), leader)
        return *next_of(done), leader, high, low, pick(new.token, token), pick(new.log_p, log_p), mass

    def goes_on(state):
        _, mine, _, leader, *_ = state
        return bound_of(mine) > jnp.maximum(floor, kept.logits_of(leader))

    number = lambda value, dtype: jnp.full((1,), value, dtype)  # noqa: E731
    nothing = (number(-jnp.inf, jnp.float32), number(0.0, jnp.float32), number(race.NO_ID, jnp.int32),
               number(-jnp.inf, jnp.float32), number(0.0, jnp.float32))
    found = lax.while_loop(goes_on, look, (*next_of(jnp.zeros_like(tile)), plt.load(leader_ref.at[row]), *nothing))[4:]
    for ref, value in zip(out_refs, found, strict=True):
        plt.store(ref.at[share, pl.ds(row, 1)], value)


def search_shares(scores: race.Scores, target: dual.Side, draft: dual.Side, keys, asked: search.Asked, leader, *, plt, sample,
                  vocab, most=None, shares=None, interpret=False) -> search.Found:
    """What the programs of each row found, `[shares, searches]`. `leader`: keys of -inf, int32 `[searches]`, donated. `most`: a
    limit on bounds, that which leaves this many groups."""
    num_rows = asked.factor.shape[0]
    shares, floor = shares or choose_shares(num_rows), -math.inf if most is None else -math.log(most)
    (p, p_law), (q, q_law) = arguments_of(target, keys), arguments_of(draft)
    inputs = p, q, (*asked, leader), scores.told
    flat, structure = jax.tree.flatten(inputs)
    like_all = functools.partial(like, flat)
    out_shape = [like_all((shares, num_rows), kind) for kind in (jnp.float32,) * 2 + (jnp.int32,) + (jnp.float32,) * 2]
    body = functools.partial(_kernel, structure=structure, laws=(p_law, q_law), num_keys=len(keys), sample=sample, plt=plt,
                             vocab=vocab, width=scores.width, shares=shares, floor=floor)
    place = len(jax.tree.leaves(inputs[:3])) - 1
    high, low, token, log_p, mass, _ = pl.pallas_call(
        body, grid=(num_rows * shares,), out_shape=[*out_shape, like_all((num_rows,), jnp.int32)],
        input_output_aliases={place: len(out_shape)}, interpret=interpret, name="gumbeljax_residual_search",
        compiler_params=plt.CompilerParams(num_warps=WARPS, num_stages=1))(*flat)
    return search.Found(high, low, token, log_p, mass, None if most is None else jnp.full_like(high, floor))


def search_rows(scores: race.Scores, target: dual.Side, draft: dual.Side, keys, asked: search.Asked, *, is_shard=False,
                most=None, **options) -> search.Found:
    """As `search.search`; without a limit, or, on a shard, with one on bounds in place of one on groups."""
    leader = jnp.full_like(asked.target_row, LEAST)
    most = MOST if is_shard and most is None else most
    return search.best_of(search_shares(scores, target, draft, keys, asked, leader, most=most, **options))
