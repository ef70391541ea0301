"""What the shards of a vocabulary say to each other: a draw or a mass of each, and how they become one.

Every shard draws from its own ids and sends a few numbers per row; each then picks the winner of all. The bytes sent per
row and shard: 20 for a token, 36 with its log-probabilities, 12 for a greedy token, 16 for a log-probability. Under filters
the shards agree on the kept set first (`_cut_filters`); draws without replacement are in `_cut_ranks`.
"""

import functools

import jax.numpy as jnp
from jax import lax

from gumbeljax import _cut_filters, _mesh
from gumbeljax._call import Config, Operands
from gumbeljax._typing import Array
from pallas_kernels import filtered, many, race
from pallas_kernels.finish import Draw, Piece, at, has_law, log_normalizer_of, said
from pallas_kernels.logits import inverse_temperature, of_model


def local_piece(operands: Operands, keys, config: Config, num_samples: int | None, with_model: bool, sample: int = 0) -> Piece:
    """This shard's draw, with the noise of the whole vocabulary's ids; leaves `[rows]` or `[num_samples, rows]`. `sample`: the
    number of a single draw."""
    h, w, t, options = operands.h, operands.w, operands.t, operands.options(config)
    stages, shape = config.stages(), config.shape_arguments()
    if num_samples is None:
        return stages.piece(h, w, keys, t, options, sample=sample, with_model=with_model, **shape)
    model_mass = None
    if with_model:
        model_mass = stages.mass(h, w, jnp.ones_like(t), of_model(options), **shape)
    top, total = stages.groups(h, w, t, options, **shape)
    return many.pieces(h, w, keys, t, options, top, total, model_mass, num_samples=num_samples, vocab=config.vocab,
                       vocab_axis=config.vocab_axis)


def kept_logits(operands: Operands, local: Operands, config: Config, *, with_total: bool):
    """(model logits, processed logits that are -inf outside of the kept set, what was found) of this shard, `[width, rows]`;
    `local` are the operands typed as varying."""
    assert operands.filters is not None
    model, x = filtered.all_logits(local.h, local.w, local.options(config), **config.shape_arguments())
    found = _cut_filters.kept_set(x, operands.t, operands.filters, config.axis_name, with_total=with_total)
    return model, jnp.where(found.kept, x, -jnp.inf), found


def words_of(piece: Piece, numbers) -> Array:
    """The bits of what a shard says, int32 `[numbers, ...]`: as a kernel has put them, or put together here."""
    if piece.words is not None and piece.words.shape[0] == len(numbers):
        return piece.words
    return jnp.stack([lax.bitcast_convert_type(x, jnp.int32) for x in numbers])


def hear(piece: Piece, first, log_probs: bool, axes) -> tuple[Array, ...]:
    """What all shards say of their draws, the arguments of `merge_draws`; the first token of this one is `first`."""
    numbers = said(piece, first, log_probs)
    words, = _mesh.gather((words_of(piece, numbers),), axes)
    return unpack(words, numbers)


def unpack(words: Array, numbers) -> tuple[Array, ...]:
    """Words `[shards, numbers, ...]` as the numbers whose bits they are, each `[shards, ...]`."""
    return tuple(lax.bitcast_convert_type(words[:, i], x.dtype) for i, x in enumerate(numbers))


def draw(operands: Operands, keys, config: Config, *, num_samples: int | None, log_probs: bool, with_model: bool | None = None,
         sample: int = 0) -> Draw:
    """One draw from all shards. Pathwise that of one device when every shard starts at a multiple of 16.

    `with_model`: with the log-probability in the model's law too; as `log_probs` if None.
    """
    with_model = log_probs if with_model is None else with_model
    axes = config.axis_name
    local, keys = _mesh.vary((operands, keys), axes)
    first = _mesh.first_id(axes, config.vocab)
    keys = (*keys, jnp.full_like(keys[0], first.astype(jnp.uint32)))
    tempered_law = None
    if operands.filters is None:
        piece = local_piece(local, keys, config, num_samples, with_model, sample)
    else:
        model, kept, tempered_law = kept_logits(operands, local, config, with_total=log_probs)
        piece = filtered.race_in(kept, keys, local.t, vocab=config.vocab, num_samples=num_samples)
        if log_probs:
            own, mass = filtered.with_model(piece.draw, model)
            piece = Piece(own, piece.won, mass)
    heard = hear(piece, first, log_probs, axes)
    out = merge_draws(*heard, t=operands.t)
    if tempered_law is None or not log_probs:
        return out
    kept_total = race.mass_of(heard[3], heard[4], operands.t)[1]
    return filtered.with_tempered(out, kept_total, tempered_law.top, tempered_law.total, operands.t)


