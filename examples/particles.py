"""Generation under a constraint and for a reward, by particles, where forbidding tokens one by one gives the wrong law.

Run with `python examples/particles.py`: about a minute on two CPU cores. A Markov chain writes eight tokens a, b, c. Either no
more than two may be b (a grammar with a budget), or each c earns a reward. Both laws are enumerated, and particles come near
them as 1 / N. It prints the distances, and draws `docs/images/particles.png`.
"""

import functools
import os
import sys
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np

from gumbeljax import sample_logits, smc

matplotlib.use("Agg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).resolve().parents[1]
LENGTH, BUDGET, REWARD, RUNS, SIZES = 8, 2, 0.7, 40_000, (1, 2, 4, 8, 16, 32)
CHAIN = np.array([[0.2, 0.6, 0.2], [0.3, 0.5, 0.2], [0.1, 0.2, 0.7]])  # from a, b, c; the first token follows an a


def all_sequences() -> np.ndarray:
    return np.stack(np.meshgrid(*[range(3)] * LENGTH, indexing="ij"), -1).reshape(-1, LENGTH)


def model_law() -> np.ndarray:
    sequences = all_sequences()
    before = np.concatenate([np.zeros((len(sequences), 1), int), sequences[:, :-1]], 1)
    return CHAIN[before, sequences].prod(1)


def masked_law() -> np.ndarray:
    """What masking does: b is forbidden once two were written, and the rest renormalised at every token."""
    sequences = all_sequences()
    before = np.concatenate([np.zeros((len(sequences), 1), int), sequences[:, :-1]], 1)
    spent = np.cumsum(sequences == 1, 1) - (sequences == 1) >= BUDGET
    rows = CHAIN[before] * ~(spent[..., None] & (np.arange(3) == 1))
    return (np.take_along_axis(rows, sequences[..., None], -1)[..., 0] / rows.sum(-1)).prod(1)


@functools.partial(jax.jit, static_argnames=("n", "constrained"))
def generate(key, *, n, constrained):
    """(chosen sequences as numbers below 3^8, estimates of Z), of `RUNS` groups of n particles."""
    table = jnp.log(jnp.asarray(CHAIN, jnp.float32))

    def propose_fn(particles, keys):
        last, number, bs, cs = particles
        logits = table[last]
        if constrained:
            logits = jnp.where((bs >= BUDGET)[..., None] & (jnp.arange(3) == 1), -jnp.inf, logits)
        token = sample_logits(logits, keys)
        return (token, number * 3 + token, bs + (token == 1), cs + (token == 2)), jax.nn.logsumexp(logits, axis=-1)

    zero = jnp.zeros((RUNS, n), jnp.int32)
    potential_fn = None if constrained else lambda particles: REWARD * particles[3]
    state = smc.init((zero, zero, zero, zero), jnp.zeros((RUNS, n)), potential_fn=potential_fn)

    def step(state, key):  # a weight is the mass that masking left of this token's law: 0 in log where it left all
        return smc.step(state, key, propose_fn=propose_fn, log_weight_fn=lambda _, log_mass: log_mass,
                        potential_fn=potential_fn)

    keys = jax.random.split(key, LENGTH + 1)
    state, _ = jax.lax.scan(step, state, keys[:-1])
    chosen = smc.choose(state, keys[-1])
    return jnp.take_along_axis(state.particles[1], chosen[:, None], 1)[:, 0], jnp.exp(smc.log_evidence(state))


def main() -> None:
    sequences, law = all_sequences(), model_law()
    targets = {"at most two b": law * ((sequences == 1).sum(1) <= BUDGET),
               "rewarded c": law * np.exp(REWARD * (sequences == 2).sum(1))}
    figure, axis = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for (name, target), colour in zip(targets.items(), ("#1f77b4", "#d62728"), strict=True):
        z, target, distances = target.sum(), target / target.sum(), []
        floor = 0.5 * np.sqrt(2 * target * (1 - target) / (np.pi * RUNS)).sum()  # of so many exact draws
        print(f"\n{name}: Z = {z:.4f}; {RUNS:,} exact draws would be at a distance of {floor:.3f}")
        for n in SIZES:
            chosen, estimates = map(np.asarray, generate(jax.random.key(n), n=n, constrained=name == "at most two b"))
            distances.append(0.5 * np.abs(np.bincount(chosen, minlength=len(target)) / RUNS - target).sum())
            error = (estimates.mean() / z - 1) / (estimates.std() / z / np.sqrt(RUNS))
            print(f"  N = {n:2}: distance {distances[-1]:.3f}, E[Z-hat] / Z = {estimates.mean() / z:.4f} "
                  f"({error:+.1f} s.e.)", flush=True)
        axis.plot(SIZES, distances, "o-", color=colour, label=f"{name}, particles")
        axis.axhline(floor, color=colour, linewidth=0.8, linestyle=":")
    target = targets["at most two b"] / targets["at most two b"].sum()
    masked = 0.5 * np.abs(masked_law() - target).sum()
    print(f"\nforbidding tokens one by one: distance {masked:.3f} in theory; one particle is nothing else")
    axis.axhline(masked, color="#8c8c8c", linewidth=0.8, label="at most two b, tokens forbidden one by one")
    axis.set(xscale="log", yscale="log", xlabel="particles", ylabel="total variation distance to the law wanted")
    axis.set_xticks(SIZES, [str(n) for n in SIZES], minor=False)
    axis.legend(frameon=False)
    axis.spines[["top", "right"]].set_visible(False)
    path = ROOT / "docs" / "images" / "particles.png"
    figure.savefig(path, dpi=120)
    print(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
