"""Several tokens per row from the masses of all groups, with and without replacement.

Stage 1 leaves (top, total) of every group, an eighth of the logits; the groups that win are then scored again.

Source: W. Kool, H. van Hoof, M. Welling, "Stochastic beams and where to find them", ICML 2019 (Gumbels conditioned on
their maximum).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import export, lax

from pallas_kernels import noise, race
from pallas_kernels.finish import Draw, Piece, finish, group_logits, has_law, log_normalizer_of, log_probs_in_group
from pallas_kernels.logits import Elementwise, inverse_temperature

CHUNK = 2**22  # noise values, or coordinates of `w`, alive at a time


def first_ids_of(top):
    """First token id of every group, of the shape of `top` `[groups, rows]`."""
    return noise.GROUP * lax.broadcasted_iota(jnp.int32, top.shape, 0)


def with_replacement(*arguments, **options) -> Draw:
    """`num_samples` independent tokens per row; arguments as in `pieces`."""
    return pieces(*arguments, **options).draw


def pieces(h, w, keys, t, options: Elementwise, top, total, model_mass, *, num_samples, vocab, vocab_axis=0) -> Piece:
    """`num_samples` independent draws per row; leaves `[num_samples, rows]`. Sample s races with its own noise."""
    mass = race.mass_of(top, total, t)
    ids = first_ids_of(top)

    def one(sample):
        high, low = race.scores(top, total, race.group_noise(keys, sample, ids), t)
        won = race.Race(*race.best_score(high, low, ids), *mass)
        draw = finish(h, w, keys, t, options, won, model_mass, vocab=vocab, sample=sample, vocab_axis=vocab_axis)
        return Piece(draw, won, None)

    gathered = noise.GROUP * h.shape[0] * (1 if w is None else h.shape[1])
    batch = 1 if export.is_symbolic_dim(gathered) else max(1, CHUNK // max(1, top.size, gathered))
    out = lax.map(one, jnp.arange(num_samples, dtype=jnp.int32), batch_size=min(batch, num_samples))
    return out._replace(model_mass=model_mass)


def best_groups(high, low, k):
    """Indices `[rows, k]` of the k largest scores (high, low) `[rows, groups]`, exact also where `high` ties."""
    threshold = lax.top_k(high, k)[0][:, -1:]
    above = jnp.where(high > threshold, jnp.inf, jnp.where(high == threshold, low, -jnp.inf))
    return lax.top_k(jnp.where(above == 0.0, 0.0, above), k)[1]  # top_k tells -0.0 from 0.0


def conditioning(x, best):
    """What conditioning on the group's maximum being `best` adds to a token's noise: x `[16, ...]` from token_scores.

    With Z = max x the conditioned score is `t_v = -log(exp(-S) + exp(-x_v) - exp(-Z))`. Written as `x_v + r_v` with
    `c = log(1 - exp(x_v - Z))` and `r_v = -c - softplus(x_v - S - c)`, nothing overflows or cancels, and a token far below
    the top keeps its own noise, since r_v vanishes there. At the maximum itself r_v has no value: t_v is S.
    """
    gap = jnp.max(x, axis=0) - x
    c = jnp.where(gap < 0.5, jnp.log(-jnp.expm1(-gap)), jnp.log1p(-jnp.exp(-gap)))
    return jnp.where(gap == 0.0, 0.0, -c - jax.nn.softplus(x - best - c)), gap == 0.0


class Ranked(NamedTuple):
    """Tokens with the best scores `high + low`, in order; leaves `[n, rows]`. `high` is -inf behind the last that has mass."""

    high: Any
    low: Any
    token: Any
    model: Any  # the model's logit
    tempered: Any  # log-probability in the law of the vocabulary, or of the shard, that was ranked


def in_order(ranked: Ranked, num_samples: int) -> Ranked:
    """The `num_samples` best of more or fewer tokens, of equal scores the lowest id first."""
    order = lax.sort((-ranked.high, -ranked.low, *ranked[2:]), dimension=0, num_keys=3)
    short = max(0, num_samples - order[0].shape[0])
    fill = Ranked(jnp.inf, 0.0, -1, 0.0, 0.0)
    high, low, *others = (jnp.pad(a[:num_samples], ((0, short), (0, 0)), constant_values=v)
                          for a, v in zip(order, fill, strict=True))
    return Ranked(-high, -low, *others)


def rank(h, w, keys, t, options: Elementwise, top, total, *, num_samples, vocab, vocab_axis=0) -> Ranked:
    """The `num_samples` best tokens of a vocabulary or of a shard of it, from the (top, total) of its groups.

    The k best tokens lie in the k groups with the best scores.
    """
    rows, k = top.shape[1], min(num_samples, top.shape[0])
    all_top, all_total = race.mass_of(top, total, t)
    high, low = race.scores(top, total, race.group_noise(keys, 0, first_ids_of(top)), t)
    chosen = best_groups(high.T, low.T, k)  # [rows, k]
    first = noise.GROUP * chosen

    def one_rank(first):
        return group_logits(h, w, first, options, vocab=vocab, vocab_axis=vocab_axis)

    ids, model, x = (jnp.moveaxis(a, 0, 1) for a in lax.map(one_rank, first.T))  # [16, k, rows]
    group_top = jnp.take_along_axis(top, chosen.T, axis=0)
    group_total = jnp.take_along_axis(total, chosen.T, axis=0)
    group_high, group_low = (jnp.take_along_axis(a.T, chosen, axis=1).T for a in (high, low))
    best = jnp.log(group_total) + race.group_noise(keys, 0, first.T)
    added, is_best = conditioning(race.token_scores(x, keys, 0, t, ids), best)
    alive = x > -jnp.inf
    spread = jnp.where(alive & (t > 0.0), t * (race.token_noise(keys, 0, ids) + added), 0.0)
    high, low = race.two_sum(jnp.where(alive, x, 0.0), spread)
    high = jnp.where(alive, jnp.where(is_best, group_high, high), -jnp.inf)
    low = jnp.where(alive, jnp.where(is_best, group_low, low), 0.0)

    group_log_prob = (group_top - all_top) * inverse_temperature(t) + jnp.log(group_total) - jnp.log(all_total)
    tempered = group_log_prob + log_probs_in_group(x, t)
    return in_order(Ranked(*(a.reshape(-1, rows) for a in (high, low, ids, model, tempered))), num_samples)


def draw_of(ranked: Ranked, top, total, model_mass, t) -> Draw:
    """What is said of ranked tokens, from the masses (top, total) of the law they were drawn from and of the model's."""
    ok = has_law(top, total) & (ranked.high > -jnp.inf)
    place = lax.broadcasted_iota(jnp.int32, ranked.token.shape, 0)
    tempered = jnp.where(t == 0.0, jnp.where(place == 0, 0.0, -jnp.inf), ranked.tempered)
    model = jnp.zeros_like(ranked.model) if model_mass is None else ranked.model - model_mass.top - jnp.log(model_mass.total)
    nan_unless = lambda value: jnp.where(ok, value, jnp.nan)  # noqa: E731
    log_normalizer = jnp.broadcast_to(log_normalizer_of(top, total, t), ranked.token.shape)
    return Draw(jnp.where(ok, ranked.token, -1), nan_unless(model), nan_unless(tempered), nan_unless(tempered),
                nan_unless(log_normalizer))


def without_replacement(h, w, keys, t, options: Elementwise, top, total, model_mass, **shape) -> Draw:
    """`num_samples` distinct tokens per row in Plackett-Luce order; leaves `[num_samples, rows]`.

    When fewer tokens have mass, the rest is marked -1.
    """
    ranked = rank(h, w, keys, t, options, top, total, **shape)
    return draw_of(ranked, *race.mass_of(top, total, t), model_mass, t)
