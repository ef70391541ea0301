"""Log-probabilities of given tokens, and their gradients, without storing the logits."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from gumbeljax import _checks, _cut_filters, _mesh, _shards, laws
from gumbeljax._call import Config, Operands, plain_broadcasting, prepare
from gumbeljax._compat import varying
from gumbeljax._partition import follows_shardings
from gumbeljax._tuning import Tuning
from gumbeljax._typing import Array, ArrayLike
from gumbeljax.processing import Processors
from pallas_kernels import filtered, xla
from pallas_kernels.finish import has_law, token_logits
from pallas_kernels.logits import block_of, existing, inverse_temperature, made_logits, processed_logits, rows_of
from pallas_kernels.race import finite_or_zero, first_where


def _block_size(config: Config) -> int:
    return min(2048 if config.device.platform == "cpu" else 16384, config.vocab)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _log_total(operands: Operands, config: Config) -> tuple[Array, Array, Array]:
    """(log total, top, argmax) of the tempered law: `logsumexp(l / T) = top / T + log total`.

    `top` is a constant to differentiation, so the gradient of `log total` is that of `logsumexp((l - top) / T)`.
    """
    options = operands.options(config)
    mass = config.stages().mass(operands.h, operands.w, operands.t, options, **config.shape_arguments())
    return jnp.log(mass.total), mass.top, mass.argmax


def _forward(operands, config):
    out: tuple[Array, Array, Array] = _log_total(operands, config)
    return out, (operands, out[0], out[1])


@plain_broadcasting()
def _backward(config, residuals, cotangents):
    """One more pass over the blocks of `w`: each block's logits again, their softmax, and its products with h and w. A
    quantised `w` is a constant."""
    operands, log_total, top = residuals
    weight = jnp.where(has_law(top, jnp.exp(log_total)), cotangents[0], 0.0)
    top = finite_or_zero(top)  # a row, or a shard's part of it, that is masked altogether has gradient 0, not NaN
    h, w, t, axis, is_learnt = operands.h, operands.w, operands.t, config.vocab_axis, operands.weight_scale is None
    dense = {name: x for name in ("bias", "factor", "offset") if (x := getattr(operands, name)) is not None}
    others = operands.options(config)._replace(**dict.fromkeys(dense))

    def add_block(grads, start, size):
        def scores(h, learnt, t, blocks):  # (l - top) / T of one block, [size, rows]
            shape = {"size": size, "vocab_axis": axis, "precision": config.precision}
            options = block_of(others, start, size)
            raw = xla.block_logits(h, learnt if is_learnt else w_block, jnp.int32(0), **shape)
            model = made_logits(raw, config.scale, config.soft_cap, options.weight_scale)
            options = options._replace(**{name: x[:, None] if x.ndim == 1 else x.T for name, x in blocks.items()})
            x = processed_logits(model, options, existing(start + lax.broadcasted_iota(jnp.int32, (size, 1), 0), options))
            alive = x > -jnp.inf  # a masked logit has weight 0, which must not meet its -inf in the chain rule
            return (jnp.where(alive, x, top) - top) * inverse_temperature(t), alive

        w_block = lax.dynamic_slice_in_dim(w, start, size, axis)
        blocks = {name: lax.dynamic_slice_in_dim(x, start, size, -1) for name, x in dense.items()}
        z, pull, alive = jax.vjp(scores, h.astype(jnp.float32), w_block if is_learnt else None, t, blocks, has_aux=True)
        dh, dw_block, dt, dblocks = pull(jnp.where(alive, weight * jnp.exp(z - log_total), 0.0))
        put = lambda whole, part, ax: lax.dynamic_update_slice_in_dim(whole, part.astype(whole.dtype), start, ax)  # noqa: E731
        return (grads[0] + dh, put(grads[1], dw_block, axis) if is_learnt else None, grads[2] + dt,
                {name: put(grads[3][name], part, part.ndim - 1) for name, part in dblocks.items()})

    grads = _mesh.vary((jnp.zeros(h.shape, jnp.float32), jnp.zeros_like(w) if is_learnt else None, jnp.zeros_like(t),
                        jax.tree.map(jnp.zeros_like, dense)), tuple(varying(weight)))
    block = _block_size(config)
    starts = jnp.arange(config.vocab // block, dtype=jnp.int32) * block
    grads, _ = lax.scan(lambda g, start: (add_block(g, start, block), None), grads, starts)
    if tail := config.vocab % block:
        grads = add_block(grads, jnp.int32(config.vocab - tail), tail)
    nothing = dict.fromkeys(("bias", "mask", "factor", "offset", "filters"))
    return (Operands(grads[0].astype(h.dtype), grads[1], grads[2], **{**nothing, **grads[3]}),)


_log_total.defvjp(_forward, _backward)


@functools.partial(jax.jit, static_argnames="config")
def _log_prob(operands: Operands, tokens, *, config: Config) -> Array:
    t, axes = operands.t, config.axis_name
    local = _mesh.vary(operands, axes)
    options, ids = local.options(config), tokens - _mesh.first_id(axes, config.vocab) if axes else tokens
    log_total, top, argmax = _log_total(local, config)  # pyright: ignore[reportGeneralTypeIssues]
    safe = jnp.clip(ids, 0, config.vocab - 1)[None]
    own = rows_of(options, safe)
    raw = token_logits(local.h, local.w, safe, config.vocab_axis)
    x = processed_logits(made_logits(raw, config.scale, config.soft_cap, own.weight_scale), own)[0]
    is_real = existing(ids, options)
    is_here = (ids >= 0) & (ids < config.vocab) & (True if is_real is None else is_real)
    is_best = is_here & (ids == argmax)
    if axes:
        log_total, top, x, is_here, is_best = _shards.merge_scores(log_total, top, x, is_here, is_best, t, axes)
    # Summed in another order than stage 1 did: without this, rounding over a small T could pass the largest logit.
    x = x + lax.stop_gradient(jnp.where(x > -jnp.inf, jnp.where(is_best, top, jnp.minimum(x, top)) - x, 0.0))
    return _of_token(log_total, top, x, is_here, is_best, t)


def _of_token(log_total, top, x, is_here, is_best, t) -> Array:
    """The log-probability of a token from its logit and the mass of the law; the arguments are those of `merge_scores`."""
    alive = x > -jnp.inf  # the -inf of others must not meet a gradient
    z = (jnp.where(alive, x, top) - lax.stop_gradient(top)) * inverse_temperature(t)
    log_prob = jnp.where(alive, z - log_total, -jnp.inf)
    log_prob = jnp.where(t == 0.0, jnp.where(is_best, 0.0, -jnp.inf), log_prob)
    return jnp.where(is_here & has_law(top, jnp.exp(log_total)), log_prob, jnp.nan)


@functools.partial(jax.jit, static_argnames="config")
def _cut_and_filtered_log_prob(operands: Operands, tokens, *, config: Config) -> Array:
    """As `_log_prob`, under filters on a cut vocabulary: the shard's logits are stored, the kept set is a constant."""
    t, axes, filters = operands.t, config.axis_name, operands.filters
    assert filters is not None
    local = _mesh.vary(operands, axes)
    options, ids = local.options(config), tokens - _mesh.first_id(axes, config.vocab)
    x = filtered.all_logits(local.h, local.w, options, **config.shape_arguments())[1]
    found = _cut_filters.kept_set(lax.stop_gradient(x), lax.stop_gradient(t), filters, axes, with_total=False)
    top = jnp.max(jnp.where(found.kept, lax.stop_gradient(x), -jnp.inf), axis=0)
    z = jnp.where(found.kept, x - finite_or_zero(top), 0.0) * inverse_temperature(t)
    total = jnp.sum(jnp.where(found.kept, jnp.exp(z), 0.0), axis=0)
    log_total = jnp.log(jnp.where(total == 0.0, 1.0, total))  # a shard without mass is known by its top
    kept = jnp.where(found.kept, x, -jnp.inf)
    is_real = existing(ids, options)
    is_here = (ids >= 0) & (ids < config.vocab) & (True if is_real is None else is_real)
    is_best = is_here & (ids == first_where(kept == top, lax.broadcasted_iota(jnp.int32, x.shape, 0)))
    own = jnp.where(is_here, filtered.picked(kept, ids), 0.0)
    log_total, top, own, is_here, is_best = _shards.merge_scores(log_total, top, own, is_here, is_best, t, axes)
    return _of_token(log_total, top, own, is_here, is_best, t)


