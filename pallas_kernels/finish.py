"""Stage 2: from the winning group to the token. Recomputes the logits of that one group: 16 rows of `w` per row of `h`."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import noise, race
from pallas_kernels.logits import Elementwise, inverse_temperature, made_logits, made_once, processed_logits, rows_of
from pallas_kernels.tiles import at_most

GATHER = 2**23  # coordinates of `w` read at a time, by one kernel; on a CPU XLA writes them down twice:
CPU_GATHER = 2**18


class Draw(NamedTuple):
    """A drawn token and what is known about it; every leaf `[rows]`. Token -1 with NaN marks a row that has no law."""

    token: Any
    model_log_prob: Any
    tempered_log_prob: Any
    processed_log_prob: Any
    log_normalizer: Any

    @property
    def log_kept_mass(self):
        """Log of the share of the tempered law that the filters left: 0 without filters."""
        return self.tempered_log_prob - self.processed_log_prob


class Piece(NamedTuple):
    """What one shard of a vocabulary says: the draw from its own law, the race that led to it, the mass of its model law
    (None when not asked for). Every leaf is `[rows]`; ids are the shard's own. `words`: the bits of what `said` lists, int32
    `[numbers, rows]`, where a kernel has put them into one array to be sent."""

    draw: Draw
    won: race.Race
    model_mass: Any
    words: Any = None


def said(piece: Piece, first, log_probs: bool) -> tuple[Any, ...]:
    """What a shard whose first id is `first` sends of its draw: score, token and mass, and log-probabilities if asked."""
    token = race.to_global(piece.draw.token, first)
    numbers = (piece.won.high, piece.won.low, token, piece.won.top, piece.won.total)
    if log_probs:
        numbers = (*numbers, piece.draw.tempered_log_prob)
    if piece.model_mass is None:
        return numbers
    mass = (jnp.broadcast_to(x, token.shape) for x in (piece.model_mass.top, piece.model_mass.total))
    return (*numbers, piece.draw.model_log_prob, *mass)


def token_logits(h, w, ids, vocab_axis):
    """Raw logits `[n, rows]` of the token ids `[n, rows]`: products and sums in float32, whatever the dtype.

    With w None, h holds the logits `[rows, vocab]` themselves.
    """
    if w is None:
        return jnp.take_along_axis(h, ids.T, axis=1).T.astype(jnp.float32)

    def of_row(h, ids):
        picked = jnp.take(w, ids, axis=vocab_axis, mode="clip").astype(h.dtype).astype(jnp.float32)
        return jnp.sum((picked.T if vocab_axis == 1 else picked) * h.astype(jnp.float32), axis=-1)

    def of_rows(h, ids, coordinates):
        # A few ids at a time: 16 rows of `w` for each row of h can be more than the logits.
        (num, rows), width = ids.shape, h.shape[1]
        if at_most(num * rows * width, coordinates, if_unknown=True):
            return jax.vmap(of_row)(h, ids.T).T
        part = num
        while part * width > coordinates and part % (2 * noise.GROUP) == 0:
            part //= 2
        row = jnp.repeat(jnp.arange(rows), num // part)
        out = lax.map(lambda x: of_row(h[x[0]], x[1]), (row, ids.T.reshape(-1, part)),
                      batch_size=max(1, coordinates // (part * width)))
        return out.reshape(rows, num).T

    out = lax.platform_dependent(h, ids, cpu=functools.partial(of_rows, coordinates=CPU_GATHER),
                                 default=functools.partial(of_rows, coordinates=GATHER))
    return made_once(out) if h.shape[1] == 1 else out


def ids_of(first):
    """The ids `[n * 16, rows]` of groups whose first ids are `first [n, rows]`."""
    ids = first[:, None] + lax.broadcasted_iota(jnp.int32, (1, noise.GROUP, 1), 1)
    return ids.reshape(-1, first.shape[1])


def logits_of(h, w, ids, options: Elementwise, *, vocab, vocab_axis):
    """(model logits, processed logits) of the token ids `[n, rows]`; ids past the vocabulary are masked."""
    safe = jnp.clip(ids, 0, vocab - 1)
    own = rows_of(options, safe)
    model = made_logits(token_logits(h, w, safe, vocab_axis), options.scale, options.soft_cap, own.weight_scale)
    exists = ids < (vocab if options.valid is None else jnp.minimum(vocab, options.valid))
    return model, processed_logits(model, own, exists)


def group_logits(h, w, first, options: Elementwise, *, vocab, vocab_axis):
    """(ids, model logits, processed logits) of one group per row, `[16, rows]`; ids past the vocabulary are masked."""
    ids = ids_of(first[None])
    return ids, *logits_of(h, w, ids, options, vocab=vocab, vocab_axis=vocab_axis)


def has_law(top, total):
    """False for a row that is masked altogether, or has a NaN or +inf logit, or an invalid temperature."""
    return (top > -jnp.inf) & (total > 0.0) & (total < jnp.inf)


def at(x, ids, token):
    """The entry of x `[16, rows]` whose id is `token`."""
    return jnp.sum(jnp.where(ids == token, x, 0.0), axis=0)


def group_log_prob(won: race.Race, keys, sample, t, first):
    """`log P(group)`, read back from the score: `(score - top) / T - G - log total`. Using what stage 1 computed, and
    only differences inside the group from the recomputed logits, keeps log-probs right to rounding at any T."""
    gumbel = race.group_noise(keys, sample, first[None])[0]
    return ((won.high - won.top) + won.low) * inverse_temperature(t) - gumbel - jnp.log(won.total)


def log_probs_in_group(x, t):
    """`log P(token | group)` of logits `[16, ...]`."""
    z = (x - race.finite_or_zero(jnp.max(x, axis=0))) * inverse_temperature(t)
    return z - jnp.log(jnp.sum(jnp.exp(z), axis=0))


def log_normalizer_of(top, total, t):
    """`T * logsumexp(l / T)`: logsumexp(l) at T = 1, max(l) at T = 0."""
    return top + t * jnp.log(total)


def finish(h, w, keys, t, options: Elementwise, won: race.Race, model_mass, *, vocab, sample=0, vocab_axis=0) -> Draw:
    """Choose the token inside each row's winning group."""
    first = jnp.where(won.winner == race.NO_ID, 0, won.winner)
    ids, model, x = group_logits(h, w, first, options, vocab=vocab, vocab_axis=vocab_axis)
    return draw_in_group(keys, t, won, model_mass, first, ids, model, x, vocab=vocab, sample=sample)


def draw_in_group(keys, t, won: race.Race, model_mass, first, ids, model, x, *, vocab, sample) -> Draw:
    """The draw from the winning group's ids, model and processed logits `[16, rows]`. Runs inside kernels too."""
    token = race.choose(race.token_scores(x, keys, sample, t, ids), ids)
    ok = has_law(won.top, won.total) & (token < vocab)
    tempered = group_log_prob(won, keys, sample, t, first) + at(log_probs_in_group(x, t), ids, token)
    tempered = jnp.where(t == 0.0, 0.0, jnp.minimum(tempered, 0.0))
    if model_mass is None:
        model_log_prob = jnp.zeros_like(tempered)  # not asked for
    else:
        model_log_prob = jnp.minimum(at(model, ids, token) - model_mass.top - jnp.log(model_mass.total), 0.0)
    nan_unless = lambda value: jnp.where(ok, value, jnp.nan)  # noqa: E731
    tempered = nan_unless(tempered)
    return Draw(jnp.where(ok, token, -1), nan_unless(model_log_prob), tempered, tempered,
                nan_unless(log_normalizer_of(won.top, won.total, t)))
