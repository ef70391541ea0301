"""The race over what filters keep of a row, once the end of its prefix is known: parts of the kernels of `triton_filtered`."""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import filtered, kept, noise, race
from pallas_kernels import finish as finishing
from pallas_kernels import triton_prefix as prefix
from pallas_kernels.finish import Draw
from pallas_kernels.kept import Kept
from pallas_kernels.triton_prefix import Row
from pallas_kernels.triton_rows import (
    barrier,
    column_load,
    fetch,
    for_pieces,
    padded_load,
    put,
    row_of,
    split,
    tokens_at,
    tokens_of,
)
from pallas_kernels.triton_shapes import DRAWN, Raced, Shape, Summary


def kept_of(x, ids, own: Row, end: Kept):
    """Where the filters keep a token; logits and ids of any shape."""
    is_kept = prefix.is_in_prefix(x, ids, end)
    return is_kept if own.min_p is None else is_kept & prefix.is_above(x, own)


def race_of(own: Row, end: Kept, group_top, ids, x, first_ids) -> Raced:
    """The race of groups `[n]`, logits and ids `[n, 16]`, over their kept tokens."""
    weight = prefix.weight_below(x - race.finite_or_zero(group_top)[:, None], own)
    of_group = jnp.sum(jnp.where(kept_of(x, ids, own, end), weight, 0.0), axis=1)
    own_top = jnp.where(of_group > 0.0, group_top, -jnp.inf)  # the largest logit of a group is kept if any is
    high, low = race.scores(own_top, of_group, race.group_noise(own.keys, 0, first_ids), own.t)
    return Raced(*race.best_score(high, low, first_ids), jnp.sum(of_group * prefix.weight_of(own_top, own)))


def drawn(shape: Shape, own: Row, raced: Raced, summary: Summary, row, ids, model, x) -> Draw:
    """The draw of a row from its winning group, whose ids, model logits and kept logits are `[16]`; scalars."""
    kept_total = jnp.where(finishing.has_law(own.top, own.total), raced.total, jnp.nan)
    won = race.Race(*(a[None] for a in (raced.high, raced.low, raced.winner, own.top, kept_total)))
    mass, t = None, own.t[None]
    if shape.with_model:
        model_top = column_load(shape, summary.model_top, row, -jnp.inf)
        model_total = column_load(shape, summary.model_total, row, 0.0)
        model_top, model_total = race.mass_of(model_top, model_total, jnp.float32(1.0))
        mass = race.Mass(model_top[None], None, model_total[None])
    keys = tuple(key[None] for key in own.keys)
    draw = finishing.draw_in_group(keys, t, won, mass, jnp.min(ids)[None], ids[:, None], model[:, None], x[:, None],
                                   vocab=shape.vocab, sample=0)
    draw = filtered.with_tempered(draw, kept_total[None], own.top[None], own.total[None], t)
    return Draw(*(a.reshape(()) for a in draw))


def in_winner(shape: Shape, refs, state, end, summary: Summary, raced: Raced, row) -> Draw:
    """The draw of a row whose pieces have raced."""
    pieces = lambda ref, other: padded_load(shape, ref, row, shape.num_pieces, other)  # noqa: E731
    top, total, last = fetch(shape, (state.top, state.total, end), row)
    own = row_of(shape, refs, row, top, total)
    best = race.best_score(pieces(raced.high, -jnp.inf), pieces(raced.low, 0.0), pieces(raced.winner, race.NO_ID))
    won = Raced(*best, jnp.sum(pieces(raced.total, 0.0)))
    first = jnp.where(won.winner == race.NO_ID, 0, won.winner)
    ids = first + lax.broadcasted_iota(jnp.int32, (noise.GROUP,), 0)
    model, x = tokens_at(shape, refs, row, jnp.minimum(ids, shape.vocab - 1), ids < shape.vocab)
    return drawn(shape, own, won, summary, row, ids, model, jnp.where(kept_of(x, ids, own, last), x, -jnp.inf))


def race_rest(*refs, shape: Shape, trees):
    """Pieces of rows that are not drawn yet: the race of their groups over the kept tokens. The last piece of a row draws."""
    refs, state, end, summary, settled, _, out, draw, num_raced = split(refs, trees)

    def of_piece(row, kind, piece, groups, is_there):
        @pl.when((kind == DRAWN) & (piece == 0))
        def _():
            put(shape, draw, row, fetch(shape, settled, row))

        @pl.when(kind != DRAWN)
        def _():
            top, total, last = fetch(shape, (state.top, state.total, end), row)
            own = row_of(shape, refs, row, top, total)
            group_top = jnp.where(is_there, shape.plt.load(summary.group_top.at[row, groups]), -jnp.inf)
            may_win = (kept.ordered_keys(group_top) >= last.key) & prefix.is_above(group_top, own)
            ids, _model, x = tokens_of(shape, refs, row, groups, is_there)  # not in the branch: so all are fetched at once

            def raced():
                first_ids = noise.GROUP * jnp.where(may_win, groups, 0)  # from a load: so each thread makes noise of its own
                return race_of(own, last, group_top, ids, x, first_ids)

            def nobody():
                return Raced(jnp.float32(-jnp.inf), jnp.float32(0.0), jnp.int32(race.NO_ID), jnp.float32(0.0))

            put(shape, out, (row, piece), prefix.branch(jnp.max(may_win.astype(jnp.int32)) > 0, raced, nobody))
            barrier(shape)

            @pl.when(shape.plt.atomic_add(num_raced, (row,), jnp.int32(1)) == shape.num_pieces - 1)
            def _():
                put(shape, draw, row, in_winner(shape, refs, state, end, summary, out, row))

    for_pieces(shape, state.kind, of_piece)
