"""Whole laws over the vocabulary: what a draw chooses from. These write `[*batch, vocab]`; a draw does not need them.

The options say which law: none of them, the model's own; bias, processors, mask and temperature, the tempered one; top_k,
top_p and min_p, the processed one.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from gumbeljax import _checks, _mesh
from gumbeljax._call import Config, Operands, check_names, plain_broadcasting, prepare
from gumbeljax._typing import Array, ArrayLike
from pallas_kernels import filtered, noise, race, xla
from pallas_kernels.finish import has_law
from pallas_kernels.kept_set import kept_set
from pallas_kernels.logits import inverse_temperature


def _prepare(h, w, vocab_axis: int, options: dict) -> tuple[Operands, Config, tuple[int, ...]]:
    """As `prepare`; the whole law is needed here."""
    check_names(options, "a law over the vocabulary")
    operands, config, batch_shape = prepare(h, w, vocab_axis=vocab_axis, **options)
    if config.axis_name:
        raise NotImplementedError(f"axis_name must be None or () for a law over the whole vocabulary; got {config.axis_name}: "
                                  "gather w, or ask log_prob for single tokens.")
    if axes := _mesh.explicit_axes(_checks.table_of(w), config.vocab_axis):
        raise NotImplementedError(f"w must be whole for a law over the whole vocabulary; got one that is cut over "
                                  f"{_mesh.quoted(axes)}: gather it with jax.reshard, or ask log_prob for single tokens.")
    return operands, config, batch_shape


def _kept(operands: Operands, config: Config) -> tuple[Array, Array]:
    """(processed logits, kept set) `[vocab, rows]`."""
    x = filtered.all_logits(operands.h, operands.w, operands.options(config), **config.shape_arguments())[1]
    if operands.filters is None:
        return x, ~(x == -jnp.inf)
    return x, kept_set(lax.stop_gradient(x), lax.stop_gradient(operands.t), operands.filters)


@functools.partial(jax.jit, static_argnames="config")
def log_probs(operands: Operands, *, config: Config) -> Array:
    """Log-probabilities `[vocab, rows]`: -inf outside the kept set, a constant to differentiation; NaN without a law."""
    x, kept = _kept(operands, config)
    t, top = operands.t, lax.stop_gradient(jnp.max(x, axis=0))
    z = jnp.where(kept, x - race.finite_or_zero(top), 0.0) * inverse_temperature(t)
    total = jnp.sum(jnp.where(kept, jnp.exp(z), 0.0), axis=0)
    out = jnp.where(kept, z - jnp.log(total), -jnp.inf)
    ids = lax.broadcasted_iota(jnp.int32, x.shape, 0)
    out = jnp.where(t == 0.0, jnp.where(ids == race.first_where(x == top, ids), 0.0, -jnp.inf), out)
    return jnp.where(has_law(top, total), out, jnp.nan)


def _over_vocabulary(x: Array, h: ArrayLike, w: ArrayLike, batch_shape, vocab_axis: int, fill) -> Array:
    """`[vocab, rows]` as `[*batch, width of w]`: padding of the table holds `fill`."""
    width = jnp.shape(_checks.table_of(w))[vocab_axis]
    return jnp.pad(x.T, ((0, 0), (0, width - x.shape[0])), constant_values=fill).reshape(*batch_shape, width)


def processed_log_probs(h: ArrayLike, w: ArrayLike, *, vocab_axis: int = 0, **options) -> Array:
    """Log-probabilities of the law that `sample(h, w, key, **options)` draws from, over the whole vocabulary.

    Exact up to the rounding of float32 sums; differentiable with the kept set as a constant.

    Args:
      h, w, vocab_axis, options: as `gumbeljax.log_prob`.

    Returns:
      float32 nats `[*batch, vocab]`: -inf for tokens outside the kept set, masked ones and padding of the table; NaN for all
      tokens of a row without a law. At temperature 0 the greedy token has 0 and every other -inf.

    >>> import jax.numpy as jnp, gumbeljax
    >>> w = jnp.log(jnp.array([[0.5], [0.3], [0.15], [0.05]]))
    >>> print(jnp.exp(gumbeljax.processed_log_probs(jnp.ones(1), w, top_p=0.6)))
    [0.625 0.375 0.    0.   ]
    """
    operands, config, batch_shape = _prepare(h, w, vocab_axis, options)
    with plain_broadcasting():
        out = log_probs(operands, config=config)
    out = _over_vocabulary(out, h, w, batch_shape, vocab_axis, -jnp.inf)
    return jnp.where(jnp.isnan(out[..., :1]), jnp.nan, out)  # padding too


def kept_tokens(h: ArrayLike, w: ArrayLike, *, vocab_axis: int = 0, **options) -> Array:
    """The tokens that mask and filters leave, bool `[*batch, vocab]`: what RL trainers need to renormalise over.

    At temperature 0 the set is that of the filters on ever colder laws; only its greedy token has a probability. A row
    without a law keeps nothing.

    Args:
      h, w, vocab_axis, options: as `gumbeljax.log_prob`.

    >>> import jax.numpy as jnp, gumbeljax
    >>> gumbeljax.kept_tokens(jnp.ones(1), jnp.array([[2.0], [1.0], [1.0], [0.0]]), top_k=2).tolist()
    [True, True, False, False]
    """
    operands, config, batch_shape = _prepare(h, w, vocab_axis, options)
    with plain_broadcasting():
        out = _kept_with_law(operands, config=config)
    return _over_vocabulary(out, h, w, batch_shape, vocab_axis, False)


@functools.partial(jax.jit, static_argnames="config")
def _kept_with_law(operands: Operands, *, config: Config) -> Array:
    x, kept = _kept(operands, config)
    mass = race.mass_over(jnp.where(kept, x, -jnp.inf), operands.t, jnp.int32(0))
    return kept & has_law(mass.top, mass.total)


class TopLogProbs(NamedTuple):
    """The most probable tokens of each row, and the rank of given ones."""

    tokens: Array  # int32 [*batch, num]: largest first, lowest id first among equals; -1 where no token with mass is left
    log_probs: Array  # f32 [*batch, num]: NaN there
    rank: Array | None  # int32 [*batch]: 1 for the first; 0 for a token outside the law


def top_log_probs(h: ArrayLike, w: ArrayLike, num: int, *, tokens: ArrayLike | None = None, vocab_axis: int = 0,
                  **options) -> TopLogProbs:
    """The `num` most probable tokens and their log-probabilities, and the rank of `tokens` (such as those drawn).

    Exact up to the rounding of float32 sums; nothing is sorted but `num` groups of 16.

    Args:
      h, w, vocab_axis, options: as `gumbeljax.log_prob`; with none of the options the law is the model's own.
      num: Python int.
      tokens: integers `[*batch]`, or None.

    >>> import jax.numpy as jnp, gumbeljax
    >>> top = gumbeljax.top_log_probs(jnp.ones(1), jnp.array([[1.0], [3.0], [2.0]]), 2, tokens=0)
    >>> top.tokens.tolist(), int(top.rank)
    ([1, 2], 3)
    """
    operands, config, batch_shape = _prepare(h, w, vocab_axis, options)
    num = _checks.count(num, "num")
    if num > config.vocab:
        raise ValueError(f"num must be at most the number of tokens, {config.vocab}; got {num}: ask for fewer.")
    if tokens is not None:
        tokens = _checks.token_ids(tokens, batch_shape)
    with plain_broadcasting():
        best, values, rank = _top(operands, tokens, config=config, num=num)
    return TopLogProbs(best.reshape(*batch_shape, num), values.reshape(*batch_shape, num),
                       None if rank is None else rank.reshape(batch_shape))


@functools.partial(jax.jit, static_argnames=("config", "num"))
def _top(operands: Operands, tokens, *, config: Config, num: int):
    law = log_probs(operands, config=config)
    vocab, rows = law.shape
    num_groups = -(-vocab // noise.GROUP)
    grouped = xla.pad_to_group(law).reshape(num_groups, noise.GROUP, rows)
    # The best tokens lie in the groups with the largest maxima; these in order of id, so that equals are taken lowest first.
    groups = jnp.sort(lax.top_k(jnp.max(grouped, axis=1).T, min(num, num_groups))[1], axis=1).T
    candidates = jnp.take_along_axis(grouped, groups[:, None], axis=0).reshape(noise.GROUP * len(groups), rows)
    ids = (noise.GROUP * groups[:, None] + jnp.arange(noise.GROUP, dtype=jnp.int32)[:, None]).reshape(candidates.shape)
    values, where = lax.top_k(candidates.T, num)
    best = jnp.take_along_axis(ids.T, where, axis=1)
    ok = values > -jnp.inf
    rank = None
    if tokens is not None:
        own = filtered.picked(law, tokens)
        in_order = lax.broadcasted_iota(jnp.int32, law.shape, 0)
        ahead = (law > own) | ((law == own) & (in_order < tokens))
        exists = (tokens >= 0) & (tokens < vocab) & (own > -jnp.inf)
        rank = jnp.where(exists, 1 + jnp.sum(ahead, axis=0, dtype=jnp.int32), 0)
    return jnp.where(ok, best, -1), jnp.where(ok, values, jnp.nan), rank
