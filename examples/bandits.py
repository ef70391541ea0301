"""How much does it cost to find the better draft? Regret of the bandits, on rates that stay and on rates that switch.

Run with `python examples/bandits.py`: about a minute on two CPU cores. Each bandit plays 10,000 rounds against known
acceptance rates, for 200 seeds at once. It prints the mean final regret (accepted tokens that the best arm would have
given more) beside what theory or the literature says, and draws `docs/images/bandit_regret.png`.
"""

import os
import sys
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import matplotlib
import numpy as np

from gumbeljax import bandit

matplotlib.use("Agg")
import matplotlib.pyplot as plt

ROUNDS, SEEDS, EVERY = 10_000, 200, 20
ROOT = Path(__file__).resolve().parents[1]
COLOURS = {
    "UCB1": "#1f77b4", "KL-UCB": "#1b7837", "MOSS": "#9467bd", "Thompson": "#d62728", "epsilon-greedy, .1": "#8c8c8c",
    "always arm 0": "#c9b458", "window of 100 per arm": "#e6862a", "window of 1,000 rounds": "#17a2b8",
    "discount .999": "#7f4f24",
}  # fmt: skip


class Problem(NamedTuple):
    """Acceptance rates of every round, the bandits that play, and what is known of their final regret."""

    title: str
    rates: np.ndarray  # [rounds, arms]
    bandits: dict
    known: dict


def stationary() -> Problem:
    rates = np.array([0.3, 0.7, 0.5])
    arms, gap = bandit.Arms(draft_len=[1, 1, 1]), rates.max() - rates
    others = gap > 0
    p, q = rates[others], rates.max()
    kl = p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q))
    limit = np.sum(gap[others] / kl) * np.log(ROUNDS)  # Lai and Robbins, 1985: no consistent bandit has less for ever
    players = {
        "always arm 0": bandit.fixed(arms, 0), "epsilon-greedy, .1": bandit.epsilon_greedy(arms), "UCB1": bandit.ucb1(arms),
        "MOSS": bandit.moss(arms), "window of 100 per arm": bandit.sliding_window_ucb(arms, window=100),
        "KL-UCB": bandit.kl_ucb(arms), "Thompson": bandit.thompson(arms),
    }  # fmt: skip
    known = {
        "always arm 0": f"theory {gap[0] * ROUNDS:.0f}",
        "epsilon-greedy, .1": f"theory {0.1 * gap.mean() * ROUNDS:.0f} for exploring, and the time to learn",
        "UCB1": "known 99.4 (sd of one run 17)",
        "KL-UCB": f"Lai-Robbins rate at this T {limit:.1f}, approached as T grows",
        "Thompson": f"known 18.3 (sd of one run 7); Lai-Robbins rate {limit:.1f}",
    }
    return Problem("acceptance rates .3, .7, .5", np.tile(rates, (ROUNDS, 1)), players, known)


def switching() -> Problem:
    arms = bandit.Arms(draft_len=[1, 1])
    players = {
        "Thompson": bandit.thompson(arms), "discount .999": bandit.discounted_ucb(arms, discount=0.999),
        "KL-UCB": bandit.kl_ucb(arms), "window of 1,000 rounds": bandit.sliding_window_ucb(arms, window=1000, over="rounds"),
        "UCB1": bandit.ucb1(arms), "window of 100 per arm": bandit.sliding_window_ucb(arms, window=100),
    }  # fmt: skip
    known = {"UCB1": "known 89.7", "window of 100 per arm": "known about 36 for windows like it",
             "window of 1,000 rounds": "known 104 to 672 for windows over all rounds"}  # fmt: skip
    return Problem("rates .9, .2, swapped half way", np.repeat([[0.9, 0.2], [0.2, 0.9]], ROUNDS // 2, axis=0), players, known)


def regrets(player: bandit.Bandit, rates: np.ndarray) -> np.ndarray:
    """Cumulative regret after every 20th round, `[seeds, rounds / 20]`."""
    arms = bandit.Arms(draft_len=[1] * rates.shape[1])
    run = jax.jit(jax.vmap(lambda key: bandit.simulate(player, arms, rates, key).regret[EVERY - 1 :: EVERY]))
    return np.asarray(run(jax.random.split(jax.random.key(0), SEEDS)), np.float64)


def draw(axis, problem: Problem) -> None:
    rounds = np.arange(EVERY, ROUNDS + 1, EVERY)
    print(f"\n{problem.title}: regret after {ROUNDS:,} rounds, mean of {SEEDS} seeds")
    for name, player in problem.bandits.items():
        curves = regrets(player, problem.rates)
        mean, error = curves.mean(axis=0), curves[:, -1].std() / np.sqrt(SEEDS)
        print(f"  {name:24} {mean[-1]:8.1f} +- {error:.1f}   {problem.known.get(name, '')}", flush=True)
        axis.plot(rounds, mean, color=COLOURS[name], linewidth=1.6, label=f"{name}: {mean[-1]:,.0f}")
        axis.fill_between(rounds, *np.quantile(curves, [0.1, 0.9], axis=0), color=COLOURS[name], alpha=0.13, linewidth=0)
    axis.set(yscale="log", xlabel="round", ylabel="cumulative regret", xlim=(0, ROUNDS), title=problem.title)
    axis.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    axis.spines[["top", "right"]].set_visible(False)


def main() -> None:
    figure, axes = plt.subplots(1, 2, figsize=(12.5, 4), layout="constrained")
    for axis, problem in zip(axes, (stationary(), switching()), strict=True):
        draw(axis, problem)
    figure.supxlabel(f"Mean of {SEEDS} seeds and the middle 80% of them; beside names, the final mean.", fontsize=9)
    path = ROOT / "docs" / "images" / "bandit_regret.png"
    figure.savefig(path, dpi=120)
    print(f"\nwrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
