"""What every bandit shares: arms, the triple of functions, rewards, and the key of a choice."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gumbeljax._call import plain_broadcasting
from gumbeljax._checks import as_array, is_traced, listed
from gumbeljax._keys import as_threefry, typed_key
from gumbeljax._typing import Array, ArrayLike, Key
from pallas_kernels import noise


class Arms(NamedTuple):
    """The arms: arm i is `draft_len[i]` tokens of a draft, at `cost[i]` for the draft and its verification together.

    `draft_len` int `[arms]`, at least 0 (0: plain decoding), known when the call is traced. `cost` float, `[arms]` or one
    number for all, positive and finite: time per step, in any unit. `draft` int `[arms]`: which draft, for the caller,
    who looks it up by the chosen arm; a bandit never reads it.

    >>> arms = Arms(draft_len=[0, 4, 8], cost=[1.0, 1.4, 1.8], draft=[0, 0, 0])
    >>> arms.draft_len[1]
    4
    """

    draft_len: ArrayLike
    cost: ArrayLike = 1.0
    draft: ArrayLike = 0


class Bandit(NamedTuple):
    """Three pure functions, as `optax.GradientTransformation` has two.

    - `init() -> state`: a pytree of arrays; its shapes and dtypes never change.
    - `select(state, key) -> arm`: int32 scalar. `key` is one JAX random key, typed or raw; bandits without noise do not
      look at it. The others use a stream of their own, so the key may be one that tokens are drawn with.
    - `update(state, arm, num_accepted, draft_len) -> state`: `draft_len` is the number of tokens that were drafted,
      `num_accepted` how many of them were kept: 0 to `draft_len`. An `arm` that does not exist changes nothing, and neither
      does a `num_accepted` that is NaN or negative: one such round would otherwise spoil an arm for ever.

    To leave a round out (a finished row of a batch), keep the old state with `jnp.where` over its leaves. In a carry inside
    `shard_map`, start from `jax.lax.pcast(bandit.init(), axis_name, to="varying")` when every shard has its own.
    """

    init: Callable[[], Any]
    select: Callable[..., Array]
    update: Callable[..., Any]


def bandit(init: Callable, select: Callable, update: Callable) -> Bandit:
    """A `Bandit` that does not mind what promotions its user forbids."""
    return Bandit(*map(plain_broadcasting(), (init, select, update)))


@plain_broadcasting()
def expected_tokens(rate: ArrayLike, draft_len: ArrayLike) -> Array:
    r"""Tokens per step when each drafted token is accepted with probability `rate`, as far as the first rejection.

    With acceptance rate a and draft length K a step gives :math:`\sum_{j=0}^{K} a^j = (1 - a^{K+1}) / (1 - a)` tokens in
    expectation: the accepted ones and one from the target. (Not K a + 1: nothing counts after a rejection.)

    Args:
      rate: a in [0, 1], any shape.
      draft_len: K at least 0, a shape that broadcasts with it.

    Returns:
      float32 of the broadcast shape, between 1 and K + 1.

    >>> expected_tokens(jnp.array([0.0, 0.5, 1.0]), 2)
    Array([1.  , 1.75, 3.  ], dtype=float32)

    Source: Y. Leviathan, M. Kalman, Y. Matias, "Fast inference from transformers via speculative decoding", ICML 2023.
    """
    a, most = jnp.broadcast_arrays(jnp.asarray(rate, jnp.float32), jnp.asarray(draft_len, jnp.float32) + 1)
    gap = jnp.where(a >= 1, 1, 1 - a)  # exact for a >= 1/2, so log1p(-gap) is log(a) without its rounding
    return jnp.where(a >= 1, most, -jnp.expm1(most * jnp.log1p(-gap)) / gap)


@plain_broadcasting()
def scaled_reward(arms: Arms, arm: ArrayLike, num_accepted: ArrayLike) -> Array:
    r"""The reward of a step: its tokens per unit cost, scaled into [0, 1] by one affine map for all arms.

    :math:`r = (x - l) / (u - l)` with :math:`x = (\text{num\_accepted} + 1) / \text{cost}_i`, and with l the worst and u
    the best that any arm can give: :math:`l = \min_j 1 / \text{cost}_j`, :math:`u = \max_j (K_j + 1) / \text{cost}_j`.
    One map for all keeps the order of the means. With equal costs and one draft length K it is the accepted fraction.

    Args:
      arms: the arms.
      arm: int, any shape.
      num_accepted: number of accepted tokens, a shape that broadcasts with it.

    Returns:
      float32 of the broadcast shape, in [0, 1]; 0 where no arm can differ from another (l = u), or the arm does not exist.

    >>> arms = Arms(draft_len=[0, 3], cost=[1.0, 2.0])  # between 1/2 and 2 tokens per unit cost
    >>> scaled_reward(arms, jnp.array([0, 1, 1]), jnp.array([0, 0, 3]))
    Array([0.33333334, 0.        , 1.        ], dtype=float32)
    """
    arms, arm = checked(arms), as_array(arm, "arm")
    low, high = reward_range(arms)
    cost = jnp.sum(jnp.where(is_arm(arms, arm[..., None]), arms.cost, 0), axis=-1)
    return scaled((jnp.asarray(num_accepted, jnp.float32) + 1) / jnp.where(cost > 0, cost, jnp.inf), low, high)


def scaled(tokens_per_cost: Array, low: Array, high: Array) -> Array:
    """Tokens per unit cost as a fraction of the way from the worst to the best."""
    return jnp.clip((tokens_per_cost - low) / jnp.where(high > low, high - low, jnp.inf), 0, 1)


def reward_range(arms: Arms) -> tuple[Array, Array]:
    """The least and the most tokens per unit cost that a step can give."""
    return jnp.min(1 / arms.cost), jnp.max((arms.draft_len + 1) / arms.cost)


def is_arm(arms: Arms, arm: ArrayLike) -> Array:
    """bool `[..., arms]`: which arm it is. A comparison, so that an arm that does not exist is none of them."""
    return jnp.arange(arms.cost.shape[-1]) == as_array(arm, "arm")


def is_played(arms: Arms, arm: ArrayLike, num_accepted: ArrayLike) -> Array:
    """bool `[arms]`: which arm a round was played with; none of them if it says nothing (see `Bandit.update`)."""
    return is_arm(arms, arm) & (jnp.asarray(num_accepted) >= 0)


def checked(arms: Arms) -> Arms:
    """Arms as float32 `cost [arms]` and NumPy `draft_len [arms]`, or one sentence on what is wrong."""
    if not isinstance(arms, Arms):
        raise TypeError(f"arms must be gumbeljax.bandit.Arms; got {type(arms).__name__}: write Arms(draft_len, cost).")
    if is_traced(arms.draft_len):
        raise TypeError("arms.draft_len must be known when the call is traced, since it bounds shapes; got a traced array: "
                        "make it a constant.")
    draft_len = listed(arms.draft_len, "arms.draft_len")
    if not isinstance(draft_len, np.ndarray):
        draft_len = np.asarray(draft_len)
    if draft_len.ndim != 1 or draft_len.size == 0:
        raise ValueError(f"arms.draft_len must be [arms] with at least one arm; got shape {list(draft_len.shape)}: "
                         "give each arm its draft length.")
    if draft_len.dtype.kind not in "iu":
        raise TypeError(f"arms.draft_len must be integers; got dtype {draft_len.dtype}: pass numbers of tokens.")
    if np.any(bad := (draft_len < 0) | (draft_len > 2**20)):
        raise ValueError(f"arms.draft_len must be between 0 and 2**20; got {draft_len[bad][0]}: use 0 for plain decoding.")
    cost = as_array(arms.cost, "arms.cost")
    if cost.shape not in ((), draft_len.shape) or not is_real(cost):
        raise ValueError(f"arms.cost must be real, one number or of the shape of draft_len, {list(draft_len.shape)}; got "
                         f"{cost.dtype}{list(cost.shape)}: give each arm its time per step.")
    if not any(map(is_traced, jax.tree.leaves(arms.cost))):
        values = np.atleast_1d(np.asarray(arms.cost, np.float64))
        if np.any(bad := ~((values > 1e-30) & (values < 1e30))):
            raise ValueError(f"arms.cost must lie between 1e-30 and 1e30; got {values[bad][0]:g}: measure it, or pass 1.")
    return Arms(draft_len.astype(np.int32), jnp.broadcast_to(cost.astype(jnp.float32), draft_len.shape), arms.draft)


def is_real(x: Array) -> bool:
    """Whether it has numbers: integers or floats of any width."""
    return jnp.issubdtype(x.dtype, jnp.floating) or jnp.issubdtype(x.dtype, jnp.integer)


def number(x, name: str, least: float, most: float) -> Array:
    """A finite scalar in [least, most] as float32: a traced one is taken as it is."""
    out = as_array(x, name)
    if out.shape != () or not is_real(out):
        raise ValueError(f"{name} must be a real scalar; got {out.dtype}{list(out.shape)}: use jax.vmap for several.")
    if not is_traced(x) and not least <= float(x) <= most:
        raise ValueError(f"{name} must lie between {least:g} and {most:g}; got {float(x):g}: pass a number in that range.")
    return out.astype(jnp.float32)


def bandit_key(key: Key) -> Array:
    """The key that a choice draws with: a hash of the user's on the stream set aside for bandits.

    `jax.random` derives its own keys by the counters of `split` and `fold_in`, which row keys use as well; from here on
    no counter meets one of another use.
    """
    key = typed_key(key)
    if key.shape != ():
        raise ValueError(f"key must be one key; got keys of shape {list(key.shape)}: map over them with jax.vmap.")
    k0, k1 = jax.random.key_data(as_threefry(key))
    words = noise.threefry2x32(k0, k1, jnp.uint32(noise.stream(noise.BANDIT, 0, noise.GROUP_LEVEL)), jnp.uint32(0))
    return jax.random.wrap_key_data(jnp.stack(words), impl="threefry2x32")
