"""The ways to one draw, for cases that every way has to pass.

A route takes logits `[rows, vocab]` (anything float: -inf, NaN and +inf too), keys `[rows]`, temperatures `[rows]` and the
options of `sample`, and returns (tokens, tempered log-probs or None). Where a head is needed the logits go in as a bias
per row over a table of zeros, which is exact for any value and keeps the rows apart. Filters and processors are traced, and
every array of them has an axis of rows; filters may be scalars.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gumbeljax
from gumbeljax import _compat, reference
from gumbeljax._call import prepare
from gumbeljax._keys import row_keys
from pallas_kernels import triton
from pallas_kernels.finish import Draw
from tests import oracles

plt = _compat.pallas_triton()
needs_triton = pytest.mark.skipif(plt is None, reason="this jax has no Pallas Triton backend")


def zeros_head(rows, vocab, dtype=jnp.float32):
    return jnp.zeros((rows, 16), dtype), jnp.zeros((vocab, 16), dtype)


def biased_head(logits, bias):
    """(h, w, bias): a head of zeros whose logits are all in the bias."""
    logits = jnp.asarray(logits, jnp.float32)
    return *zeros_head(*logits.shape), logits if bias is None else logits + bias


def triton_draw(h, w, keys, *, tiles=None, **options) -> Draw:
    """`sample_with_log_probs` by the interpreted Triton kernel; rows of h are the batch."""
    operands, config, batch_shape = prepare(h, w, **options)
    words = row_keys(keys, batch_shape)
    return triton.draw(operands.h, operands.w, words, operands.t, operands.options(config), plt=plt, with_model=True,
                       tiles=tiles, interpret=True, **config.shape_arguments())


@functools.partial(jax.jit, static_argnames="valid_vocab")
def by_head(logits, keys, t, *, logit_bias=None, mask=None, valid_vocab=None, **more):
    h, w, bias = biased_head(logits, logit_bias)
    out = gumbeljax.sample_with_log_probs(h, w, keys, temperature=t, logit_bias=bias, mask=mask, valid_vocab=valid_vocab,
                                          **more)
    return out.token, out.tempered_log_prob


@functools.partial(jax.jit, static_argnames="valid_vocab")
def by_triton(logits, keys, t, *, logit_bias=None, mask=None, valid_vocab=None, processors=None):
    h, w, bias = biased_head(logits, logit_bias)
    out = triton_draw(h, w, keys, temperature=t, logit_bias=bias, mask=mask, valid_vocab=valid_vocab, processors=processors)
    return out.token, out.tempered_log_prob


@functools.partial(jax.jit, static_argnames="valid_vocab")
def by_logits(logits, keys, t, **options):
    return gumbeljax.sample_logits(logits, keys, temperature=t, **options), None


@functools.partial(jax.jit, static_argnames="valid_vocab")
def by_categorical(logits, keys, t, *, logit_bias=None, mask=None, valid_vocab=None, **more):
    h, w, bias = biased_head(logits, logit_bias)
    out = gumbeljax.sample_with_log_probs(h, w, keys, temperature=t, logit_bias=bias, mask=mask, valid_vocab=valid_vocab,
                                          method="categorical", **more)
    return out.token, out.tempered_log_prob


@functools.partial(jax.jit, static_argnames="valid_vocab")
def by_several(logits, keys, t, **options):
    """The first of two tokens drawn with replacement."""
    return gumbeljax.sample_logits(logits, keys, temperature=t, num_samples=2, **options)[:, 0], None


@functools.partial(jax.jit, static_argnames="valid_vocab")
def by_distinct(logits, keys, t, **options):
    """The first of the tokens drawn without replacement."""
    return gumbeljax.sample_logits(logits, keys, temperature=t, num_samples=1, replace=False, **options)[:, 0], None


def of_rows(options, rows):
    """Options with an axis of rows everywhere, to map over."""
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (rows, *jnp.shape(x)[1:])), options)


@functools.partial(jax.jit, static_argnames="valid_vocab")
def by_vmap(logits, keys, t, *, logit_bias=None, mask=None, valid_vocab=None, **more):
    """One row at a time under vmap."""
    def one(l, key, t, mask, more):
        return gumbeljax.sample_logits(l, key, temperature=t, mask=mask, valid_vocab=valid_vocab, **more)

    logits = logits if logit_bias is None else logits + logit_bias
    mask = jnp.ones(logits.shape, bool) if mask is None else jnp.broadcast_to(mask, logits.shape)
    return jax.vmap(one)(logits, keys, t, mask, of_rows(more, logits.shape[0])), None


@functools.partial(jax.jit, static_argnames="valid_vocab")
def by_scan(logits, keys, t, *, logit_bias=None, mask=None, valid_vocab=None, **more):
    """One row at a time in a scan whose carry holds the last token."""
    logits = logits if logit_bias is None else logits + logit_bias
    mask = jnp.ones(logits.shape, bool) if mask is None else jnp.broadcast_to(mask, logits.shape)

    def step(carry, row):
        l, key, t, mask, more = row
        token = gumbeljax.sample_logits(l, key, temperature=t, mask=mask, valid_vocab=valid_vocab, **more)
        return token, token

    rows = logits, keys, t, mask, of_rows(more, logits.shape[0])
    return jax.lax.scan(step, jnp.int32(0), rows)[1], None


@functools.partial(jax.jit, static_argnames="valid_vocab")
def by_reference(logits, keys, t, *, logit_bias=None, mask=None, valid_vocab=None):
    logits = logits if logit_bias is None else logits + logit_bias
    logits = logits if mask is None else jnp.where(mask, logits, -jnp.inf)
    return reference.grouped_gumbel_max(logits[:, :valid_vocab], keys, temperature=t), None


def _name(route):
    return route.__name__.removeprefix("by_")


def routes(*chosen):
    """Parametrises a test over routes."""
    parameters = [pytest.param(r, marks=needs_triton) if r is by_triton else r for r in chosen]
    return pytest.mark.parametrize("route", parameters, ids=[_name(r) for r in chosen])


SAME_TOKEN = (by_head, by_triton, by_logits, by_several, by_distinct, by_vmap, by_scan)  # bit for bit one draw
FILTERED = (by_head, by_logits, by_several, by_distinct, by_vmap, by_scan, by_categorical)  # the routes that filter
ALL = (by_head, by_triton, by_logits, by_distinct, by_scan, by_reference, by_categorical)


def keys_of(seed, rows):
    return jax.random.split(jax.random.key(seed), rows)


def words_of(keys):
    return np.asarray(jax.random.key_data(keys))


def oracle_tokens(logits, keys, t=1.0, **options):
    return oracles.grouped_tokens(oracles.processed_logits(logits, **options).processed, words_of(keys), t)
