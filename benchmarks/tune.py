"""Measure the table of choices for named heads on this device, with `gumbeljax.autotune`, into one file.

A table under gumbeljax/tuned (none in this version) is a part of the package, and is used where nobody names an implementation.
An entry holds for all smaller batches down to the next one, so that a few numbers of rows do.
"""

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
from rich.progress import track

import gumbeljax
from benchmarks.bench_gpu import random_head
from benchmarks.shapes import GPU_HEADS, HEADS

ROWS = (16, 32, 64, 128, 256)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tune", description=__doc__.splitlines()[0])
    parser.add_argument("path", help="the table: choices for other shapes in it are kept")
    parser.add_argument("--heads", nargs="+", choices=[head.name for head in HEADS], default=[head.name for head in GPU_HEADS])
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    parser.add_argument("--vocab-axis", type=int, choices=(0, 1), default=0, help="1: w is [d_model, vocab]")
    parser.add_argument("--rounds", type=int, default=20, help="turns of the best candidates (default 20)")
    arguments = parser.parse_args()
    Path(arguments.path).parent.mkdir(parents=True, exist_ok=True)
    command = " ".join(["python -m benchmarks.tune", "--heads", *arguments.heads, "--rows", *map(str, arguments.rows),
                        "--vocab-axis", str(arguments.vocab_axis), "--rounds", str(arguments.rounds)])
    for head in (head for head in HEADS if head.name in arguments.heads):
        w = random_head(head)
        if arguments.vocab_axis == 1:
            w = jax.jit(jnp.transpose)(w)
        for rows in track(arguments.rows, description=head.name):
            h = jax.random.normal(jax.random.key(4), (rows, head.d_model), jnp.bfloat16)
            gumbeljax.autotune(h, w, arguments.path, vocab_axis=arguments.vocab_axis, rounds=arguments.rounds, command=command)
        del w
    for x in gumbeljax.load_tuning(arguments.path).shapes:
        print(f"{x.place.rows:5} x {x.place.vocab} x {x.place.d_model}: {x.implementation} {x.tiles}, "
              f"{1e6 * x.seconds:.1f} us (without the table {1e6 * x.untuned_seconds:.1f})")


if __name__ == "__main__":
    main()
