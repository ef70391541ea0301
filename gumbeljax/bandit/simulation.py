"""A bandit against acceptance rates that are known, to measure its regret."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from gumbeljax._checks import as_array
from gumbeljax._typing import Array, ArrayLike, Key
from gumbeljax.bandit import core
from gumbeljax.bandit.core import Arms, Bandit


class Simulation(NamedTuple):
    """What happened in each round."""

    arm: Array  # int32 [rounds]
    num_accepted: Array  # int32 [rounds]
    regret: Array  # f32 [rounds], cumulative


def simulate(bandit: Bandit, arms: Arms, rates: ArrayLike, key: Key) -> Simulation:
    r"""Plays a bandit against given acceptance rates, in one scan.

    In round t each token of arm i's draft is accepted with probability `rates[t, i]`, independently, as far as the first
    rejection. Regret is the expected reward that was missed, not a sampled one:
    :math:`\sum_t \max_j \mu_{t,j} - \mu_{t,i_t}`, with :math:`\mu` the mean of `scaled_reward`. It costs
    rounds x arms x longest draft; map over keys with `jax.vmap`, inside `jax.jit`.

    Args:
      bandit: any.
      arms: the arms it was made for.
      rates: float `[rounds, arms]` in [0, 1]; rates that switch are rows that differ.
      key: one JAX random key.

    Returns:
      A `Simulation`, leaves of shape `[rounds]`. Exact in distribution.

    Raises:
      ValueError, TypeError: rates of another shape; something that is not one key; arms that make no sense.

    >>> from gumbeljax.bandit import fixed
    >>> arms = Arms(draft_len=[1, 1])
    >>> out = simulate(fixed(arms, 0), arms, jnp.tile(jnp.array([0.25, 0.75]), (8, 1)), jax.random.key(0))
    >>> round(float(out.regret[-1]), 3)
    4.0
    """
    arms, rates = core.checked(arms), as_array(rates, "rates")
    num_arms = len(arms.draft_len)
    if rates.ndim != 2 or rates.shape[1] != num_arms or not core.is_real(rates):
        raise ValueError(f"rates must be real, [rounds, {num_arms}], one for each round and arm; got "
                         f"{rates.dtype}{list(rates.shape)}: repeat rates that do not change over the rounds.")
    rates = rates.astype(jnp.float32)
    low, high = core.reward_range(arms)
    longest = max(int(arms.draft_len.max()), 1)
    # Two keys below the bandit's own: one for the coins of the world, one for the bandit's choices.
    world, choices = jax.random.split(core.bandit_key(key))

    def play(state, inputs):
        rate, number = inputs
        arm = bandit.select(state, jax.random.fold_in(choices, number))
        draft_len = jnp.asarray(arms.draft_len)[arm]
        coins = jax.random.uniform(jax.random.fold_in(world, number), (longest,), jnp.float32) < rate[arm]
        tried = coins & (jnp.arange(longest) < draft_len)
        num_accepted = jnp.sum(jnp.cumprod(tried.astype(jnp.int32)), dtype=jnp.int32)
        mean = core.scaled(core.expected_tokens(rate, arms.draft_len) / arms.cost, low, high)
        return bandit.update(state, arm, num_accepted, draft_len), (arm, num_accepted, jnp.max(mean) - mean[arm])

    # Adding 0: inside shard_map a carry must vary over the mesh from the start as it will later.
    zero = 0 * jax.random.key_data(world)[0]
    start = jax.tree.map(lambda x: x + zero.astype(x.dtype), bandit.init())
    rounds = jnp.arange(rates.shape[0], dtype=jnp.uint32)
    _, (arm, num_accepted, gap) = jax.lax.scan(play, start, (rates, rounds))
    return Simulation(arm, num_accepted, jnp.cumsum(gap))  # sums of sums: adding one by one loses digits in float32
