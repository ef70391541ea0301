"""Upper confidence bounds on the mean reward of each arm: UCB1, discounted UCB, KL-UCB, MOSS."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from gumbeljax._typing import Array, ArrayLike
from gumbeljax.bandit import core
from gumbeljax.bandit.core import Arms, Bandit


class Means(NamedTuple):
    """How often each arm was played, and its mean reward."""

    counts: Array  # f32 [arms]; discounted UCB lets them decay
    means: Array  # f32 [arms]


def ucb1(arms: Arms, *, c: ArrayLike = 1.0) -> Bandit:
    r"""UCB1: the arm of the largest :math:`\bar r_i + c \sqrt{2 \ln t / n_i}`.

    :math:`n_i` is how often arm i was played, :math:`\bar r_i` its mean `scaled_reward`, :math:`t = \sum_i n_i`. Arms
    that were never played come first; equals go to the lowest index. No noise: the key is not looked at. Whatever it
    chooses, the law of verified tokens is exact.

    Args:
      arms: the arms.
      c: width of the bounds, at least 0; 1 is UCB1 for rewards in [0, 1]. May be traced.

    Returns:
      A `Bandit` whose state is `Means`.

    Raises:
      ValueError, TypeError: arms without draft lengths, or with costs that are not positive; c below 0.

    >>> bandit = ucb1(Arms(draft_len=[1, 1, 1]))
    >>> state = Means(jnp.array([10.0, 5.0, 1.0]), jnp.array([0.5, 0.6, 0.2]))
    >>> int(bandit.select(state, None))  # bounds 1.245, 1.653, 2.555
    2

    Source: P. Auer, N. Cesa-Bianchi, P. Fischer, "Finite-time analysis of the multiarmed bandit problem", 2002.
    """
    c = core.number(c, "c", 0, 1e6)
    return _by_index(arms, lambda n, means, t: means + c * jnp.sqrt(2 * jnp.log(t) / n))


def discounted_ucb(arms: Arms, *, discount: ArrayLike = 0.99, c: ArrayLike = 1.0) -> Bandit:
    r"""UCB1 that forgets: what was seen s rounds ago has weight :math:`\gamma^s`, in means and counts alike.

    The arm of the largest :math:`\bar r_i + c \sqrt{2 \ln t / n_i}` with discounted :math:`n_i`, :math:`\bar r_i` and
    :math:`t = \sum_i n_i`, which tends to :math:`1 / (1 - \gamma)`. Discounting does not move the mean of an arm that is
    not played, so only its count decays. For acceptance rates that drift. The law of verified tokens is exact.

    Args:
      arms: the arms.
      discount: :math:`\gamma` in (0, 1]; 1 is `ucb1`. May be traced.
      c: width of the bounds, at least 0. May be traced.

    Returns:
      A `Bandit` whose state is `Means`.

    Raises:
      ValueError, TypeError: as `ucb1`; a discount outside (0, 1].

    >>> bandit = discounted_ucb(Arms(draft_len=[1, 1]), discount=0.5)
    >>> bandit.update(bandit.update(bandit.init(), 0, 1, 1), 1, 0, 1)
    Means(counts=Array([0.5, 1. ], dtype=float32), means=Array([1., 0.], dtype=float32))

    Source: L. Kocsis, C. Szepesvari, "Discounted UCB", 2006; A. Garivier, E. Moulines, "On upper-confidence bound
    policies for switching bandit problems", ALT 2011.
    """
    c, discount = core.number(c, "c", 0, 1e6), core.number(discount, "discount", 1e-6, 1)
    return _by_index(arms, lambda n, means, t: means + c * jnp.sqrt(2 * jnp.log(t) / n), discount)


def kl_ucb(arms: Arms, *, c: ArrayLike = 0.0) -> Bandit:
    r"""KL-UCB: the arm of the largest q with :math:`n_i\, \mathrm{kl}(\bar r_i, q) \le \ln t + c \ln \ln t`.

    kl(p, q) is the divergence of Bernoulli laws. Its bounds are never wider than those of `ucb1` and far tighter near 0
    and 1, where good drafts are. Found by 24 halvings of :math:`[\bar r_i, 1]`, to float32 resolution. The law of
    verified tokens is exact.

    Args:
      arms: the arms.
      c: 0, as its authors advise in practice; 3 in their theorem. May be traced.

    Returns:
      A `Bandit` whose state is `Means`.

    Raises:
      ValueError, TypeError: as `ucb1`.

    >>> bandit = kl_ucb(Arms(draft_len=[1, 1]))
    >>> int(bandit.select(Means(jnp.array([50.0, 50.0]), jnp.array([0.95, 0.9])), None))
    0

    Source: A. Garivier, O. Cappe, "The KL-UCB algorithm for bounded stochastic bandits and beyond", COLT 2011.
    """
    c = core.number(c, "c", 0, 1e6)

    def index(n, means, t):
        log_t = jnp.log(t)
        bound = (log_t + c * jnp.log(jnp.maximum(log_t, 1))) / n

        def halve(_, ends):
            low, high = ends
            middle = (low + high) / 2
            inside = _bernoulli_kl(means, middle) <= bound
            return jnp.where(inside, middle, low), jnp.where(inside, high, middle)

        return jax.lax.fori_loop(0, 24, halve, (means, jnp.ones_like(means)))[0]

    return _by_index(arms, index)


def moss(arms: Arms, *, alpha: ArrayLike = 1.35) -> Bandit:
    r"""MOSS without a horizon: the arm of the largest
    :math:`\bar r_i + \sqrt{\frac{1 + \alpha}{2} \max(0, \ln \frac{t}{K n_i}) / n_i}`, with K the number of arms.

    Once an arm has its share t / K of the rounds its bound is its mean: less exploration than `ucb1`. The law of verified
    tokens is exact.

    Args:
      arms: the arms.
      alpha: at least 0; 1.35 is its authors' choice. May be traced.

    Returns:
      A `Bandit` whose state is `Means`.

    Raises:
      ValueError, TypeError: as `ucb1`.

    >>> bandit = moss(Arms(draft_len=[1, 1]))
    >>> int(bandit.select(Means(jnp.array([90.0, 10.0]), jnp.array([0.7, 0.3])), None))
    1

    Source: R. Degenne, V. Perchet, "Anytime optimal algorithms in stochastic multi-armed bandits", ICML 2016.
    """
    half = (1 + core.number(alpha, "alpha", 0, 1e6)) / 2
    return _by_index(
        arms, lambda n, means, t: means + jnp.sqrt(half * jnp.maximum(jnp.log(t / (n.shape[-1] * n)), 0) / n)
    )


def _by_index(arms: Arms, index_fn: Callable[[Array, Array, Array], Array], discount: ArrayLike = 1.0) -> Bandit:
    """The arm of the largest `index_fn(counts, means, rounds)`, unplayed arms first."""
    arms = core.checked(arms)

    def init() -> Means:
        return Means(jnp.zeros_like(arms.cost), jnp.zeros_like(arms.cost))

    def select(state: Means, key=None) -> Array:
        return best(state.counts, index_fn(jnp.where(state.counts > 0, state.counts, 1), state.means,
                                           jnp.maximum(jnp.sum(state.counts), 1)))

    def update(state: Means, arm, num_accepted, draft_len) -> Means:
        played, reward = core.is_played(arms, arm, num_accepted), core.scaled_reward(arms, arm, num_accepted)
        return with_reward(state, played, reward, discount)

    return core.bandit(init, select, update)


def best(counts: Array, scores: Array) -> Array:
    """The first unplayed arm, else the first of the largest score, int32."""
    return jnp.argmax(jnp.where(counts > 0, scores, jnp.inf)).astype(jnp.int32)


def with_reward(state: Means, played: Array, reward: Array, discount: ArrayLike = 1.0) -> Means:
    """One more reward of the arm that `played [arms]` marks. A running mean: a sum would lose the small digits."""
    counts = jnp.where(jnp.any(played), discount, 1) * state.counts + played
    return Means(counts, jnp.where(played, state.means + (reward - state.means) / jnp.maximum(counts, 1), state.means))


def _bernoulli_kl(p: Array, q: Array) -> Array:
    """Divergence of Bernoulli(p) from Bernoulli(q), for p <= q."""
    inside = jnp.clip(q, 1e-30, 1 - 2.0**-24)
    return jax.scipy.special.xlogy(p, p / inside) + jax.scipy.special.xlogy(1 - p, (1 - p) / (1 - inside))
