"""The race over what filters keep of a row, once the end of its prefix is known: parts of the kernels of `triton_filtered`."""

import jax.numpy as jnp
from jax import lax

from pallas_kernels import filtered, noise, race
from pallas_kernels import finish as finishing
from pallas_kernels import triton_prefix as prefix
from pallas_kernels.finish import Draw
from pallas_kernels.kept import Kept
from pallas_kernels.triton_prefix import Row
from pallas_kernels.triton_rows import column_load, fold_listed, tokens_at
from pallas_kernels.triton_shapes import Raced, Shape, Summary


def kept_of(x, ids, own: Row, end: Kept):
    """Where the filters keep a token; logits and ids of any shape."""
    is_kept = prefix.is_in_prefix(x, ids, end)
    return is_kept if own.min_p is None else is_kept & prefix.is_above(x, own)


def scored(own: Row, end: Kept, group_top, ids, x, first_ids) -> Raced:
    """Each of groups `[n]`, logits and ids `[n, 16]`, in the race of their kept tokens."""
    weight = prefix.weight_below(x - race.finite_or_zero(group_top)[:, None], own)
    of_group = jnp.sum(jnp.where(kept_of(x, ids, own, end), weight, 0.0), axis=1)
    own_top = jnp.where(of_group > 0.0, group_top, -jnp.inf)  # the largest logit of a group is kept if any is
    high, low = race.scores(own_top, of_group, race.group_noise(own.keys, 0, first_ids), own.t)
    return Raced(high, low, first_ids, of_group * prefix.weight_of(own_top, own))


def best_of(groups: Raced) -> Raced:
    """The race of groups `[n]`."""
    return Raced(*race.best_score(*groups[:3]), jnp.sum(groups.total))


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


def race_listed(shape: Shape, refs, own: Row, end: Kept, ref, row, number) -> Raced:
    """The race of the groups that are listed, in order. Every place in a block has a race of its own, until the end."""
    size = shape.streamed

    def look(best: Raced, x, ids, groups):  # groups from a load: each thread makes its own noise
        new = scored(own, end, jnp.max(x, axis=1), ids, x, noise.GROUP * groups)
        better = (new.high > best.high) | ((new.high == best.high) & (new.low > best.low))  # of equals, the first
        high, low, winner = (jnp.where(better, a, b) for a, b in zip(new[:3], best[:3], strict=True))
        return Raced(high, low, winner, best.total + new.total)

    nobody = Raced(*(jnp.full((size,), *a) for a in (
        (-jnp.inf, jnp.float32), (0.0, jnp.float32), (race.NO_ID, jnp.int32), (0.0, jnp.float32))))
    return best_of(fold_listed(shape, refs, ref, row, number, look, nobody))


def in_winner(shape: Shape, refs, own: Row, end: Kept, summary: Summary, won: Raced, row) -> Draw:
    """The draw of a row that has raced."""
    first = jnp.where(won.winner == race.NO_ID, 0, won.winner)
    ids = first + lax.broadcasted_iota(jnp.int32, (noise.GROUP,), 0)
    model, x = tokens_at(shape, refs, row, jnp.minimum(ids, shape.vocab - 1), ids < shape.vocab)
    return drawn(shape, own, won, summary, row, ids, model, jnp.where(kept_of(x, ids, own, end), x, -jnp.inf))