@follows_shardings
def log_prob(h: ArrayLike, w: ArrayLike, tokens: ArrayLike, *, temperature: ArrayLike = 1.0, top_k: ArrayLike | None = None,
             top_p: ArrayLike | None = None, min_p: ArrayLike | None = None, valid_vocab: int | None = None,
             logit_bias: ArrayLike | None = None, mask: ArrayLike | None = None, processors: Processors | None = None,
             vocab_axis: int = 0, scale: float | None = None, soft_cap: float | None = None,
             precision: str | jax.lax.Precision | None = None, implementation: str | Tuning | None = None,
             axis_name: str | tuple[str, ...] | None = None) -> Array:
    """`log softmax((h @ w.T + logit_bias) / temperature)[tokens]`; without filters the logits are never written to memory.

    Exact up to the rounding of float32 sums. The options say which law: with none it is the model's own, with bias,
    processors, mask or temperature the tempered one, with top_k, top_p or min_p the processed one, renormalised over the
    kept set. It can be differentiated in reverse mode with respect to h, w, logit_bias, penalties, bias_values and (above
    1e-18) temperature: the backward pass makes the logits again, block by block. Under filters the logits are stored, and
    the kept set is a constant.

    Args:
      h: hidden states `[*batch, d_model]`; bfloat16, float16 or float32.
      w: output table `[vocab, d_model]` (see `vocab_axis`), or a `gumbeljax.QuantizedHead`, which is a constant.
      tokens: integers `[*batch]`.
      (the other options: see the top of `gumbeljax.sampling`)

    Returns:
      float32 nats `[*batch]`: -inf for a masked token, NaN for a token outside `[0, vocab)` and for a row without a law.
      At temperature 0 the greedy token has 0 and every other -inf.

    Raises:
      ValueError, TypeError: an argument breaks its rule.
      NotImplementedError: the named implementation cannot run here.

    >>> import jax.numpy as jnp, gumbeljax
    >>> print(f"{gumbeljax.log_prob(jnp.ones(4), jnp.zeros((8, 4)), 3):.4f} = -log 8")
    -2.0794 = -log 8
    """
    operands, config, batch_shape = prepare(
        h, w, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, valid_vocab=valid_vocab, logit_bias=logit_bias,
        mask=mask, processors=processors, vocab_axis=vocab_axis, scale=scale, soft_cap=soft_cap, precision=precision,
        implementation=implementation, axis_name=axis_name)
    tokens = _checks.token_ids(tokens, batch_shape)
    if operands.h.shape[0] == 0:
        return jnp.zeros(batch_shape, jnp.float32)
    with plain_broadcasting():
        if operands.filters is None:
            return _log_prob(operands, tokens, config=config).reshape(batch_shape)
        if config.axis_name:
            return _cut_and_filtered_log_prob(operands, tokens, config=config).reshape(batch_shape)
        log_probs = laws.log_probs(operands, config=config)
        exists = (tokens >= 0) & (tokens < config.vocab)
        return jnp.where(exists, filtered.picked(log_probs, tokens), jnp.nan).reshape(batch_shape)