def _best(high, low, ids):
    """The id of `race.best_score`, shard after shard: that and what follows are one kernel, and reductions would be three."""
    best = high[0], low[0], ids[0]
    for one in zip(high[1:], low[1:], ids[1:], strict=True):
        is_lower = (one[1] > best[1]) | ((one[1] == best[1]) & (one[2] < best[2]))
        is_better = (one[0] > best[0]) | ((one[0] == best[0]) & is_lower)
        best = tuple(jnp.where(is_better, new, old) for new, old in zip(one, best, strict=True))
    return best[2]


def merge_draws(high, low, token, top, total, tempered=None, model=None, model_top=None, model_total=None, *, t) -> Draw:
    """The draw of the shard with the best score; arguments are stacked along axis 0."""
    best = _best(high, low, jnp.where(token < 0, race.NO_ID, token))
    all_top = functools.reduce(jnp.maximum, top)
    down = [jnp.exp((x - race.finite_or_zero(all_top)) * inverse_temperature(t)) for x in top]
    all_total = sum(x * scale for x, scale in zip(total, down, strict=True))
    ok = has_law(all_top, all_total) & (best != race.NO_ID)

    def of_all(log_prob, top, total, t):  # log P(token | shard) + log P(shard)
        inside = at(log_prob, token, best)
        best_top, best_total = race.mass_of(top, total, t)
        share = (at(top, token, best) - best_top) * inverse_temperature(t) + jnp.log(at(total, token, best) / best_total)
        return jnp.where(ok, jnp.minimum(inside + share, 0.0), jnp.nan)

    nothing = jnp.zeros_like(all_top)
    if tempered is not None:
        tempered = jnp.where(ok & (t == 0.0), 0.0, of_all(tempered, top, total, t))
    if model is not None:
        model = of_all(model, model_top, model_total, jnp.float32(1.0))
    tempered = nothing if tempered is None else tempered
    return Draw(jnp.where(ok, best, -1), nothing if model is None else model, tempered, tempered,
                jnp.where(ok, log_normalizer_of(all_top, all_total, t), jnp.nan))


def mass(operands: Operands, config: Config) -> race.Mass:
    """Mass of the processed law, over all shards if there are several; ids are those of the whole vocabulary."""
    axes = config.axis_name
    local = _mesh.vary(operands, axes)
    found = config.stages().mass(local.h, local.w, local.t, local.options(config), **config.shape_arguments())
    if not axes:
        return found
    found = found._replace(argmax=race.to_global(found.argmax, _mesh.first_id(axes, config.vocab)))
    return race.merge_masses(race.Mass(*_mesh.gather(tuple(found), axes)), operands.t)


def merge_scores(log_total, top, x, is_here, is_best, t, axes) -> tuple[Array, ...]:
    """From each shard's mass, `logsumexp(l / T) = top / T + log total`, and the logit x of a token that one of them has
    (`is_here`; `is_best`: it is that shard's first largest) to the same of all. `top` is a constant to differentiation."""
    flag = is_here.astype(jnp.float32) + is_best
    log_totals, tops, x, flags = _mesh.gather((log_total, lax.stop_gradient(top), x, flag), axes)
    top = jnp.max(tops, axis=0)
    alive = tops > -jnp.inf  # a NaN is not: what comes of it is marked by `top`
    z = jnp.where(alive, (jnp.where(alive, tops, 0.0) - top) * inverse_temperature(t) + log_totals, -jnp.inf)
    # No maximum is taken off: the shard with the largest logit has z >= 0, and none exceeds the log of its width.
    log_total = jnp.log(jnp.sum(jnp.exp(z), axis=0))
    shard = lax.broadcasted_iota(jnp.int32, tops.shape, 0)
    is_first = shard == race.first_where(tops == top, shard)
    x = jnp.sum(jnp.where(flags > 0.0, x, 0.0), axis=0)
    return log_total, top, x, jnp.any(flags > 0.0, axis=0), jnp.any((flags > 1.0) & is_first, axis=0)
