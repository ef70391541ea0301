"""Draws without replacement from a vocabulary that is cut over mesh axes.

A token's score depends on the logits and the noise of its own group alone, so the best tokens of all shards are among the best
of each. Every shard ranks its own and sends as many as are drawn, 12 bytes each (20 with log-probabilities), and its mass.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from gumbeljax import _mesh, _shards
from gumbeljax._call import Config, Operands
from gumbeljax._typing import Array
from pallas_kernels import filtered, many, race, xla
from pallas_kernels.finish import Draw
from pallas_kernels.logits import Elementwise, inverse_temperature, of_model


class Said(NamedTuple):
    """What a shard sends; `ranked` has leaves `[n, rows]`, None for those that are not asked for, the others `[rows]`."""

    ranked: many.Ranked
    top: Array  # of the law that it draws from, with the sum of exponentials
    total: Array
    model: tuple[Array, Array] | None  # the same of the model's law


def rank(operands: Operands, keys, config: Config, *, num_samples: int, log_probs: bool) -> Draw:
    """`num_samples` distinct tokens, leaves `[num_samples, rows]`. Pathwise those of one device when every shard starts at a
    multiple of 16."""
    axes, t = config.axis_name, operands.t
    local, keys = _mesh.vary((operands, keys), axes)
    first = _mesh.first_id(axes, config.vocab)
    keys, law, model_mass = (*keys, jnp.full_like(keys[0], first.astype(jnp.uint32))), None, None
    if operands.filters is not None:
        model, kept, law = _shards.kept_logits(operands, local, config, with_total=log_probs)
        top, total = race.group_masses(xla.pad_to_group(kept), local.t)
        ranked = many.rank(kept.T, None, keys, local.t, Elementwise(), top, total, num_samples=num_samples, vocab=config.vocab)
        if log_probs:
            ranked = ranked._replace(model=filtered.picked(model, ranked.token))
            model_mass = race.mass_over(model, jnp.float32(1.0), jnp.int32(0))
    else:
        stages, options, shape = config.stages(), local.options(config), config.shape_arguments()
        top, total = stages.groups(local.h, local.w, local.t, options, **shape)
        ranked = many.rank(local.h, local.w, keys, local.t, options, top, total, num_samples=num_samples, vocab=config.vocab,
                           vocab_axis=config.vocab_axis)
        if log_probs:
            model_mass = stages.mass(local.h, local.w, jnp.ones_like(local.t), of_model(options), **shape)
    ranked = ranked._replace(token=race.to_global(ranked.token, first))
    if model_mass is None:
        ranked = ranked._replace(model=None, tempered=None)
    model_mass = None if model_mass is None else (model_mass.top, model_mass.total)
    said = Said(ranked, *race.mass_of(top, total, local.t), model_mass)
    out, kept_total = merge(_mesh.gather_all(said, axes), t, num_samples)
    return filtered.with_tempered(out, kept_total, law.top, law.total, t) if law is not None and log_probs else out


def merge(said: Said, t, num_samples: int) -> tuple[Draw, Array]:
    """The draw from what all shards said, stacked along axis 0, and the total of the law drawn from."""
    top, total = race.mass_of(said.top, said.total, t)
    ranked, model_mass = said.ranked, None
    if said.model is None:
        ranked = ranked._replace(model=jnp.zeros_like(ranked.high), tempered=jnp.zeros_like(ranked.high))
    else:
        model_top, model_total = race.mass_of(*said.model, jnp.float32(1.0))
        model_mass = race.Mass(model_top, None, model_total)
        of_shard = (said.top - top) * inverse_temperature(t) + jnp.log(said.total / total)  # log P(shard)
        ranked = ranked._replace(tempered=ranked.tempered + of_shard[:, None])
    best = many.in_order(jax.tree.map(lambda x: x.reshape(-1, x.shape[-1]), ranked), num_samples)
    return many.draw_of(best, top, total, model_mass, t), total
