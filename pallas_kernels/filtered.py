"""Draws under filters: the pass over `w` leaves the float32 logits, and those of the kept set race.

The token is the grouped law's on the kept logits: the same race as without filters, over logits that are -inf outside.
"""

import jax.numpy as jnp
from jax import lax

from pallas_kernels import many, noise, race, xla
from pallas_kernels.finish import Draw, draw_in_group, log_normalizer_of
from pallas_kernels.kept import Filters, kept_set
from pallas_kernels.logits import Elementwise


def all_logits(h, w, options: Elementwise, *, vocab, vocab_axis=0, precision=None):
    """(model logits, processed logits) `[vocab, rows]`, float32, before temperature."""
    return xla.processed_block(h, w, jnp.int32(0), vocab, options, vocab_axis, precision)


def picked(values, tokens):
    """Entries of values `[vocab, rows]` at tokens `[rows]` or `[n, rows]`; the ids are clipped."""
    ids = jnp.clip(tokens, 0, values.shape[0] - 1)
    return jnp.take_along_axis(values, ids if ids.ndim == 2 else ids[None], axis=0).reshape(ids.shape)


def draw(h, w, keys, t, options: Elementwise, filters: Filters, *, vocab, num_samples=None, replace=True, vocab_axis=0,
         precision=None, with_log_probs=False, by_row=False) -> Draw:
    """Tokens of the kept set; leaves `[rows]`, or `[num_samples, rows]`."""
    model, x = all_logits(h, w, options, vocab=vocab, vocab_axis=vocab_axis, precision=precision)
    kept = jnp.where(kept_set(x, t, filters, by_row=by_row), x, -jnp.inf)
    if num_samples is None:
        won = race.race_of(xla.pad_to_group(kept), keys, 0, t, jnp.int32(0))
        first = jnp.where(won.winner == race.NO_ID, 0, won.winner)
        ids = first + lax.broadcasted_iota(jnp.int32, (noise.GROUP, first.shape[0]), 0)
        group = jnp.where(ids < vocab, picked(kept, ids), -jnp.inf)
        out = draw_in_group(keys, t, won, None, first, ids, group, group, vocab=vocab, sample=0)
    else:
        top, total = race.group_masses(xla.pad_to_group(kept), t)
        several = many.with_replacement if replace else many.without_replacement
        out = several(kept.T, None, keys, t, Elementwise(), top, total, None, num_samples=num_samples, vocab=vocab)
    if not with_log_probs:
        return out
    one = jnp.ones_like(t)
    own, all_of, kept_of = (race.mass_over(logits, t, jnp.int32(0)) for logits, t in ((model, one), (x, t), (kept, t)))
    log_kept_mass = jnp.where(t == 0.0, 0.0, jnp.log(kept_of.total) - jnp.log(all_of.total))
    model_log_prob = jnp.minimum(picked(model, out.token) - own.top - jnp.log(own.total), 0.0)
    nan_unless = lambda value: jnp.where(out.token >= 0, value, jnp.nan)  # noqa: E731
    return out._replace(model_log_prob=nan_unless(model_log_prob), tempered_log_prob=out.processed_log_prob + log_kept_mass,
                        log_normalizer=nan_unless(log_normalizer_of(all_of.top, all_of.total, t)))
