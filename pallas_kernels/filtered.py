"""Draws under filters: the pass over `w` leaves the float32 logits, and those of the kept set race.

The token is the grouped law's on the kept logits: the same race as without filters, over logits that are -inf outside.
"""

import jax.numpy as jnp

from pallas_kernels import many, race, xla
from pallas_kernels.finish import Draw, log_normalizer_of
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
         precision=None, with_log_probs=False) -> Draw:
    """Tokens of the kept set; leaves `[rows]`, or `[num_samples, rows]`."""
    model, x = all_logits(h, w, options, vocab=vocab, vocab_axis=vocab_axis, precision=precision)
    kept = jnp.where(kept_set(x, t, filters), x, -jnp.inf)
    stored = {"h": kept.T, "w": None, "keys": keys, "t": t, "options": Elementwise(), "vocab": vocab}
    if num_samples is None:
        out = xla.draw(**stored, tiles=xla.whole(vocab))
    else:
        top, total = race.group_masses(xla.pad_to_group(kept), t)
        several = many.with_replacement if replace else many.without_replacement
        out = several(**stored, top=top, total=total, model_mass=None, num_samples=num_samples)
    if not with_log_probs:
        return out
    one = jnp.ones_like(t)
    own, all_of, kept_of = (race.mass_over(logits, t, jnp.int32(0)) for logits, t in ((model, one), (x, t), (kept, t)))
    log_kept_mass = jnp.where(t == 0.0, 0.0, jnp.log(kept_of.total) - jnp.log(all_of.total))
    model_log_prob = jnp.minimum(picked(model, out.token) - own.top - jnp.log(own.total), 0.0)
    nan_unless = lambda value: jnp.where(out.token >= 0, value, jnp.nan)  # noqa: E731
    return out._replace(model_log_prob=nan_unless(model_log_prob), tempered_log_prob=out.processed_log_prob + log_kept_mass,
                        log_normalizer=nan_unless(log_normalizer_of(all_of.top, all_of.total, t)))
