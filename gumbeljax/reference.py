r"""Three ways to draw from softmax(logits), in plain `jnp`: to read, to teach with, and to test the fast ones against.

All take whole logits `[*batch, vocab]` and return int32 tokens `[*batch]`; a row that has no law (no token allowed, a
NaN or a +inf logit) gives the marker -1. None is fast, and none promises to agree with another on the token: they
agree on the law.

Why adding noise and taking the maximum draws from a softmax
------------------------------------------------------------

A standard Gumbel variable has :math:`P(G \le x) = \exp(-e^{-x})`, so :math:`l + G` has
:math:`P(l + G \le x) = \exp(-e^{l - x})` and density :math:`e^{l - x} \exp(-e^{l - x})`.

*Max-stability.* For independent :math:`G_v` and a set of tokens with :math:`L = \log \sum_v e^{l_v}`,

.. math:: P(\max_v l_v + G_v \le x) = \prod_v \exp(-e^{l_v - x}) = \exp(-e^{L - x}) ,

so the maximum is again :math:`L` plus one Gumbel variable.

*Gumbel-max.* Let M be the maximum over all tokens but v, of log mass :math:`L_{-v}`. Then

.. math::
   P(l_v + G_v > M) = \int e^{l_v - x} \exp(-e^{l_v - x}) \exp(-e^{L_{-v} - x}) \, dx
                    = \int e^{l_v - x} \exp(-e^{L - x}) \, dx = e^{l_v - L} ,

the softmax probability of v; the last integral is by the substitution :math:`y = e^{L - x}`. The same integral cut at x
gives :math:`e^{l_v - L} \exp(-e^{L - x})`, a product: *which token wins is independent of the winning score*.

*Groups.* By max-stability a group's best score is its log mass plus one Gumbel variable, so a race between groups needs
one noise value each, and picks group g with probability :math:`e^{L_g - L}`. By independence the token inside g may
then be drawn with fresh noise, with probability :math:`e^{l_v - L_g}`. The product is :math:`e^{l_v - L}`, from
V/16 + 16 noise values in place of V.

Sources: E. J. Gumbel, "Statistical theory of extreme values and some practical applications", 1954; C. J. Maddison,
D. Tarlow, T. Minka, "A* sampling", NeurIPS 2014.
"""

import jax
import jax.numpy as jnp

from gumbeljax import _checks
from gumbeljax._call import plain_broadcasting
from gumbeljax._keys import row_keys
from gumbeljax._mesh import check_rows
from gumbeljax._typing import Array, ArrayLike, Key
from pallas_kernels import noise
from pallas_kernels.logits import canonical_temperature
from pallas_kernels.noise import DRAW, GROUP, GROUP_LEVEL, TOKEN_LEVEL

NO_TOKEN = -1


@plain_broadcasting()
def inverse_cdf(logits: ArrayLike, key: Key) -> Array:
    """Draws by inverting the cumulative sum of the probabilities with one uniform number a row.

    Approximate: the law is right up to the float32 rounding of a running sum, which at a vocabulary of 100,000 can be
    larger than a rare token's whole probability. What holds absolutely is that a token of probability zero is never
    returned, nor an id outside the vocabulary: running sums are made to rise only where there is mass, and the number
    looked for is strictly below the last of them.

    Args:
      logits: `[*batch, vocab]`, any float dtype; -inf forbids a token.
      key: one key (typed or raw), or an array of keys of shape `[*batch]`.

    Returns:
      int32 tokens `[*batch]`; -1 where the row has no law.

    Raises:
      ValueError: logits without a vocabulary axis, or keys of another shape than the batch.
      TypeError: logits that are not floats, or something that is not a key.

    >>> import jax, jax.numpy as jnp
    >>> inverse_cdf(jnp.log(jnp.array([0.0, 1.0, 0.0])), jax.random.key(0))
    Array(1, dtype=int32)
    """
    x, (k0, k1), batch = _rows(logits, key)
    weights = jnp.exp(x - jnp.max(x, axis=-1, keepdims=True))  # the largest is 1: no overflow, and the sum is >= 1
    sums = jnp.cumsum(weights, axis=-1)
    # A parallel cumulative sum may round two neighbours differently and wobble over a token without mass. Keep only the
    # sums at tokens with mass, carried forward: then the first sum above any number belongs to a token with mass.
    sums = jax.lax.cummax(jnp.where(weights > 0, sums, 0.0), axis=1)
    u = noise.uniform(*noise.threefry2x32(k0, k1, noise.stream(DRAW, 0, GROUP_LEVEL), jnp.zeros_like(k0)))
    total = sums[:, -1]
    target = jnp.minimum(u * total, jnp.nextafter(total, jnp.float32(0)))  # u < 1, but u * total may round to total
    tokens = jax.vmap(lambda row, y: jnp.searchsorted(row, y, side="right"))(sums, target)  # first sum above the target
    return _marked(tokens, x).reshape(batch)


