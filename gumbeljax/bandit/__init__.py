r"""Which draft, and how many tokens of it? Bandits as pure functions, for the carry of a decode loop.

A `Bandit` is three functions, as in optax: `init() -> state`, `select(state, key) -> arm`,
`update(state, arm, num_accepted, draft_len) -> state`. A state is a pytree of arrays of fixed shapes: it can sit in the
carry of `lax.scan` or `lax.while_loop`, be mapped over requests with `jax.vmap`, be saved and restored.

The choice of an arm never changes the law of the tokens, as long as it depends on the past only: lossless verification
returns the target's law for every draft and every draft length. So regret is paid in time, never in quality.
"""

from gumbeljax.bandit.baselines import epsilon_greedy, fixed, oracle
from gumbeljax.bandit.core import Arms, Bandit, expected_tokens, scaled_reward
from gumbeljax.bandit.simulation import Simulation, simulate
from gumbeljax.bandit.thompson import ThompsonState, thompson
from gumbeljax.bandit.ucb import Means, discounted_ucb, kl_ucb, moss, ucb1
from gumbeljax.bandit.windows import ArmWindows, RoundWindow, sliding_window_ucb

__all__ = [
    "ArmWindows",
    "Arms",
    "Bandit",
    "Means",
    "RoundWindow",
    "Simulation",
    "ThompsonState",
    "discounted_ucb",
    "epsilon_greedy",
    "expected_tokens",
    "fixed",
    "kl_ucb",
    "moss",
    "oracle",
    "scaled_reward",
    "simulate",
    "sliding_window_ucb",
    "thompson",
    "ucb1",
]
