"""What verification asks of its tables, where the vocabulary may be cut over mesh axes: every answer is that of all shards.

Each function is one pass over a shard and one small collective, or, on a whole vocabulary, the pass alone. `Side`s have
the ids of the whole vocabulary and are the same on all shards but for their tables.

    scored_draw     24 bytes per row and shard
    mass            12
    logits_at       4 bytes per row, summed
    residual_mass   4, summed
    residual_search 24
    residual_draw   24
"""

import jax
import jax.numpy as jnp
from jax import lax

from gumbeljax import _mesh, _shards
from gumbeljax._call import Config, Operands
from gumbeljax._implementation import Stages
from gumbeljax._typing import Array
from pallas_kernels import dual, race, search
from pallas_kernels.finish import Draw


def num_tokens(config: Config) -> int:
    """Tokens of the whole vocabulary, padding left out."""
    return config.vocab if config.all_vocab is None else config.all_vocab


def draw(operands: Operands, config: Config, keys, *, sample: int) -> Draw:
    """A token of the law and its log-probability."""
    if config.axis_name:
        return _shards.draw(operands, keys, config, num_samples=None, log_probs=True, with_model=False, sample=sample)
    return config.stages().draw(operands.h, operands.w, keys, operands.t, operands.options(config), sample=sample,
                                **config.shape_arguments())


def scored_draw(operands: Operands, config: Config, keys, *, sample: int) -> tuple[Draw, race.Scores]:
    """`draw`, and the scores of all groups: on a shard, of its own."""
    axes, local = config.axis_name, operands
    if axes:
        first = _mesh.first_id(axes, config.vocab)
        local, keys = _mesh.vary((operands, keys), axes)
        keys = (*keys, jnp.full_like(keys[0], first.astype(jnp.uint32)))
    piece, scores = config.stages().scored_piece(local.h, local.w, keys, local.t, local.options(config), sample=sample,
                                                 **config.shape_arguments())
    if not axes:
        return piece.draw, scores
    return _shards.merge_draws(*_shards.hear(piece, first, True, axes), t=operands.t), scores


def _varying(tree, axes: tuple[str, ...]):
    """The arrays of a tree typed as varying over the axes; numbers are left as they are."""
    leaves, structure = jax.tree.flatten(tree)
    is_array = [isinstance(x, jax.Array) for x in leaves]
    arrays = iter(_mesh.vary([x for x, array in zip(leaves, is_array, strict=True) if array], axes))
    return structure.unflatten([next(arrays) if array else x for x, array in zip(leaves, is_array, strict=True)])


def _own(sides: tuple[dual.Side, dual.Side], config: Config) -> tuple[dual.Side, dual.Side]:
    """The sides with ids of this shard."""
    first = _mesh.first_id(config.axis_name, config.vocab)
    shifted = [x._replace(normalizer=x.normalizer._replace(token=x.normalizer.token - first)) for x in sides]
    return _varying(tuple(shifted), config.axis_name)


def log_laws_at(sides: list[dual.Side], ids: list[Array], config: Config) -> list[Array]:
    """Log-probabilities of token ids `[rows]` of each side; ids outside the vocabulary mean nothing."""
    axes, width = config.axis_name, config.vocab
    if not axes:
        return [dual.log_law_at(side, i[None], width)[0] for side, i in zip(sides, ids, strict=True)]
    first = _mesh.first_id(axes, width)

    def here(side, i):  # the logit, on the shard that has it
        side, i = _varying((side, i - first), axes)
        x = dual.logits_at(side, jnp.clip(i, 0, width - 1)[None])[0]
        return jnp.where((i >= 0) & (i < width), x, 0.0)

    logits = lax.psum([here(side, i) for side, i in zip(sides, ids, strict=True) if side.h is not None], axes)
    rest = iter(logits)
    return [dual.log_law(None if side.h is None else next(rest)[None], i[None], side)[0]
            for side, i in zip(sides, ids, strict=True)]


def residual_mass(target: dual.Side, draft: dual.Side, factor, config: Config, stages: Stages) -> Array:
    """`sum_v max(p_v - factor * q_v, 0)`, `[rows]`."""
    axes = config.axis_name
    if not axes:
        return stages.residual_mass(target, draft, factor, vocab=config.vocab)
    target, draft = _own((target, draft), config)
    return lax.psum(stages.residual_mass(target, draft, _varying(factor, axes), vocab=config.vocab), axes)


