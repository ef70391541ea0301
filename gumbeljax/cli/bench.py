"""``gumbeljax bench``: time per output token and throughput of a model, real or of a given shape with random weights."""

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any, NamedTuple

from gumbeljax.cli.arguments import Parser, add_model, add_sampling, count, sampling_options, seed

DESCRIPTION = """\
Time the decode loop: time per output token (TPOT) and throughput at several batch sizes, as a table, and with --plot as a plot.
TPOT = (t(new tokens) - t(few)) / (new tokens - few): prompts and fixed costs cancel. Without --shape the model is real."""

EPILOG = """\
examples:
  gumbeljax bench --batch 1,8
  gumbeljax bench --shape qwen3-1.7b --dtype bfloat16 --batch 1,64,256 --top-k 50 --top-p 0.95
  gumbeljax bench --shape tiny --plot tpot.png --json tpot.json

bytes: the weights and the part of the cache in use, which every step has to read; GB/s is these bytes over TPOT."""

FEW = 8  # new tokens of the shorter run

# d_model, d_ff, num_layers, num_heads, num_kv_heads, head_dim, vocab, is_tied, has_qk_norm
SHAPES: dict[str, tuple[int, int, int, int, int, int, int, bool, bool]] = {
    "tiny": (64, 128, 2, 4, 2, 16, 1024, True, False),
    "smollm2-135m": (576, 1536, 30, 9, 3, 64, 49_152, True, False),
    "smollm2-360m": (960, 2560, 32, 15, 5, 64, 49_152, True, False),
    "qwen3-0.6b": (1024, 3072, 28, 16, 8, 128, 151_936, True, True),
    "qwen3-1.7b": (2048, 6144, 28, 16, 8, 128, 151_936, True, True),
    "qwen3-4b": (2560, 9728, 36, 32, 8, 128, 151_936, True, True),
    "llama-3.2-1b": (2048, 8192, 16, 32, 8, 64, 128_256, True, False),
}


class Timing(NamedTuple):
    """One batch size."""

    batch: int
    tpot_ms: float
    tokens_per_second: float
    prefill_ms: float  # the shorter run less its steps: prompts and fixed costs
    read_gb: float  # bytes that a step has to read
    gb_per_second: float


def batches(text: str) -> list[int]:
    """Batch sizes, separated by commas."""
    return [count(part) for part in text.split(",")]


