"""The race over what filters keep of a row, once the end of its prefix is known: parts of the kernels of `triton_filtered`."""

import jax.numpy as jnp
from jax import lax

from pallas_kernels import filtered, noise, race
from pallas_kernels import finish as finishing
from pallas_kernels import triton_prefix as prefix
from pallas_kernels.finish import Draw
from pallas_kernels.kept import Kept
from pallas_kernels.triton_prefix import Row
from pallas_kernels.triton_rows import column_load, groups_from, tokens_at, tokens_of
from pallas_kernels.triton_shapes import Raced, Shape, Summary


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


def race_in_chunks(shape: Shape, refs, own: Row, end: Kept, row, is_wanted) -> Raced:
    """The race over the chunks of a row that hold a piece that `is_wanted`, `[pieces and padding]`."""
    chunks = lax.div(lax.broadcasted_iota(jnp.int32, is_wanted.shape, 0), jnp.int32(shape.chunk // shape.piece))
    after = lambda chunk: jnp.min(jnp.where(is_wanted & (chunks > chunk), chunks, shape.num_pieces))  # noqa: E731

    def look(state):
        chunk, best = state[0], Raced(*state[1:])
        groups, is_there = groups_from(chunk * shape.chunk, shape.chunk, shape.num_groups)
        ids, _, x = tokens_of(shape, refs, row, groups, is_there)
        new = race_of(own, end, jnp.max(x, axis=1), ids, x, noise.GROUP * groups)
        better = (new.high > best.high) | ((new.high == best.high) & (new.low > best.low))  # of equals, the first
        return after(chunk), *(jnp.where(better, a, b) for a, b in zip(new[:3], best[:3], strict=True)), best.total + new.total

    nobody = jnp.float32(-jnp.inf), jnp.float32(0.0), jnp.int32(race.NO_ID), jnp.float32(0.0)
    _, *best = lax.while_loop(lambda state: state[0] < shape.num_pieces, look, (after(-1), *nobody))
    return Raced(*best)


def in_winner(shape: Shape, refs, own: Row, end: Kept, summary: Summary, won: Raced, row) -> Draw:
    """The draw of a row that has raced."""
    first = jnp.where(won.winner == race.NO_ID, 0, won.winner)
    ids = first + lax.broadcasted_iota(jnp.int32, (noise.GROUP,), 0)
    model, x = tokens_at(shape, refs, row, jnp.minimum(ids, shape.vocab - 1), ids < shape.vocab)
    return drawn(shape, own, won, summary, row, ids, model, jnp.where(kept_of(x, ids, own, end), x, -jnp.inf))
