"""What a bandit is measured against: epsilon-greedy, one arm for ever, and the best arm by knowledge."""

import jax
import jax.numpy as jnp
import numpy as np

from gumbeljax._checks import as_array, is_traced
from gumbeljax._typing import Array, ArrayLike
from gumbeljax.bandit import core
from gumbeljax.bandit.core import Arms, Bandit
from gumbeljax.bandit.ucb import Means, best, with_reward


def epsilon_greedy(arms: Arms, *, epsilon: ArrayLike = 0.1) -> Bandit:
    r"""The arm of the best mean `scaled_reward` so far; with probability epsilon any arm, each as likely.

    Arms that were never played come first; equals go to the lowest index. Regret grows with the rounds, by epsilon times
    the mean gap for each. The law of verified tokens is exact, whatever is chosen.

    Args:
      arms: the arms.
      epsilon: in [0, 1]. May be traced.

    Returns:
      A `Bandit` whose state is `Means`. Each `select` needs a new key; it may be the one that tokens are drawn with.

    Raises:
      ValueError, TypeError: arms without draft lengths, or with costs that are not positive; an epsilon outside [0, 1];
        something that is not one key.

    >>> bandit = epsilon_greedy(Arms(draft_len=[1, 1]), epsilon=0.0)
    >>> state = bandit.update(bandit.update(bandit.init(), 0, 0, 1), 1, 1, 1)
    >>> int(bandit.select(state, jax.random.key(0)))
    1

    Source: R. S. Sutton, A. G. Barto, "Reinforcement learning: an introduction", section 2.2.
    """
    arms, epsilon = core.checked(arms), core.number(epsilon, "epsilon", 0, 1)

    def init() -> Means:
        return Means(jnp.zeros_like(arms.cost), jnp.zeros_like(arms.cost))

    def select(state: Means, key) -> Array:
        coin, choice = jax.random.split(core.bandit_key(key))
        explores = (jax.random.uniform(coin, dtype=jnp.float32) < epsilon) & jnp.all(state.counts > 0)
        anything = jax.random.randint(choice, (), 0, len(arms.draft_len), jnp.int32)
        return jnp.where(explores, anything, best(state.counts, state.means))

    def update(state: Means, arm, num_accepted, draft_len) -> Means:
        return with_reward(state, core.is_played(arms, arm, num_accepted), core.scaled_reward(arms, arm, num_accepted))

    return core.bandit(init, select, update)


def fixed(arms: Arms, arm: ArrayLike) -> Bandit:
    """One arm for ever. No state (an empty tuple), no noise; the law of verified tokens is exact.

    Args:
      arms: the arms.
      arm: int in [0, arms). May be traced.

    Returns:
      A `Bandit`.

    Raises:
      ValueError, TypeError: arms without draft lengths, or with costs that are not positive; an arm that is not there.

    >>> bandit = fixed(Arms(draft_len=[2, 4]), 1)
    >>> int(bandit.select(bandit.init(), None))
    1
    """
    num_arms, given = len(core.checked(arms).draft_len), as_array(arm, "arm")
    if given.shape != () or given.dtype.kind not in "iu":
        raise TypeError(f"arm must be an integer scalar; got {given.dtype}{list(given.shape)}: pass the index of an arm.")
    if not is_traced(arm) and not 0 <= int(arm) < num_arms:
        raise ValueError(f"arm must be in [0, {num_arms}); got {int(arm)}: pass the index of an arm.")
    return Bandit(
        lambda: (),
        lambda state, key=None: given.astype(jnp.int32),
        lambda state, arm, num_accepted, draft_len: state,
    )


def oracle(arms: Arms, rates: ArrayLike) -> Bandit:
    """The arm that gives the most expected tokens per cost at acceptance rates that are known: no bandit does better.

    It holds for tokens accepted independently at fixed rates. Equals go to the lowest index. No state, no noise; the law
    of verified tokens is exact.

    Args:
      arms: the arms.
      rates: float `[arms]`, in [0, 1]: the acceptance rate of each arm's draft. May be traced.

    Returns:
      A `Bandit`.

    Raises:
      ValueError, TypeError: arms without draft lengths, or with costs that are not positive; rates of another shape, or
        outside [0, 1].

    >>> bandit = oracle(Arms(draft_len=[2, 8], cost=[1.2, 1.8]), rates=[0.9, 0.9])  # 2.26 and 3.40 tokens per unit cost
    >>> int(bandit.select(bandit.init(), None))
    1
    """
    checked, given = core.checked(arms), as_array(rates, "rates")
    if given.shape != checked.cost.shape or not core.is_real(given):
        raise ValueError(f"rates must be real, one for each arm, {list(checked.cost.shape)}; got "
                         f"{given.dtype}{list(given.shape)}: give each arm its acceptance rate.")
    if not any(map(is_traced, jax.tree.leaves(rates))):
        values = np.asarray(rates, np.float64)
        if np.any(bad := ~((values >= 0) & (values <= 1))):
            raise ValueError(f"rates must lie in [0, 1]; got {values[bad][0]:g}: pass probabilities.")
    return fixed(arms, jnp.argmax(core.expected_tokens(given, checked.draft_len) / checked.cost))
