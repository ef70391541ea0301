"""Draws under filters: the pass over `w` leaves the float32 logits, and those of the kept set race.

The token is the grouped law's on the kept logits: the same race as without filters, over logits that are -inf outside.
"""

import jax.numpy as jnp
from jax import lax

from pallas_kernels import many, noise, race, xla
from pallas_kernels.finish import Draw, Piece, draw_in_group, ids_of, log_normalizer_of
from pallas_kernels.kept import Filters, either
from pallas_kernels.kept_set import Prefix, prefix_of
from pallas_kernels.logits import Elementwise


def all_logits(h, w, options: Elementwise, *, vocab, vocab_axis=0, precision=None):
    """(model logits, processed logits) `[vocab, rows]`, float32, before temperature."""
    return xla.processed_block(h, w, jnp.int32(0), vocab, options, vocab_axis, precision)


def picked(values, tokens):
    """Entries of values `[vocab, rows]` at tokens `[rows]` or `[n, rows]`; the ids are clipped."""
    ids = jnp.clip(tokens, 0, values.shape[0] - 1)
    return jnp.take_along_axis(values, ids if ids.ndim == 2 else ids[None], axis=0).reshape(ids.shape)


def race_in(kept, keys, t, *, vocab, num_samples=None) -> Piece:
    """The draw from logits `[vocab, rows]` that are -inf outside of the kept set; the model's law has no part in it."""
    if num_samples is not None:
        top, total = race.group_masses(xla.pad_to_group(kept), t)
        return many.pieces(kept.T, None, keys, t, Elementwise(), top, total, None, num_samples=num_samples, vocab=vocab)
    won = race.race_of(xla.pad_to_group(kept), keys, 0, t, jnp.int32(0))
    return draw_in_winner(won, keys, t, lambda ids: jnp.where(ids < vocab, picked(kept, ids), -jnp.inf), vocab=vocab)


def race_in_groups(x, prefix: Prefix, keys, *, vocab) -> Piece:
    """`race_in` of what a prefix leaves of processed logits x, when the leading groups hold all of it."""
    def kept_at(ids):
        values = jnp.where(ids < vocab, picked(x, ids), -jnp.inf)
        return jnp.where(prefix.has(values, ids), values, -jnp.inf)

    first = noise.GROUP * prefix.leading.groups.T
    groups = race.groups_at(first, *race.group_masses(kept_at(ids_of(first)), prefix.t), keys, 0, prefix.t)
    return draw_in_winner(race.merge(groups, prefix.t), keys, prefix.t, kept_at, vocab=vocab)


def draw_in_winner(won: race.Race, keys, t, kept_at, *, vocab) -> Piece:
    """The draw from the group that won, of the kept logits `kept_at(ids)`."""
    first = jnp.where(won.winner == race.NO_ID, 0, won.winner)
    ids = first + lax.broadcasted_iota(jnp.int32, (noise.GROUP, first.shape[0]), 0)
    group = kept_at(ids)
    return Piece(draw_in_group(keys, t, won, None, first, ids, group, group, vocab=vocab, sample=0), won, None)


def with_model(draw: Draw, model) -> tuple[Draw, race.Mass]:
    """The draw with the log-probability of its token in the model's law, of logits `[vocab, rows]`, and the mass of that."""
    own = race.mass_over(model, jnp.float32(1.0), jnp.int32(0))
    log_prob = jnp.minimum(picked(model, draw.token) - own.top - jnp.log(own.total), 0.0)
    return draw._replace(model_log_prob=jnp.where(draw.token >= 0, log_prob, jnp.nan)), own


def with_tempered(draw: Draw, kept_total, top, total, t) -> Draw:
    """The draw with what it says of the tempered law, `top` and `total`, of which the kept set has `kept_total`."""
    log_kept_mass = jnp.where(t == 0.0, 0.0, jnp.log(kept_total) - jnp.log(total))
    return draw._replace(tempered_log_prob=draw.processed_log_prob + log_kept_mass,
                         log_normalizer=jnp.where(draw.token >= 0, log_normalizer_of(top, total, t), jnp.nan))


def draw(h, w, keys, t, options: Elementwise, filters: Filters, *, vocab, num_samples=None, replace=True, vocab_axis=0,
         precision=None, with_log_probs=False) -> Draw:
    """Tokens of the kept set; leaves `[rows]`, or `[num_samples, rows]`."""
    model, x = all_logits(h, w, options, vocab=vocab, vocab_axis=vocab_axis, precision=precision)
    prefix = prefix_of(x, t, filters)

    def all_kept():
        return jnp.where(prefix.has(x, lax.broadcasted_iota(jnp.int32, x.shape, 0)), x, -jnp.inf)

    if not replace:
        kept = all_kept()
        top, total = race.group_masses(xla.pad_to_group(kept), t)
        out = many.without_replacement(kept.T, None, keys, t, Elementwise(), top, total, None, num_samples=num_samples,
                                       vocab=vocab)
        kept_total = race.mass_over(kept, t, jnp.int32(0)).total
    else:
        in_all = lambda: race_in(all_kept(), keys, t, vocab=vocab, num_samples=num_samples)[:2]  # noqa: E731
        if num_samples is not None or prefix.leading is None:
            out, won = in_all()
        else:  # each row by its own way, whatever the others need: sums over other groups round otherwise
            fits, in_groups = prefix.is_in_leading(), race_in_groups(x, prefix, keys, vocab=vocab)[:2]
            out, won = lax.cond(jnp.all(fits), lambda: in_groups, lambda: either(fits, in_groups, in_all()))
        kept_total = won.total
    if not with_log_probs:
        return out
    law = race.mass_over(x, t, jnp.int32(0))
    return with_tempered(with_model(out, model)[0], kept_total, law.top, law.total, t)
