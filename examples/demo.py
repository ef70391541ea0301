"""SmolLM2-135M answers a prompt on your CPU, every token drawn by gumbeljax; then the tokens are checked four ways.

Run with `make demo`, or `python examples/demo.py "your prompt"`.
"""

import argparse
import os
import sys
from functools import partial
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

import gumbeljax
from gumbeljax import models
from tests import oracles  # NumPy float64; imports neither jax nor gumbeljax

console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 130)


def oracle_check(answer, w, temperature):
    """Tokens from the same keys and hidden states by float64 NumPy, and how many of them were near-ties."""
    logits = answer.h.astype(np.float64) @ np.asarray(w).astype(np.float64).T
    draw = oracles.grouped_draw(logits, np.asarray(jax.random.key_data(answer.keys)), temperature)
    same = draw.tokens == answer.tokens
    gap = min(draw.group_gap.min(), draw.token_gap.min())
    # Float32 rounds the logits: only a score gap below 1e-4 excuses a difference.
    return same | draw.near_tie(), f"{np.sum(~same)} near-ties went otherwise; closest race {gap:.0e}"


def kernel_check(answer, w, temperature, num_rows):
    """The first tokens by the GPU kernel, run in Pallas' interpret mode."""
    from jax.experimental.pallas import triton as plt

    from pallas_kernels import tiles, triton

    h, keys = jnp.asarray(answer.h[:num_rows]), tuple(jax.random.key_data(answer.keys[:num_rows]).T)
    t, highest = jnp.full(len(h), temperature, jnp.float32), jax.lax.Precision.HIGHEST
    # A tile changes speed, never a token: a wide one spares the interpreter most of its steps.
    wide = tiles.TritonTiles(vocab=1024, rows=16, d_model=64)
    drawn = triton.draw(h, w, keys, t, plt=plt, vocab=w.shape[0], precision=highest, tiles=wide, interpret=True)
    return np.asarray(drawn.token) == answer.tokens[:num_rows], "Pallas Triton: stage 1 and finish"


def categorical_check(answer, w, temperature, mode):
    """method="categorical" against jax.random.categorical on the logits, with the key of every step."""
    h = jnp.asarray(answer.h)
    ours = gumbeljax.sample(h, w, answer.keys, temperature=temperature, method="categorical", mode=mode)
    logits = jax.jit(lambda h, w: h @ w.T)(h, w) / temperature
    theirs = jax.vmap(partial(jax.random.categorical, mode=mode))(answer.keys, logits)
    return np.asarray(ours == theirs), f'method="categorical", mode="{mode}"'


def memory_check(w, batch):
    """Peak temporary memory in bytes: the jitted sampling step, the same by categorical, and the logits alone."""
    h, keys = jnp.zeros((batch, w.shape[1])), jax.random.split(jax.random.key(0), batch)

    def peak(step):
        return jax.jit(step).lower(h, w, keys).compile().memory_analysis().temp_size_in_bytes

    plain = peak(lambda h, w, keys: jax.vmap(jax.random.categorical)(keys, h @ w.T))
    return peak(gumbeljax.sample), plain, batch * w.shape[0] * 4


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompt", nargs="?", default="Why is the sky blue?")
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    options = parser.parse_args()
    if not options.temperature > 0:
        parser.error(f"--temperature must be above 0, got {options.temperature:g}: the checks are about random draws")

    console.print("[dim]Loading SmolLM2-135M-Instruct and compiling ...[/dim]")
    loaded = models.load(models.find_smollm2())
    w, temperature = loaded.model.head(), options.temperature
    console.print(f"[bold]> {options.prompt}[/bold]")
    answer = models.stream_answer(
        loaded, loaded.tokenizer.chat(options.prompt), jax.random.key(options.seed), temperature=temperature,
        max_new_tokens=options.max_new_tokens, write_fn=lambda text: print(text, end="", flush=True),
    )  # fmt: skip
    speed = f"{answer.tokens_per_second:.1f} tokens/s on {os.cpu_count()} CPU cores"
    console.print(f"\n[dim]{len(answer.tokens)} tokens, {speed} (compilation: {answer.start_seconds:.1f} s)[/dim]\n")

    checks = {
        "float64 NumPy oracle, same keys and h": oracle_check(answer, w, temperature),
        "GPU kernel, interpreted, first rows": kernel_check(answer, w, temperature, 8),
        "categorical, ours and jax's, low": categorical_check(answer, w, temperature, "low"),
        "categorical, ours and jax's, high": categorical_check(answer, w, temperature, "high"),
    }
    table = Table("check", "agrees", "note", "verdict", title="Would a sceptic get the same tokens?")
    verdict = {True: "[green]PASS[/green]", False: "[red]FAIL[/red]"}
    for name, (good, note) in checks.items():
        table.add_row(name, f"{good.sum()} of {good.size} tokens", note, verdict[bool(good.all())])
    has_passed = all(good.all() for good, _ in checks.values())
    for batch in (64, 512):
        used, plain, logits = (size / 2**20 for size in memory_check(w, batch))
        note = f"the logits alone: {logits:.1f} MiB; h @ w.T and categorical: {plain:.1f} MiB"
        table.add_row(f"peak temporary memory, {batch} rows", f"{used:.1f} MiB", note, verdict[used < logits / 2])
        has_passed = has_passed and used < logits / 2
    console.print(table)
    num_equal, num_compared = (sum(f(good) for good, _ in checks.values()) for f in (np.sum, np.size))
    console.print(f"{verdict[bool(has_passed)]}: {num_equal} of {num_compared} token comparisons agree.")
    return 0 if has_passed else 1


if __name__ == "__main__":
    sys.exit(main())
