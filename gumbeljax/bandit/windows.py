"""UCB on a window of the past, for acceptance rates that jump: a window for each arm, or one over all rounds."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from gumbeljax._checks import choice
from gumbeljax._typing import Array, ArrayLike
from gumbeljax.bandit import core
from gumbeljax.bandit.core import Arms, Bandit
from gumbeljax.bandit.ucb import best


class ArmWindows(NamedTuple):
    """The last rewards of each arm, in rings. `counts` are lifetime plays, up to 2^30: they say where a ring goes on."""

    rewards: Array  # f32 [arms, window]
    counts: Array  # int32 [arms]


class RoundWindow(NamedTuple):
    """The last rounds, in a ring: which arm was played (-1: no round yet) and its reward."""

    arms: Array  # int32 [window]
    rewards: Array  # f32 [window]
    position: Array  # int32, the entry that the next round overwrites


def sliding_window_ucb(arms: Arms, *, window: int, over: str = "arm", c: ArrayLike = 1.0) -> Bandit:
    r"""UCB on the recent past: the arm of the largest :math:`\bar r_i + c \sqrt{2 \ln t / n_i}`, windowed.

    `over="arm"`: :math:`n_i` and :math:`\bar r_i` are number and mean of the last `window` rewards *of arm i*, and t is
    the number of all rounds. No arm is ever forgotten, and since :math:`n_i` stays at most `window`, no bound closes:
    every arm is tried again as :math:`\ln t` grows or the best mean falls.

    `over="rounds"`: number and mean over the last `window` *rounds*, and t is the number of those rounds. An arm that left
    the window counts as never played and is played next, so every arm is paid for about once in `window` rounds, for ever.

    Means and counts come from the same window. Arms never played come first; equals go to the lowest index. No noise: the
    key is not looked at. The law of verified tokens is exact, whatever is chosen.

    Args:
      arms: the arms.
      window: how many rewards are kept, a Python int of at least 1. It sizes the state.
      over: `"arm"` or `"rounds"`.
      c: width of the bounds, at least 0. May be traced.

    Returns:
      A `Bandit` whose state is `ArmWindows` or `RoundWindow`.

    Raises:
      ValueError, TypeError: arms without draft lengths, or with costs that are not positive; c below 0; a window that is
        not a positive int; another `over`.

    >>> bandit = sliding_window_ucb(Arms(draft_len=[1, 1]), window=3)
    >>> state = bandit.init()
    >>> for arm, num_accepted in [(0, 1), (1, 1), (1, 0), (1, 0), (1, 0)]:
    ...     state = bandit.update(state, arm, num_accepted, 1)
    >>> state
    ArmWindows(rewards=Array([[1., 0., 0.], [0., 0., 0.]], dtype=float32), counts=Array([1, 4], dtype=int32))

    Source: A. Garivier, E. Moulines, "On upper-confidence bound policies for switching bandit problems", ALT 2011 (the
    window over all rounds).
    """
    arms, c = core.checked(arms), core.number(c, "c", 0, 1e6)
    window = _checked_window(window)
    choice(over, "over", ("arm", "rounds"))
    return _arm_windows(arms, window, c) if over == "arm" else _round_window(arms, window, c)


def _checked_window(window: int) -> int:
    if isinstance(window, bool) or not isinstance(window, int | np.integer):
        raise TypeError(f"window must be a Python int, since it sizes the state; got {type(window).__name__}: "
                        "make it a constant.")
    if not 1 <= window <= 2**24:
        raise ValueError(f"window must be between 1 and 2**24; got {window}: pass the number of rewards to keep.")
    return int(window)


def _bounds(counts: Array, sums: Array, rounds: Array, c: Array) -> Array:
    n = jnp.maximum(counts, 1)
    return sums / n + c * jnp.sqrt(2 * jnp.log(jnp.maximum(rounds, 1)) / n)


def _arm_windows(arms: Arms, window: int, c: Array) -> Bandit:
    num_arms = len(arms.draft_len)

    def init() -> ArmWindows:
        return ArmWindows(jnp.zeros((num_arms, window), jnp.float32), jnp.zeros(num_arms, jnp.int32))

    def select(state: ArmWindows, key=None) -> Array:
        counts = jnp.minimum(state.counts, window).astype(jnp.float32)
        rounds = jnp.sum(state.counts.astype(jnp.float32))
        return best(counts, _bounds(counts, jnp.sum(state.rewards, axis=-1), rounds, c))

    def update(state: ArmWindows, arm, num_accepted, draft_len) -> ArmWindows:
        played = core.is_played(arms, arm, num_accepted)
        oldest = jnp.arange(window)[None] == (state.counts % window)[:, None]
        reward = core.scaled_reward(arms, arm, num_accepted)
        counts = state.counts + played
        counts = jnp.where(counts >= 2**30, counts - 2**29 // window * window, counts)  # the ring goes on at the same place
        return ArmWindows(jnp.where(played[:, None] & oldest, reward, state.rewards), counts)

    return core.bandit(init, select, update)


def _round_window(arms: Arms, window: int, c: Array) -> Bandit:
    num_arms = len(arms.draft_len)

    def init() -> RoundWindow:
        return RoundWindow(jnp.full(window, -1, jnp.int32), jnp.zeros(window, jnp.float32), jnp.int32(0))

    def select(state: RoundWindow, key=None) -> Array:
        played = state.arms[None] == jnp.arange(num_arms)[:, None]
        counts = jnp.sum(played, axis=-1, dtype=jnp.float32)
        sums = jnp.sum(jnp.where(played, state.rewards[None], 0), axis=-1)
        return best(counts, _bounds(counts, sums, jnp.sum(counts), c))

    def update(state: RoundWindow, arm, num_accepted, draft_len) -> RoundWindow:
        exists = jnp.any(core.is_played(arms, arm, num_accepted))
        oldest = (jnp.arange(window) == state.position) & exists
        reward = core.scaled_reward(arms, arm, num_accepted)
        return RoundWindow(
            jnp.where(oldest, jnp.asarray(arm, jnp.int32), state.arms),
            jnp.where(oldest, reward, state.rewards),
            (state.position + exists) % window,
        )

    return core.bandit(init, select, update)
