"""How many drafted tokens are accepted? Theory beside measurement, for 60 random pairs of laws over 64 tokens.

Run with `python examples/speculation.py`: under two minutes on two CPU cores. For each pair it draws 20,000 drafts and verifies
them in four ways, and prints how far the measured acceptance is from the exact one, in standard errors. It draws
`docs/images/acceptance.png`: what each way accepts against the total variation distance of the pair.
"""

import os
import sys
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np

import gumbeljax
from gumbeljax import speculative
from gumbeljax.speculative import Law

matplotlib.use("Agg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).resolve().parents[1]
DRAWS, VOCAB, PAIRS = 20_000, 64, 60
COLOURS = {"4 chains": "#1b7837", "2 chains": "#7fbf7b", "verify": "#1f77b4", "coupled": "#d62728"}


def pairs() -> tuple[np.ndarray, np.ndarray]:
    """Logits `[pairs, vocab]` of target and draft, from alike to far apart."""
    rng = np.random.default_rng(0)
    target = 2.0 * rng.normal(size=(PAIRS, VOCAB))
    draft = target + np.linspace(0.05, 3, PAIRS)[:, None] * rng.normal(size=(PAIRS, VOCAB))
    return target.astype(np.float32), draft.astype(np.float32)


@jax.jit
def measured(target, draft, key):
    """Accepted first tokens of `DRAWS` drafts, for each way."""
    keys = speculative.position_keys(jax.random.split(key, DRAWS), 0, 2)
    own = jax.vmap(lambda k: jax.random.split(k, 4))(keys[:, 0])  # noise of four chains
    spread = lambda x, *shape: jnp.broadcast_to(x, (DRAWS, *shape, VOCAB))  # noqa: E731
    drafted = gumbeljax.sample_logits(spread(draft, 4), own)[..., None]
    verify_chains = lambda n: speculative.verify_chains(  # noqa: E731
        Law(spread(target, n, 2)), Law(spread(draft, n, 1)), drafted[:, :n], keys)
    out = {f"{n} chains": verify_chains(n) for n in (4, 2)}
    out["verify"] = speculative.verify(Law(spread(target, 2)), Law(spread(draft, 1)), drafted[:, 0], keys)
    same_noise = gumbeljax.sample_logits(spread(draft), keys[:, 0])[:, None]
    out["coupled"] = speculative.verify_coupled(Law(spread(target, 2)), same_noise, keys)
    return {name: jnp.mean(x.num_accepted) for name, x in out.items()}


def exact(target, draft) -> dict:
    return {
        "4 chains": speculative.chains_acceptance(target, draft, 4),
        "2 chains": speculative.chains_acceptance(target, draft, 2),
        "verify": speculative.acceptance(target, draft), "coupled": speculative.coupled_acceptance(target, draft),
    }  # fmt: skip


def main() -> None:
    target, draft = pairs()
    theory = {name: np.asarray(x) for name, x in exact(target, draft).items()}
    runs = [measured(p, q, jax.random.key(i)) for i, (p, q) in enumerate(zip(target, draft, strict=True))]
    variation = 1 - theory["verify"]
    figure, axis = plt.subplots(figsize=(7, 4.5), layout="constrained")
    print(f"acceptance of the first token, {PAIRS} pairs of laws, {DRAWS:,} drafts each")
    for name, colour in COLOURS.items():
        seen = np.array([run[name] for run in runs])
        error = (seen - theory[name]) / np.sqrt(np.maximum(theory[name] * (1 - theory[name]), 1e-6) / DRAWS)
        print(f"  {name:9} mean {theory[name].mean():.4f} in theory, {seen.mean():.4f} measured; errors in s.e.: "
              f"rms {np.sqrt((error**2).mean()):.2f} (theory 1), largest {np.abs(error).max():.1f}")
        axis.plot(variation, seen, ".", color=colour, label=name, markersize=5)
    low = (1 - variation) / (1 + variation)
    below = theory["coupled"] < low
    print(f"  coupled is below (1 - TV) / (1 + TV) for {below.sum()} of {PAIRS} pairs, by at most "
          f"{np.max(low - theory['coupled']).clip(0):.4f}")
    x = np.linspace(0, variation.max(), 200)
    axis.plot(x, 1 - x, color=COLOURS["verify"], linewidth=0.8)
    axis.plot(x, (1 - x) / (1 + x), color="#8c8c8c", linewidth=0.8, label="(1 - TV) / (1 + TV)")
    axis.set(xlabel="total variation distance of target and draft", ylabel="accepted", xlim=(0, None), ylim=(0, 1.02))
    axis.legend(frameon=False)
    axis.spines[["top", "right"]].set_visible(False)
    path = ROOT / "docs" / "images" / "acceptance.png"
    figure.savefig(path, dpi=120)
    print(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
