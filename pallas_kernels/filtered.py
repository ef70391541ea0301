"""Draws under filters: the pass over `w` leaves the float32 logits, and those of the kept set race.

The token is the grouped law's on the kept logits: the same race as without filters, over logits that are -inf outside.
"""

import jax.numpy as jnp
from jax import lax

from pallas_kernels import many, noise, race, xla
from pallas_kernels.finish import Draw, Piece, draw_in_group, log_normalizer_of
from pallas_kernels.kept import Filters
from pallas_kernels.kept_set import kept_set
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
    first = jnp.where(won.winner == race.NO_ID, 0, won.winner)
    ids = first + lax.broadcasted_iota(jnp.int32, (noise.GROUP, first.shape[0]), 0)
    group = jnp.where(ids < vocab, picked(kept, ids), -jnp.inf)
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
    kept = jnp.where(kept_set(x, t, filters), x, -jnp.inf)
    if replace:
        out = race_in(kept, keys, t, vocab=vocab, num_samples=num_samples).draw
    else:
        top, total = race.group_masses(xla.pad_to_group(kept), t)
        out = many.without_replacement(kept.T, None, keys, t, Elementwise(), top, total, None, num_samples=num_samples,
                                       vocab=vocab)
    if not with_log_probs:
        return out
    all_of, kept_of = (race.mass_over(logits, t, jnp.int32(0)) for logits in (x, kept))
    return with_tempered(with_model(out, model)[0], kept_of.total, all_of.top, all_of.total, t)
