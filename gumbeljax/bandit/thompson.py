"""Thompson sampling of acceptance rates."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from gumbeljax._typing import Array, ArrayLike
from gumbeljax.bandit import core
from gumbeljax.bandit.core import Arms, Bandit


class ThompsonState(NamedTuple):
    """Beta(a, b) law of each arm's acceptance rate."""

    a: Array  # f32 [arms]
    b: Array  # f32 [arms]


def thompson(arms: Arms, *, a: ArrayLike = 1.0, b: ArrayLike = 1.0) -> Bandit:
    r"""Thompson sampling: draws each arm's acceptance rate from what is known of it, and plays the arm it favours.

    :math:`\alpha_i \sim \mathrm{Beta}(a_i, b_i)`, then the arm of the most expected tokens per cost,
    :math:`(1 - \alpha_i^{K_i + 1}) / (1 - \alpha_i) / \text{cost}_i` (`expected_tokens`).

    After a step `a += num_accepted`, and `b += 1` if a drafted token was rejected, `num_accepted < draft_len`. That is the
    exact posterior when tokens are accepted independently: those behind the first rejection were never tried, and a full
    accept shows no rejection. (More accepted than drafted counts as all.) Equals go to the lowest index. The law of verified
    tokens is exact, whatever is chosen.

    Args:
      arms: the arms.
      a, b: the Beta prior, positive, one number for all arms; 1, 1 is uniform. May be traced.

    Returns:
      A `Bandit` whose state is `ThompsonState`. Each `select` needs a new key; it may be the one that tokens are drawn
      with, since the bandit's noise is a stream of its own.

    Raises:
      ValueError, TypeError: arms without draft lengths, or with costs that are not positive; a prior outside
        [1e-3, 1e6]; something that is not one key.

    >>> bandit = thompson(Arms(draft_len=[4, 4]))
    >>> state = bandit.update(bandit.init(), 0, num_accepted=2, draft_len=4)  # tokens 4 and 5 were never tried
    >>> bandit.update(state, 1, num_accepted=4, draft_len=4)
    ThompsonState(a=Array([3., 5.], dtype=float32), b=Array([2., 1.], dtype=float32))

    Source: W. R. Thompson, "On the likelihood that one unknown probability exceeds another", 1933; S. Agrawal, N. Goyal,
    "Analysis of Thompson sampling for the multi-armed bandit problem", COLT 2012.
    """
    arms = core.checked(arms)
    a, b = core.number(a, "a", 1e-3, 1e6), core.number(b, "b", 1e-3, 1e6)

    def init() -> ThompsonState:
        return ThompsonState(jnp.full_like(arms.cost, a), jnp.full_like(arms.cost, b))

    def select(state: ThompsonState, key) -> Array:
        rate = jax.random.beta(core.bandit_key(key), state.a, state.b, dtype=jnp.float32)
        return jnp.argmax(core.expected_tokens(rate, arms.draft_len) / arms.cost).astype(jnp.int32)

    def update(state: ThompsonState, arm, num_accepted, draft_len) -> ThompsonState:
        played = core.is_played(arms, arm, num_accepted)
        drafted = jnp.asarray(draft_len, jnp.float32)
        accepted = jnp.minimum(jnp.asarray(num_accepted, jnp.float32), drafted)  # no more can be, and inf would stay for ever
        is_rejected = accepted < drafted
        return ThompsonState(state.a + jnp.where(played, accepted, 0), state.b + (played & is_rejected))

    return core.bandit(init, select, update)