@plain_broadcasting()
def gumbel_max(logits: ArrayLike, key: Key) -> Array:
    """The token with the largest `logit + Gumbel noise`, one noise value per token.

    Exact in distribution, up to the 2^-64 resolution of the uniform behind the noise (module docstring for the proof).
    Noise is float32 whatever the dtype of the logits. The noise of a token depends on its row key and its id alone, so
    `gumbel_softmax` under the same key relaxes this very draw.

    Args:
      logits: `[*batch, vocab]`, any float dtype; -inf forbids a token.
      key: one key (typed or raw), or an array of keys of shape `[*batch]`.

    Returns:
      int32 tokens `[*batch]`; -1 where the row has no law.

    Raises:
      ValueError: logits without a vocabulary axis, or keys of another shape than the batch.
      TypeError: logits that are not floats, or something that is not a key.

    >>> import jax, jax.numpy as jnp
    >>> gumbel_max(jnp.array([[0.0, -jnp.inf], [-jnp.inf, 0.0]]), jax.random.key(0))
    Array([0, 1], dtype=int32)
    """
    x, (k0, k1), batch = _rows(logits, key)
    scores = x + _noise(k0, k1, TOKEN_LEVEL, jnp.arange(x.shape[-1]))
    return _marked(jnp.argmax(scores, axis=-1), x).reshape(batch)


@plain_broadcasting()
def grouped_gumbel_max(logits: ArrayLike, key: Key, *, temperature: ArrayLike = 1.0) -> Array:
    """The sampling law of this library, step by step: a race of groups, then a race inside the winner.

    Exact in distribution, and pathwise exact with `gumbeljax.sample` up to near-ties: where two scores differ by less
    than float32 rounding the token may differ, because scores here are single float32 numbers and `sample` compares
    them exactly. With m the group's largest logit and G standard Gumbel noise,

        score of a group = m + T * (log sum exp((l - m) / T) + G)
        score of a token = (l - m) / T + G          inside the group with the largest score

    Temperature scales the race and not the logits, so nothing overflows when T is small. At T = 0 there is no noise and
    the lowest id of the largest logit is returned.

    Args:
      logits: `[*batch, vocab]`, any float dtype; -inf forbids a token.
      key: one key (typed or raw), or an array of keys of shape `[*batch]`.
      temperature: scalar or `[*batch]`; a negative, infinite or NaN one leaves its row without a law.

    Returns:
      int32 tokens `[*batch]`; -1 where the row has no law.

    Raises:
      ValueError: logits without a vocabulary axis, or keys or a temperature of another shape than the batch.
      TypeError: logits that are not floats, or something that is not a key.

    >>> import jax, jax.numpy as jnp
    >>> grouped_gumbel_max(jnp.array([1.0, 3.0, 3.0]), jax.random.key(0), temperature=0.0)
    Array(1, dtype=int32)
    """
    x, (k0, k1), batch = _rows(logits, key)
    t = canonical_temperature(_checks.per_row(temperature, "temperature", batch))[:, None]
    divisor = jnp.where(t > 0, t, 1.0)
    rows = jnp.arange(x.shape[0])

    groups = jnp.pad(x, ((0, 0), (0, -x.shape[1] % GROUP)), constant_values=-jnp.inf)
    groups = groups.reshape(len(x), groups.shape[1] // GROUP, GROUP)
    largest = jnp.max(groups, axis=-1)
    below = groups - jnp.where(largest == -jnp.inf, 0.0, largest)[..., None]  # <= 0, and 0 at a group's best token
    log_mass = jnp.log(jnp.sum(jnp.exp(below / divisor[..., None]), axis=-1))  # relative to the largest, in units of T
    first_ids = jnp.arange(0, groups.shape[1] * GROUP, GROUP)
    winner = jnp.argmax(largest + divisor * (log_mass + _noise(k0, k1, GROUP_LEVEL, first_ids)), axis=-1)

    ids = winner[:, None] * GROUP + jnp.arange(GROUP)
    place = jnp.argmax(below[rows, winner] / divisor + _noise(k0, k1, TOKEN_LEVEL, ids), axis=-1)
    tokens = jnp.where(t[:, 0] > 0, ids[rows, place], jnp.argmax(x, axis=-1))
    return jnp.where(jnp.isnan(t[:, 0]), NO_TOKEN, _marked(tokens, x)).reshape(batch)


def _rows(logits, key):
    """float32 logits `[rows, vocab]`, the two words of every row key as `[rows]`, and the batch shape."""
    x = _checks.as_array(logits, "logits")
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"logits must be floating point; got {x.dtype}: convert them with .astype(jnp.float32).")
    if x.ndim == 0 or x.shape[-1] == 0:
        raise ValueError(f"logits must be [*batch, vocab] with at least one token; got shape {list(x.shape)}: "
                         "put the vocabulary on the last axis.")  # fmt: skip
    check_rows(x, key, None, (), way_out="one key per row, sharded like logits")
    batch = x.shape[:-1]
    return x.reshape(-1, x.shape[-1]).astype(jnp.float32), row_keys(key, batch), batch


def _noise(k0, k1, level, ids):
    return noise.gumbel(k0[:, None], k1[:, None], noise.stream(DRAW, 0, level), ids.astype(jnp.uint32))


def _marked(tokens, x):
    """Tokens as int32, -1 in a row whose largest logit is NaN, +inf or -inf."""
    return jnp.where(jnp.isfinite(jnp.max(x, axis=-1)), tokens, NO_TOKEN).astype(jnp.int32)