def residual_search(scores: race.Scores, target: dual.Side, draft: dual.Side, keys, asked: search.Asked, config: Config,
                    stages: Stages, *, sample: int) -> search.Found:
    """A look at the groups that are likely to win the race over `max(p - factor * q, 0)`; keys of all rows of the target."""
    axes = config.axis_name
    if not axes:
        return stages.residual_search(scores, target, draft, keys, asked, sample=sample, vocab=config.vocab)
    first = _mesh.first_id(axes, config.vocab)
    target, draft = _own((target, draft), config)
    keys = (*keys, jnp.full_like(keys[0], first.astype(jnp.uint32)))
    keys, asked = _varying((keys, asked), axes)
    found = stages.residual_search(scores, target, draft, keys, asked, sample=sample, vocab=config.vocab, is_shard=True)
    return search.best_of(search.Found(*_mesh.gather(tuple(found._replace(token=found.token + first)), axes)))


def residual_draw(target: dual.Side, draft: dual.Side, factor, keys, config: Config, stages: Stages, *,
                  sample: int) -> tuple[Array, Array, Array]:
    """(token, its log p, mass) drawn from `max(p - factor * q, 0)`. Where the mass is 0 the token means nothing."""
    axes = config.axis_name
    if not axes:
        won, token, log_p = stages.residual_draw(target, draft, factor, keys, sample=sample, vocab=config.vocab)
        return token, log_p, won.total * jnp.exp(won.top)
    first = _mesh.first_id(axes, config.vocab)
    target, draft = _own((target, draft), config)
    factor, keys = _varying((factor, (*keys, jnp.full_like(keys[0], first.astype(jnp.uint32)))), axes)
    won, token, log_p = stages.residual_draw(target, draft, factor, keys, sample=sample, vocab=config.vocab)
    high, low, token, log_p, top, total = _mesh.gather((won.high, won.low, token + first, log_p, won.top, won.total), axes)
    _, _, best = race.best_score(high, low, token)
    top, total = race.mass_of(top, total, jnp.float32(1.0))
    return best, jnp.sum(jnp.where(token == best, log_p, 0.0), axis=0), total * jnp.exp(top)


def part_of(operands: Operands, config: Config, axes: tuple[str, ...], width: int) -> tuple[Operands, Config]:
    """This shard's `width` tokens of a law that every shard has as a whole: a copy of a part of its table."""
    first, vocab = _mesh.first_id(axes, width), config.vocab
    ids = jnp.clip(first + jnp.arange(width, dtype=jnp.int32), 0, vocab - 1)
    over_vocab = lambda x: None if x is None else jnp.take(x, ids, axis=-1)  # noqa: E731
    h, w = operands.h, operands.w
    h, w = (over_vocab(h), None) if w is None else (h, jnp.take(w, ids, axis=config.vocab_axis))
    dense = {name: over_vocab(getattr(operands, name)) for name in ("bias", "mask", "factor", "offset", "weight_scale")}
    valid = None if width * _mesh.num_shards(axes) == vocab else jnp.clip(vocab - first, 0, width)
    return (operands._replace(h=h, w=w, valid=valid, **dense),
            config._replace(vocab=width, axis_name=axes, all_vocab=vocab))


def check_shared(axes: tuple[str, ...], **arguments) -> None:
    """What the shards of the vocabulary must have in common is the same on all of them."""
    for name, x in arguments.items():
        if wrong := frozenset().union(*map(_mesh.varying, jax.tree.leaves(x))) & set(axes):
            raise ValueError(f"{name} must be the same on all shards of the vocabulary; got one that varies over "
                             f"{_mesh.quoted(wrong)}: give it no such axis in in_specs.")


def agree(target: tuple[Operands, Config], draft: tuple[Operands | None, Config | None]):
    """Both laws (the draft may be None) cut over the same axes at the same ids: one that is whole is cut here."""
    laws = [(x, config) for x, config in (target, draft) if x is not None and config is not None]
    ways = {(config.axis_name, config.vocab) for _, config in laws if config.axis_name}
    if not ways:
        return target, draft
    if len(ways) > 1:
        of_target, of_draft = (f"{config.axis_name}, {config.vocab} to a shard" for _, config in laws)
        raise ValueError(f"draft must be cut over the mesh axes of the target, at the same ids: over {of_target}; got "
                         f"{of_draft}: pad both tables to one width.")
    (axes, width), = ways
    for operands, _ in laws:
        if operands.w is None:
            check_shared(axes, logits=operands.h)
    laws = [law if law[1].axis_name else part_of(*law, axes, width) for law in laws]
    return laws[0], laws[1] if len(laws) > 1 else draft
