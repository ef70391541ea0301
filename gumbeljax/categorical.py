"""The other law: token for token what `jax.random.categorical` draws, on float32 logits.

It exists so that users can swap gumbeljax in and see nothing change, and as an oracle. It writes the logits and runs
XLA: its noise is one value per token, at positions fixed by the shape of the logits, so there is nothing to fuse.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from gumbeljax._call import Config, Operands
from pallas_kernels import race
from pallas_kernels.finish import Draw, has_law, log_normalizer_of
from pallas_kernels.kept_set import kept_set
from pallas_kernels.logits import inverse_temperature, made_logits, made_once, processed_logits


def all_logits(operands: Operands, config: Config):
    """(model, processed) logits `[rows, vocab]`, float32, with the operand order of `h @ w.T`."""
    h, w = operands.h, operands.w
    if w is None:
        raw = h[:, :config.vocab].astype(jnp.float32)
    else:
        w = lax.slice_in_dim(w, 0, config.vocab, axis=config.vocab_axis).astype(h.dtype)
        contract = ((1,), (1 - config.vocab_axis,))
        raw = lax.dot_general(h, w, (contract, ((), ())), precision=config.precision, preferred_element_type=jnp.float32)
        raw = made_once(raw) if h.shape[1] == 1 else raw
    model = made_logits(raw, config.scale, config.soft_cap, operands.weight_scale)
    return model, processed_logits(model, operands.options(config))


@functools.partial(jax.jit, static_argnames=("config", "batch_shape", "num_samples", "replace", "mode"))
def draw(operands: Operands, config: Config, key, batch_shape, *, num_samples, replace, mode) -> Draw:
    """Tokens of `jax.random.categorical(key, logits / T, mode=mode)`; leaves `[rows]` or `[num_samples, rows]`.

    One key draws for the whole batch at once, as that function does; keys of the batch's shape draw row by row.
    """
    model, x = all_logits(operands, config)
    t, rows = operands.t, x.shape[0]
    allowed = x
    if operands.filters is not None:
        x = jnp.where(kept_set(x.T, t, operands.filters).T, x, -jnp.inf)
    tempered = x / jnp.where(t == 0.0, 1.0, t)[:, None]
    prefix = () if num_samples is None else (num_samples,)
    if key.shape == batch_shape and batch_shape != ():
        one = functools.partial(jax.random.categorical, shape=prefix, replace=replace, mode=mode)
        token = jax.vmap(one, out_axes=-1)(key.reshape(rows), tempered)
    else:
        shaped = tempered.reshape(*batch_shape, -1)
        token = jax.random.categorical(key, shaped, shape=(*prefix, *batch_shape), replace=replace, mode=mode)
        token = token.reshape(*prefix, rows)
    mass = race.mass_over(x.T, t, jnp.int32(0))
    best = lax.top_k(jnp.where(x == 0.0, 0.0, x), num_samples)[1].T if num_samples and not replace else mass.argmax
    token = jnp.where(t == 0.0, best, token.astype(jnp.int32))

    def picked(values):
        ids = jnp.clip(token, 0, config.vocab - 1).reshape(-1, rows)
        return jnp.take_along_axis(values.T, ids, axis=0).reshape(token.shape)

    ok = has_law(mass.top, mass.total) & (picked(x) > -jnp.inf)
    model_log_prob = picked(jax.nn.log_softmax(model))
    processed_log_prob = (picked(x) - mass.top) * inverse_temperature(t) - jnp.log(mass.total)
    processed_log_prob = jnp.where(t == 0.0, jnp.where(token == mass.argmax, 0.0, -jnp.inf), processed_log_prob)
    everything = mass if operands.filters is None else race.mass_over(allowed.T, t, jnp.int32(0))
    log_kept_mass = jnp.where(t == 0.0, 0.0, jnp.log(mass.total) - jnp.log(everything.total))
    normalizer = jnp.broadcast_to(log_normalizer_of(everything.top, everything.total, t), token.shape)
    nan_unless = lambda value: jnp.where(ok, value, jnp.nan)  # noqa: E731
    return Draw(jnp.where(ok, token, -1), nan_unless(model_log_prob), nan_unless(processed_log_prob + log_kept_mass),
                nan_unless(processed_log_prob), nan_unless(normalizer))
