"""How often is a rare token drawn? One token has 99% of the mass, and 49,151 others share the last 1%.

Run with `python examples/tail.py`: about a minute on two CPU cores. It prints, for `jax.random.categorical` in its two
modes and on bfloat16 logits and for `gumbeljax.sample`, how often one of the others was drawn, beside what theory says,
and draws `docs/images/tail.png`. The logits are bfloat16 numbers, so all four samplers are given the very same law.
"""

import os
import sys
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
from scipy import stats

import gumbeljax

matplotlib.use("Agg")
import matplotlib.pyplot as plt

VOCAB, TOP, REST = 49_152, 15.4375, 0.029296875  # vocabulary, logit of token 0, logit of every other token
TAIL = 1 - 1 / (1 + (VOCAB - 1) * np.exp(REST - TOP))
BATCH = 64
ROOT = Path(__file__).resolve().parents[1]


class Row(NamedTuple):
    """One sampler: its name, how to draw `[BATCH]` tokens, how many draws, and the tail share theory gives it."""

    name: str
    draw_fn: object
    num_draws: int
    theory: float


def coarse_tail(dtype) -> float:
    """The tail share that argmax draws with the noise of categorical's default mode, by enumeration.

    That noise is -log(-log(u)) with u one of the 2^n multiples of 2^-n in [0, 1), where n is the number of mantissa bits
    of the dtype (the smallest normal number in place of 0). The sum with the logit is rounded to the dtype.
    Token 0 keeps its place unless another is strictly above it: argmax takes the lowest of equals.
    """
    info = jnp.finfo(dtype)
    u = np.maximum(np.arange(2**info.nmant) * 2.0**-info.nmant, float(info.tiny))
    noise = -np.log(-np.log(u))

    def rounded(x):
        return np.asarray(jnp.asarray(x, jnp.float32).astype(dtype).astype(jnp.float32))

    top, rest = rounded(TOP + noise), rounded(REST + noise)
    is_below = np.searchsorted(rest, top, side="right") / u.size  # P(one other token is not above), for each value of top
    return 1 - float(np.mean(is_below ** (VOCAB - 1)))


def samplers() -> list[Row]:
    w = jnp.full((VOCAB, 1), REST).at[0, 0].set(TOP)
    h = jnp.ones((BATCH, 1))

    def categorical(dtype, mode):
        return lambda key: jax.random.categorical(key, (h @ w.T).astype(dtype), mode=mode)

    return [
        Row("jax.random.categorical", categorical(jnp.float32, "low"), 20_480, coarse_tail(jnp.float32)),
        Row('jax.random.categorical, mode="high"', categorical(jnp.float32, "high"), 12_288, TAIL),
        Row("jax.random.categorical, bfloat16 logits", categorical(jnp.bfloat16, "low"), 4_096, coarse_tail(jnp.bfloat16)),
        Row("gumbeljax.sample", lambda key: gumbeljax.sample(h, w, key), 204_800, TAIL),
    ]  # fmt: skip


def count_tail(row: Row, key) -> int:
    """How many of the draws are not token 0."""

    @jax.jit
    def chunk(keys):
        return jax.lax.map(lambda key: jnp.sum(row.draw_fn(key) != 0), keys).sum()

    return sum(int(chunk(keys)) for keys in jax.random.split(key, (row.num_draws // (BATCH * 16), 16)))


def plot(rows: list[Row], counts: list[int], path: Path) -> None:
    figure, axis = plt.subplots(figsize=(8, 2.9), layout="constrained")
    for y, (row, count) in enumerate(zip(rows, counts, strict=True)):
        share = 100 * count / row.num_draws
        low, high = (100 * x for x in stats.binomtest(count, row.num_draws).proportion_ci())
        colour = "#1b7837" if row.name.startswith("gumbeljax") else "#5b6f86"
        axis.errorbar(share, y, xerr=[[share - low], [high - share]], fmt="o", color=colour, capsize=4)
        label = None if y else "theory for this sampler"
        axis.plot(100 * row.theory, y, "|", color="#b2182b", markersize=16, zorder=3, label=label)
        axis.annotate(f"{share:.3f}% of {row.num_draws:,}", (1.3, y), va="center", fontsize=9)
    axis.axvline(100 * TAIL, color="black", linewidth=0.8, linestyle="dashed", label=f"true share, {TAIL:.3%}")
    axis.set(yticks=range(len(rows)), yticklabels=[row.name for row in rows], xlim=(-0.05, 1.62), ylim=(3.5, -0.5))
    axis.set_xlabel("draws from the rare tokens, %, with 95% intervals")
    axis.set_title(f"{VOCAB - 1:,} rare tokens share {TAIL:.2%} of the mass. How often is one drawn?", fontsize=10)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(loc="lower center", fontsize=8, frameon=False, bbox_to_anchor=(0.36, 0.0))
    figure.savefig(path, dpi=130)


def main() -> None:
    print(f"true share of the tail: {TAIL:.4%} (vocabulary {VOCAB:,})")
    rows = samplers()
    counts = [count_tail(row, jax.random.key(0)) for row in rows]
    for row, count in zip(rows, counts, strict=True):
        error = np.sqrt(max(row.theory * (1 - row.theory), 1e-300) / row.num_draws)
        z = 0.0 if count == row.num_draws * row.theory else (count / row.num_draws - row.theory) / error
        print(f"{row.name:40} {count / row.num_draws:.4%} of {row.num_draws:7,}   theory {row.theory:.4%} (z = {z:+.1f})")
    path = ROOT / "docs" / "images" / "tail.png"
    plot(rows, counts, path)
    print(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
