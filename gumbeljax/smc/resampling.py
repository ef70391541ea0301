r"""Resampling: from log-weights of n particles to the ancestors of the next generation.

Four schemes, one contract: `scheme(log_weights [..., n], key) -> ancestors [..., num_samples]`, every one unbiased,
:math:`E[\#\{j : a_j = i\}] = M w_i`. They differ in variance and in the counts they allow:

==============  =============================================  ====================  ==============================
scheme          counts of a particle                           ancestors             noise
==============  =============================================  ====================  ==============================
`systematic`    floor(M w) or ceil(M w)                        sorted                one uniform a group
`stratified`    within 2 of M w (strictly), so 4 values        sorted                one uniform an output
`residual`      at least floor(M w)                            copies, then draws    one uniform an output
`multinomial`   any                                            independent draws     one uniform an output
==============  =============================================  ====================  ==============================

How it stays exact where a float32 cumulative sum is not (30,000 equal weights added in turn miss 1 by 3e-4, and the last
particle pays for it): weights become integers once, in two uint32 limbs (56 bits at n = 32, 40 at 10^6), and all after that
(cumulative sums, the scale from weights to outputs, comparisons with the noise) is integer arithmetic. Sums are then
exact in any order, the last one *is* the total, and a particle of weight zero spans no integer, so it cannot be drawn.

Sources: G. Kitagawa, "Monte Carlo filter and smoother for non-Gaussian nonlinear state space models", JCGS 1996
(systematic, stratified); J. S. Liu, R. Chen, "Sequential Monte Carlo methods for dynamic systems", JASA 1998 (residual);
R. Douc, O. Cappé, "Comparison of resampling schemes for particle filtering", ISPA 2005; T. Li, M. Bolić, P. M. Djurić,
"Resampling methods for particle filtering", IEEE SPM 2015.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from gumbeljax._call import plain_broadcasting
from gumbeljax._keys import row_keys
from gumbeljax._mesh import check_rows
from gumbeljax._typing import Array, ArrayLike, Key
from gumbeljax.smc.ess import log_weights_and_mask, scaled_weights
from pallas_kernels import noise

MAX_COUNT = 2**27
"""Largest number of particles and of outputs: limbs, quotients and digits below fit their words up to here."""

Words = tuple[Array, Array]
"""A 64-bit integer as (high, low) uint32, or as 32.32 fixed point."""


# Two-word integers: XLA has no 64-bit integers unless the user turns them on.


def _multiply(a: Array, b: Array) -> Words:
    """The 64-bit product of two uint32."""
    a1, a0, b1, b0 = a >> 16, a & 0xFFFF, b >> 16, b & 0xFFFF
    middle = a0 * b1 + ((a0 * b0) >> 16)
    cross = a1 * b0 + (middle & 0xFFFF)
    return a1 * b1 + (middle >> 16) + (cross >> 16), a * b


def _add(*terms: Array) -> Words:
    """(carries, sum) of uint32 terms."""
    total, carries = terms[0], jnp.zeros_like(terms[0])
    for term in terms[1:]:
        total = total + term
        carries = carries + (total < term)
    return carries, total


def _product(x: Words, y: Words) -> tuple[Array, Array, Array]:
    """The three high words of the 128-bit product."""
    high00, _ = _multiply(x[1], y[1])
    high01, low01 = _multiply(x[1], y[0])
    high10, low10 = _multiply(x[0], y[1])
    high11, low11 = _multiply(x[0], y[0])
    carry, word1 = _add(high00, low01, low10)
    carry, word2 = _add(high01, high10, low11, carry)
    return high11 + carry, word2, word1


def _subtract(x: Words, y: Words) -> Words:
    return x[0] - y[0] - (x[1] < y[1]), x[1] - y[1]


def _at_most(x: Words, y: Words) -> Array:
    return (x[0] < y[0]) | ((x[0] == y[0]) & (x[1] <= y[1]))


def _ceil_quotient(m: int, total: Words) -> Words:
    """`ceil(m * 2^96 / total)` for `2^60 <= total < 2^63` and `m <= 2^27`: long division by digits of 16 bits.

    Each digit is guessed from float32, at most one too small, and put right with the exact remainder.
    """
    as_float = lambda x: x[0].astype(jnp.float32) * 2.0**32 + x[1].astype(jnp.float32)  # noqa: E731
    rest = jnp.full_like(total[0], m), jnp.zeros_like(total[0])
    digits = []
    for _ in range(4):
        guess = as_float(rest) / as_float(total) * (2.0**16 * (1 - 2.0**-20))
        digit = guess.astype(jnp.uint32)
        rest = (rest[0] << 16) | (rest[1] >> 16), rest[1] << 16
        carry, low = _multiply(digit, total[1])
        rest = _subtract(rest, (digit * total[0] + carry, low))
        small = _at_most(total, rest)
        rest = tuple(jnp.where(small, a, b) for a, b in zip(_subtract(rest, total), rest, strict=True))
        digits.append(digit + small)
    up, low = _add((digits[2] << 16) + digits[3], ((rest[0] | rest[1]) != 0).astype(jnp.uint32))
    # Without the barrier XLA fuses these hundred operations into the loop over particles and repeats them for each.
    return jax.lax.optimization_barrier(((digits[0] << 16) + digits[1] + up, low))


# One group. Weights are float32 `[n]` with maximum 1.


def _power_of_two(exponent: Array) -> Array:
    return jax.lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)


def _integer_weights(weights: Array) -> tuple[Array, Array, int]:
    """Weights as whole and fractional limbs and the bits of the latter: `w * 2^e = whole + fraction * 2^-bits`.

    The power of two puts the total between 2^28 and 2^30. It comes from integer sums too (the last limb rounded up, by at
    most 1 in all): their order does not matter, so neighbours and devices cannot change it.
    """
    size = max(weights.shape[-1] - 1, 0).bit_length()
    bits = min(32 - size, 31)  # n fractional limbs of so many bits add up without overflow
    total, rest = jnp.zeros((), jnp.float32), weights
    levels = math.ceil((size + 1) / bits)
    for level in range(1, levels + 1):
        rest = rest * 2.0 ** (bits if level > 1 else bits - 1)  # the maximum 1 is the one weight that needs another bit
        limb = jnp.floor(rest) if level < levels else jnp.ceil(rest)
        total = total + jnp.sum(limb.astype(jnp.uint32), dtype=jnp.uint32).astype(jnp.float32) * 2.0 ** (1 - bits * level)
        rest = rest - limb
    exponent = 29 - ((jax.lax.bitcast_convert_type(total, jnp.int32) >> 23) - 127)
    scaled = weights * _power_of_two(exponent)
    whole = jnp.floor(scaled)
    fraction = jnp.round((scaled - whole) * 2.0**bits)
    return whole.astype(jnp.uint32), fraction.astype(jnp.uint32), bits


def _cumulative(whole: Array, fraction: Array, bits: int) -> Words:
    """Exact cumulative sums, 32.32 fixed point."""
    whole, fraction = jnp.cumsum(jnp.stack([whole, fraction]), axis=-1, dtype=jnp.uint32)
    return whole + (fraction >> bits), fraction << (32 - bits)


def _last(x: Words) -> Words:
    return x[0][-1], x[1][-1]


def _fill(ends: Array, num_samples: int) -> Array:
    """Ancestors from ends: particle i has the outputs from ends[i - 1] up to ends[i]. Linear, and no two writes meet."""
    if ends.shape[0] <= 64:  # comparisons beat a scatter
        return jnp.sum(ends[:, None] <= jnp.arange(num_samples, dtype=jnp.int32), axis=0, dtype=jnp.int32)
    ids = jnp.arange(ends.shape[0], dtype=jnp.int32)
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), ends[:-1]])
    place = jnp.where(ends > starts, starts, num_samples + ids)  # dropped
    marks = jnp.zeros(num_samples, jnp.int32).at[place].set(ids, mode="drop", unique_indices=True)
    return jax.lax.cummax(marks)


def _ordered(weights: Array, uniforms: Array, num_samples: int) -> Array:
    """Output j sits at (j + u_j) / M of the total weight. `uniforms` are 32-bit words, `[1]` (shared) or `[num_samples]`."""
    sums = _cumulative(*_integer_weights(weights))
    # M C / Q in 32.32 fixed point, never too low: multiples of 1 / M of the total keep their place, and the end is M.
    whole, fraction, _ = _product(sums, _ceil_quotient(num_samples, _last(sums)))
    whole, fraction = jax.lax.optimization_barrier((whole, fraction))
    whole = whole.astype(jnp.int32)
    u = uniforms[0] if uniforms.shape[0] == 1 else uniforms[jnp.minimum(whole, num_samples - 1)]
    return _fill(jnp.minimum(whole + (fraction > u), num_samples), num_samples)


def _independent(sums: Words, uniforms: Words) -> Array:
    """One draw for every 64-bit uniform: the first particle whose cumulative sum exceeds u * total."""
    high, low, _ = _product(uniforms, _last(sums))  # below the total
    n = sums[0].shape[0]
    if n <= 64:  # comparisons beat a search
        high, low = jax.lax.optimization_barrier((high, low))
        return jnp.sum(_at_most((sums[0][:, None], sums[1][:, None]), (high, low)), axis=0, dtype=jnp.int32)

    def halve(i, found):  # `found` sums are at most the target
        ahead = found + jnp.right_shift(jnp.int32(1 << n.bit_length()), i + 1)
        at = jnp.minimum(ahead, n) - 1
        entry_high, entry_low = (x.at[at].get(mode="promise_in_bounds") for x in sums)
        passed = (ahead <= n) & _at_most((entry_high, entry_low), (high, low))
        return jnp.where(passed, ahead, found)

    # A loop: unrolled, XLA's CPU compiler takes minutes.
    found = jax.lax.fori_loop(jnp.int32(0), jnp.int32(n.bit_length()), halve, jnp.zeros(high.shape, jnp.int32))
    return jnp.minimum(found, n - 1)


def _systematic(weights: Array, words, num_samples: int) -> Array:
    return _ordered(weights, words(1)[0], num_samples)


def _stratified(weights: Array, words, num_samples: int) -> Array:
    return _ordered(weights, words(num_samples)[0], num_samples)


def _multinomial(weights: Array, words, num_samples: int) -> Array:
    return _independent(_cumulative(*_integer_weights(weights)), words(num_samples))


def _residual(weights: Array, words, num_samples: int) -> Array:
    whole, fraction, bits = _integer_weights(weights)
    total = jnp.sum(whole, dtype=jnp.uint32), jnp.sum(fraction, dtype=jnp.uint32)
    total = total[0] + (total[1] >> bits), total[1] << (32 - bits)
    each = whole + (fraction >> bits), fraction << (32 - bits)
    copies, *part = _product(each, _ceil_quotient(num_samples, total))
    ends = jnp.cumsum(copies.astype(jnp.int32), dtype=jnp.int32)
    rest = part[0].astype(jnp.float32) * 2.0**-32 + part[1].astype(jnp.float32) * 2.0**-64
    top = jnp.max(rest)
    rest = jnp.where(top > 0, rest / jnp.where(top > 0, top, 1), 1)  # all whole: nothing is left to draw
    draws = _independent(_cumulative(*_integer_weights(rest)), words(num_samples))
    is_copy = jnp.arange(num_samples, dtype=jnp.int32) < ends[-1]
    return jnp.where(is_copy, _fill(jnp.minimum(ends, num_samples), num_samples), draws)


# All groups.


@functools.partial(jax.jit, static_argnames=("scheme", "num_samples"))
def _groups(scheme, log_weights: Array, key0: Array, key1: Array, num_samples: int) -> Array:
    weights, _, has_law = scaled_weights(log_weights)

    def one(weights, key0, key1):
        def words(count):
            index = jnp.arange(count, dtype=jnp.uint32)
            return noise.threefry2x32(key0, key1, noise.stream(noise.RESAMPLING, 0, 0), index)

        return scheme(weights, words, num_samples)

    ancestors = jax.vmap(one)(jnp.where(has_law, weights, 1.0), key0, key1)
    return jnp.where(has_law, ancestors, -1)


@plain_broadcasting()
def _resample(scheme, log_weights, key, num_samples, mask) -> Array:
    x = log_weights_and_mask(log_weights, mask)
    batch_shape, n = x.shape[:-1], x.shape[-1]
    if num_samples is not None and (isinstance(num_samples, bool) or not isinstance(num_samples, int | np.integer)):
        raise TypeError(f"num_samples must be a Python int, since it sets the shape of the result; got "
                        f"{type(num_samples).__name__}: make it a constant.")
    m = n if num_samples is None else int(num_samples)
    if m < 1:
        raise ValueError(f"num_samples must be at least 1; got {m}: pass the number of ancestors wanted.")
    if max(n, m) > MAX_COUNT:
        raise ValueError(f"log_weights and num_samples must count at most 2^27 particles; got {max(n, m)}: "
                         "resample in several groups.")
    check_rows(x, key, None, (), way_out="one key per group, sharded like log_weights")
    key0, key1 = row_keys(key, batch_shape)
    return _groups(scheme, x.reshape(-1, n), key0, key1, m).reshape(*batch_shape, m)


def systematic(
    log_weights: ArrayLike, key: Key, *, num_samples: int | None = None, mask: ArrayLike | None = None
) -> Array:
    r"""Systematic resampling: outputs at :math:`(j + u) / M` of the total weight, one uniform u for a whole group.

    Output j is the first particle i with :math:`\sum_{k \le i} w_k > (j + u) / M`. Particle i gets
    :math:`\lfloor M w_i \rfloor` or :math:`\lceil M w_i \rceil` copies, :math:`M w_i` on average: the fewest surprises of
    the four, and the cheapest. Exact in distribution: beside the float32 rounding of :math:`e^l`, the mean count is off by
    at most M n 2^-60, the resolution of the integer weights (10^-6 at n = M = 10^6; a weight below half of it counts as 0).

    Time and memory are O(n + M). A group's ancestors depend on its weights and its key alone, not on its neighbours.

    Args:
      log_weights: `[..., n]`, unnormalised, n <= 2^27; bfloat16, float16, float32 or float64. Any shift is allowed. A
        particle at -inf has weight 0 and is never an ancestor.
      key: one key (typed or raw), or an array of keys of the shape of the groups, `[...]`. One key gives group i
        (row-major) the key `fold_in(key, i)`; noise is of its own purpose, so a key that drew tokens may be used again.
      num_samples: number of outputs M, n if None.
      mask: boolean, `[n]` or `[..., n]`, True for particles that live; the others count as -inf, whatever they hold.

    Returns:
      int32 ancestors `[..., num_samples]`, sorted; all -1 in a group without a law (all -inf or dead, or a NaN or +inf).
      Nothing else outside [0, n) is ever returned.

    Raises:
      TypeError: log-weights that are not floats, a mask that is not boolean, something that is not a key.
      ValueError: no particles, no outputs or too many; a mask or keys of another shape.

    >>> import jax, jax.numpy as jnp
    >>> systematic(jnp.log(jnp.array([0.0, 0.5, 0.25, 0.25])), jax.random.key(0))
    Array([1, 1, 2, 3], dtype=int32)
    >>> systematic(jnp.array([[-jnp.inf, -jnp.inf], [0.0, -jnp.inf]]), jax.random.key(0), num_samples=3)
    Array([[-1, -1, -1],
           [ 0,  0,  0]], dtype=int32)

    Source: G. Kitagawa, "Monte Carlo filter and smoother for non-Gaussian nonlinear state space models", JCGS 1996.
    """
    return _resample(_systematic, log_weights, key, num_samples, mask)


def stratified(
    log_weights: ArrayLike, key: Key, *, num_samples: int | None = None, mask: ArrayLike | None = None
) -> Array:
    r"""Stratified resampling: outputs at :math:`(j + u_j) / M` of the total weight, every one with its own uniform.

    The count of a particle differs from :math:`M w_i` by less than 2 and is :math:`M w_i` on average; the counts of all
    particles up to any i together differ by less than 1. Its variance is never above that of `multinomial` (Douc and
    Cappé), which `systematic` cannot promise. Exact in distribution as `systematic` is, whose arguments, result (sorted)
    and errors it shares. O(n + M).

    >>> import jax, jax.numpy as jnp
    >>> stratified(jnp.log(jnp.array([0.0, 0.5, 0.25, 0.25])), jax.random.key(0))
    Array([1, 1, 2, 3], dtype=int32)

    Sources: G. Kitagawa, JCGS 1996; R. Douc, O. Cappé, "Comparison of resampling schemes for particle filtering", 2005.
    """
    return _resample(_stratified, log_weights, key, num_samples, mask)


def residual(
    log_weights: ArrayLike, key: Key, *, num_samples: int | None = None, mask: ArrayLike | None = None
) -> Array:
    r"""Residual resampling: :math:`\lfloor M w_i \rfloor` copies of every particle, the rest drawn from what is left.

    The rest are independent draws with probabilities in proportion to :math:`M w_i - \lfloor M w_i \rfloor`. Exact in
    distribution as `systematic` is, whose arguments and errors it shares; variance never above that of `multinomial`.
    Where float32 rounding puts M w a hair below a whole number, its last copy is drawn with the rest, not given.
    Copies come first, sorted, then the draws, in no order. Memory O(n + M), time O(n + M log n).

    >>> import jax, jax.numpy as jnp
    >>> residual(jnp.array([0.0, 0.0, -jnp.inf, 0.0]), jax.random.key(0), num_samples=6)
    Array([0, 0, 1, 1, 3, 3], dtype=int32)

    Source: J. S. Liu, R. Chen, "Sequential Monte Carlo methods for dynamic systems", JASA 1998.
    """
    return _resample(_residual, log_weights, key, num_samples, mask)


def multinomial(
    log_weights: ArrayLike, key: Key, *, num_samples: int | None = None, mask: ArrayLike | None = None
) -> Array:
    r"""Multinomial resampling: M independent draws, each particle i with probability :math:`w_i`.

    By inversion of a 64-bit uniform, so that rare particles keep their probability. Exact in distribution as
    `systematic` is, whose arguments and errors it shares. Not sorted: the first k outputs are k draws. Memory O(n + M),
    never n x M; time O(n + M log n).

    >>> import jax, jax.numpy as jnp
    >>> multinomial(jnp.log(jnp.array([0.0, 1.0, 0.0])), jax.random.key(0), num_samples=4)
    Array([1, 1, 1, 1], dtype=int32)

    Source: T. Li, M. Bolić, P. M. Djurić, "Resampling methods for particle filtering", IEEE Signal Processing
    Magazine, 2015.
    """
    return _resample(_multinomial, log_weights, key, num_samples, mask)
