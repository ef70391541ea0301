"""Two laws over one vocabulary: log-probabilities of given tokens, and draws from `max(p - c q, 0)`.

Pure JAX on any device; `triton_dual` has the passes over both tables for NVIDIA GPUs. The vocabulary is streamed in blocks,
so that no logits are kept. Vocabulary runs along axis 0, rows along the last axis. A side without logits of its own is a
draft that always proposes one token: q is 1 there.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import race, xla
from pallas_kernels.finish import has_law, ids_of, logits_of, token_logits
from pallas_kernels.logits import Elementwise, inverse_temperature, made_logits, processed_logits, rows_of


class Normalizer(NamedTuple):
    """What turns a row's logits into log-probabilities: `log p(v) = (l_v - top) / T - log(total)`.

    `token` is one token whose log-probability is known to the last bit (other logits are recomputed in another order of
    summation, and the difference is divided by T). At T = 0 it is the greedy one. Every leaf `[rows]`.
    """

    top: Any
    total: Any  # None for 1
    token: Any
    token_log_prob: Any  # None where it is that of `top`

    def log_total(self):
        return 0.0 if self.total is None else jnp.log(self.total)


class Side(NamedTuple):
    """One law: operands as everywhere (`w` None: `h` holds logits; `h` None: all on `normalizer.token`, all else is None)."""

    h: Any
    w: Any
    t: Any
    options: Elementwise
    normalizer: Normalizer
    vocab_axis: int = 0
    precision: Any = None


def at_rows(side: Side, rows) -> Side:
    """The side at some of its rows."""
    own = {name: x[rows] for name, x in side.options.dense().items() if x.ndim > 1}
    h, t, normalizer = jax.tree.map(lambda x: x[rows], (side.h, side.t, side.normalizer))
    return side._replace(h=h, t=t, options=side.options._replace(**own), normalizer=normalizer)


def is_law(known: Normalizer):
    """Which rows have a law."""
    return known.token >= 0 if known.total is None else has_law(known.top, known.total)


def log_law(x, ids, side: Side):
    """Log-probabilities of the tokens `ids` with processed logits x, `[n, rows]`; never above 0."""
    known, t = side.normalizer, side.t
    if side.h is None:
        return jnp.where(ids == known.token, jnp.float32(0.0), -jnp.inf)
    log_total, known_log_prob = known.log_total(), known.token_log_prob
    if known_log_prob is None:
        known_log_prob = jnp.where(t == 0.0, 0.0, -log_total)
    log_prob = jnp.minimum((x - known.top) * inverse_temperature(t) - log_total, 0.0)
    return jnp.where(ids == known.token, known_log_prob, jnp.where(t == 0.0, -jnp.inf, log_prob))


def logits_at(side: Side, ids):
    """Processed logits of token ids `[n, rows]` inside the vocabulary."""
    own = rows_of(side.options, ids)
    model = made_logits(token_logits(side.h, side.w, ids, side.vocab_axis), own.scale, own.soft_cap, own.weight_scale)
    return processed_logits(model, own)


def log_law_at(side: Side, ids, vocab):
    """Log-probabilities of the token ids `[n, rows]`; ids outside the vocabulary are clipped into it."""
    ids = jnp.clip(ids, 0, vocab - 1)
    return log_law(None if side.h is None else logits_at(side, ids), ids, side)


def log_law_block(side: Side, start, size):
    """Log-probabilities of the ids `[start, start + size)`, `[size, rows]`."""
    ids = start + jnp.arange(size, dtype=jnp.int32)[:, None]
    if side.h is None:
        return log_law(None, ids, side)
    x = xla.processed_block(side.h, side.w, start, size, side.options, side.vocab_axis, side.precision)[1]
    return log_law(x, ids, side)


def log_law_of(side: Side, ids, vocab):
    """Log-probabilities of the token ids `[n, rows]`; -inf where they are past the vocabulary."""
    if side.h is None:
        return log_law(None, ids, side)
    _, x = logits_of(side.h, side.w, ids, side.options, vocab=vocab, vocab_axis=side.vocab_axis)
    return jnp.where(x == -jnp.inf, -jnp.inf, log_law(x, ids, side))


def log_residual(log_p, log_q, factor):
    """`log max(p - factor * q, 0)` without cancellation; -inf where p is 0."""
    gap = jnp.where(factor > 0.0, log_q + jnp.log(factor) - log_p, -jnp.inf)
    below = (gap < 0.0) & (log_p > -jnp.inf)
    return jnp.where(below, log_p + jnp.log(-jnp.expm1(jnp.where(below, gap, -1.0))), -jnp.inf)


def choose_block(target: Side, draft: Side) -> int:
    """Tokens to score at a time on a CPU, which copies their rows of both tables."""
    return xla.block_of_width(max(sum(side.h.shape[1] for side in (target, draft) if side.w is not None), 1))


def residual_mass(target: Side, draft: Side, factor, *, vocab, block=None):
    """`sum_v max(p_v - factor * q_v, 0)`, `[rows]`: one pass over both tables."""
    def of_block(start, size):
        r = log_residual(log_law_block(target, start, size), log_law_block(draft, start, size), factor)
        return jnp.sum(jnp.exp(r), axis=0)

    return xla.fold_blocks(of_block, lambda pair: jnp.sum(pair, axis=0), vocab, block or choose_block(target, draft))


def residual_draw(target: Side, draft: Side, factor, keys, *, sample, vocab, block=None):
    """(race, token, its log p): a draw from `max(p - factor * q, 0)` by the grouped race, in one pass over both tables.

    Where the mass, `total * exp(top)` of the race, is 0 the token means nothing. In a shard of a vocabulary, whose first id is
    the third of `keys`, ids are the shard's own, those of the normalisers too.
    """
    one = jnp.float32(1.0)

    def of_block(start, size):
        r = log_residual(log_law_block(target, start, size), log_law_block(draft, start, size), factor)
        return race.race_of(xla.pad_to_group(r), keys, sample, one, start)

    won = xla.fold_blocks(of_block, lambda pair: race.merge(pair, one), vocab, block or choose_block(target, draft))
    return choose_in_group(target, draft, factor, keys, won, sample=sample, vocab=vocab)


def choose_in_group(target: Side, draft: Side, factor, keys, won: race.Race, *, sample, vocab):
    """What `residual_draw` returns, from the group that won."""
    one = jnp.float32(1.0)
    first = jnp.where(won.winner == race.NO_ID, 0, won.winner)
    ids = ids_of(first[None])
    log_p = log_law_of(target, ids, vocab)
    r = log_residual(log_p, log_law_of(draft, ids, vocab), factor)
    token = race.choose(race.token_scores(r, keys, sample, one, ids), ids)
    return won, token, jnp.sum(jnp.where(ids == token, log_p, 0.0), axis=0)