def build_parser() -> argparse.ArgumentParser:
    """All flags of the command."""
    parser = Parser(
        allow_abbrev=False, prog="gumbeljax bench", description=DESCRIPTION, epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add_model(parser)
    parser.add_argument("--shape", choices=tuple(SHAPES), help="random weights of this shape instead of a model")
    parser.add_argument("--batch", type=batches, default=[1, 8], metavar="N,N,...", help="batch sizes; default: 1,8")
    parser.add_argument(
        "--prompt-tokens", type=count, default=128, metavar="N", help="tokens of each prompt; default: %(default)s"
    )
    parser.add_argument("--new-tokens", type=count, default=128, metavar="N", help="tokens to draw; default: %(default)s")
    parser.add_argument("--chunk-size", type=count, default=32, metavar="N", help="steps per chunk; default: %(default)s")
    parser.add_argument("--cache", choices=("paged", "contiguous"), default="paged", help="default: %(default)s")
    parser.add_argument("--page-size", type=count, default=16, metavar="N", help="slots per page; default: %(default)s")
    parser.add_argument("--repeats", type=count, default=3, metavar="N", help="runs, of which the fastest counts; default: 3")
    parser.add_argument("--seed", type=seed, default=0, metavar="N", help="of weights, prompts and draws; default: %(default)s")
    parser.add_argument("--plot", metavar="PATH", help="write a plot, in the format of the suffix (.png, .svg, .pdf)")
    parser.add_argument("--json", metavar="PATH", help="write the numbers")
    add_sampling(parser, 1.0)
    return parser


def random_model(name: str, dtype: str, number: int):
    """A model of a shape of ``SHAPES``, its weights normal and small."""
    import jax
    from flax import nnx

    from gumbeljax import models

    d_model, d_ff, num_layers, num_heads, num_kv_heads, head_dim, vocab, is_tied, has_qk_norm = SHAPES[name]
    config = models.LlamaConfig(
        vocab, d_model, d_ff, num_layers, num_heads, num_kv_heads, head_dim, is_tied=is_tied, has_qk_norm=has_qk_norm
    )
    # eval_shape: Flax's own initialisation would run layer by layer, unjitted.
    graphdef, state = nnx.split(nnx.eval_shape(lambda: models.Llama(config, jax.numpy.dtype(dtype), rngs=nnx.Rngs(0))))
    leaves, treedef = jax.tree.flatten(state)
    keys = jax.random.split(jax.random.key(number), len(leaves))
    fill = jax.jit(lambda key, like: jax.random.normal(key, like.shape, like.dtype) * 0.02, static_argnums=1)
    ones = jax.numpy.ones
    leaves = [fill(k, x) if len(x.shape) > 1 else ones(x.shape, x.dtype) for k, x in zip(keys, leaves, strict=True)]
    return nnx.merge(graphdef, jax.tree.unflatten(treedef, leaves))


def time_batch(model, batch: int, options: argparse.Namespace) -> Timing:
    """Two lengths of run, each the fastest of several after one that compiles."""
    import jax
    import numpy as np

    from gumbeljax.decode import generate
    from gumbeljax.nnx import as_decode_fn

    decode_fn, params = as_decode_fn(model)
    w = model.head()
    length = options.prompt_tokens + options.new_tokens
    prompts = np.random.default_rng(options.seed).integers(0, model.config.vocab, (batch, options.prompt_tokens))
    key, sampling = jax.random.key(options.seed), sampling_options(options)

    def run(new_tokens: int) -> float:
        paged = {"page_size": options.page_size}
        cache = model.init_cache(batch, length) if options.cache != "paged" else model.init_paged_cache(batch, length, **paged)
        jax.block_until_ready(cache)
        start = time.perf_counter()
        out = generate(
            decode_fn, params, w, prompts, cache, key, max_new_tokens=new_tokens, chunk_size=options.chunk_size,
            shares_prefix=False, **sampling,
        )  # fmt: skip
        jax.block_until_ready(out.tokens)
        return time.perf_counter() - start

    few = min(FEW, options.new_tokens // 2)
    times = {few: math.inf, options.new_tokens: math.inf}
    for new_tokens in times:
        run(new_tokens)
    for i in range(10 * options.repeats):
        for new_tokens in times:  # in turn: both meet the same neighbours
            times[new_tokens] = min(times[new_tokens], run(new_tokens))
        if i + 1 >= options.repeats and times[options.new_tokens] > times[few]:
            break
    tpot = (times[options.new_tokens] - times[few]) / (options.new_tokens - few)
    if tpot <= 0:
        raise ValueError(
            f"--new-tokens must make a run longer than this machine's noise, got {options.new_tokens} tokens in "
            f"{1e3 * times[options.new_tokens]:.1f} ms and {few} in {1e3 * times[few]:.1f} ms; raise it, or --repeats"
        )
    size = jax.numpy.dtype(options.dtype).itemsize
    cache_slots = batch * (options.prompt_tokens + options.new_tokens / 2)
    config = model.config
    read = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(params)) + (
        2 * config.num_layers * config.num_kv_heads * config.head_dim * size * cache_slots
    )
    if not config.is_tied:
        read -= model.embed_tokens.embedding[...].size * size  # of which a step reads one row per token
    return Timing(batch, 1e3 * tpot, batch / tpot, 1e3 * (times[few] - few * tpot), read / 1e9, read / 1e9 / tpot)


def run(options: argparse.Namespace) -> None:
    """Load or make the model, time it, print, plot. Raises ValueError with one sentence for what the user can fix."""
    import jax
    from rich.console import Console
    from rich.table import Table

    from gumbeljax import models

    if options.shape is not None and options.model is not None:
        raise ValueError("--shape must go without --model, got both; drop one of them")
    if options.new_tokens < 2:
        raise ValueError(f"--new-tokens must be at least 2 to take a difference, got {options.new_tokens}; raise it")
    for path in (options.plot, options.json):  # now, not when all has been timed
        if path is not None and not Path(path).absolute().parent.is_dir():
            raise ValueError(f"--plot and --json must lie in a folder that exists, got {path}; make the folder first")
    if options.plot is not None:
        import matplotlib

        matplotlib.use("agg")
        if Path(options.plot).suffix not in (".png", ".svg", ".pdf"):
            raise ValueError(f"--plot must end in .png, .svg or .pdf, got {options.plot}; rename it")
    console = Console(highlight=False, width=None if Console().is_terminal else 120)
    quiet = Console(stderr=True, highlight=False)
    with quiet.status("Making the model ..."):
        if options.shape is not None:
            name, model = options.shape, random_model(options.shape, options.dtype, options.seed)
        else:
            path = Path(options.model or models.find_smollm2())
            name, model = path.stem, models.load(path, dtype=options.dtype).model
    device = jax.devices()[0].device_kind
    table = Table("rows", "TPOT, ms", "tokens/s", "prompts, ms", "read, GB", "GB/s",
                  title=f"{name}, {options.dtype}, {options.cache} cache, on {device}: {options.prompt_tokens} prompt tokens, "
                  f"{options.new_tokens} new")  # fmt: skip
    for column in table.columns:
        column.justify = "right"
    timings = []
    for batch in options.batch:
        with quiet.status(f"{batch} rows ..."):
            timings.append(time_batch(model, batch, options))
        t = timings[-1]
        numbers = (f"{t.tpot_ms:.3f}", f"{t.tokens_per_second:,.1f}", f"{t.prefill_ms:,.1f}", f"{t.read_gb:.3g}")
        table.add_row(str(t.batch), *numbers, f"{t.gb_per_second:,.1f}")
    console.print(table)
    if options.json is not None:
        facts = {"model": name, "device": device, "jax": jax.__version__, **describe(options)}
        Path(options.json).write_text(json.dumps({**facts, "timings": [t._asdict() for t in timings]}, indent=1) + "\n")
    if options.plot is not None:
        draw_plot(options.plot, f"{name}, {options.dtype}, {device}", timings)
        console.print(f"plot: {options.plot}")


def describe(options: argparse.Namespace) -> dict[str, Any]:
    """The settings that the numbers depend on."""
    names = ("dtype", "cache", "page_size", "prompt_tokens", "new_tokens", "chunk_size", "repeats")
    return {name: getattr(options, name) for name in names} | {"sampling": sampling_options(options)}


def draw_plot(path: str, title: str, timings: list[Timing]) -> None:
    """TPOT and throughput over the batch size."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.4), layout="constrained")
    rows = [t.batch for t in timings]
    panels = (("time per output token, ms", "tpot_ms"), ("tokens per second, all rows", "tokens_per_second"))
    for axis, (label, field) in zip(figure.subplots(1, 2), panels, strict=True):
        axis.plot(rows, [getattr(t, field) for t in timings], "o-", color="#1f6f8b")
        for t in timings:
            y = getattr(t, field)
            text = f"{y:.3g}" if y < 100 else f"{y:,.0f}"
            axis.annotate(text, (t.batch, y), (-5, 4), textcoords="offset points", ha="right")  # left of a rising line
        axis.set(xscale="log", xlabel="rows", ylabel=label, ylim=(0, 1.2 * max(getattr(t, field) for t in timings)))
        axis.set_xticks(rows, [str(n) for n in rows], minor=False)
        axis.minorticks_off()
        axis.margins(x=0.25)
        axis.grid(alpha=0.3)
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=130)
