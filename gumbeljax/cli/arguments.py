"""What the commands' parsers have in common: errors of one sentence, checked numbers, options of models and sampling."""

import argparse
import math
from collections.abc import Callable
from typing import Any, NoReturn


class Parser(argparse.ArgumentParser):
    """argparse with one sentence per error."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message.rstrip('.')}; see {self.prog} --help.\n")


def number(text: str, least: float, most: float = math.inf, kind: Callable = float) -> Any:
    """A number in a range; its type is ``kind``."""
    try:
        value = kind(text)
    except ValueError:
        value = math.nan
    if not least <= value <= most or math.isinf(value):
        what = "a whole number" if kind is int else "a number"
        limits = f"of at least {least:g}" if math.isinf(most) else f"from {least:g} to {most:g}"
        raise argparse.ArgumentTypeError(f"must be {what} {limits}, got {text}")
    return value


def temperature(text: str) -> float:
    """0 or more."""
    return number(text, 0)


def count(text: str) -> int:
    """A whole number of at least 1."""
    return number(text, 1, kind=int)


def count_or_none(text: str) -> int:
    """A whole number; 0 is off."""
    return number(text, 0, kind=int)


def share(text: str) -> float:
    """From 0 to 1."""
    return number(text, 0, 1)


def positive(text: str) -> float:
    """A positive number."""
    return number(text, 1e-3)


def any_number(text: str) -> float:
    """A number of either sign."""
    return number(text, -1e6, 1e6)


def seed(text: str) -> int:
    """32 bits."""
    if not text.isdecimal() or int(text) >= 2**32:
        raise argparse.ArgumentTypeError(f"must be a whole number from 0 to 2^32 - 1, got {text}")
    return int(text)


KNOBS = {
    "top_k": (count_or_none, "K", "draw among the K most probable tokens; 0 is off"),
    "top_p": (share, "P", "draw among the most probable tokens that hold a share P of the mass; 1 is off"),
    "min_p": (share, "P", "draw among tokens at least P times as probable as the most probable one; 0 is off"),
    "repetition_penalty": (positive, "R", "divide logits of tokens of prompt and output by R; 1 is off"),
    "presence_penalty": (any_number, "A", "take A from the logits of tokens of the output; 0 is off"),
    "frequency_penalty": (any_number, "A", "take A from them for each time the token occurs; 0 is off"),
}


def check_sampling(name: str, value: float) -> None:
    """The rule of a flag for a value that came some other way.

    >>> check_sampling("top_p", 7)
    Traceback (most recent call last):
    argparse.ArgumentTypeError: must be a number from 0 to 1, got 7
    """
    (temperature if name == "temperature" else KNOBS[name][0])(str(value))


def add_sampling(parser: argparse.ArgumentParser, default_temperature: float) -> None:
    """Options of the draw."""
    group = parser.add_argument_group("sampling")
    group.add_argument(
        "--temperature", type=temperature, default=default_temperature, metavar="T", help="0 is greedy; default: %(default)s"
    )
    for name, (kind, metavar, text) in KNOBS.items():
        group.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar=metavar, help=f"{text}; default: off")


def sampling_options(options: argparse.Namespace) -> dict[str, Any]:
    """Keyword options of ``gumbeljax.decode``; what was not asked for is not in the dict, so that it costs nothing."""
    given = {name: getattr(options, name) for name in KNOBS if getattr(options, name) is not None}
    return {"temperature": options.temperature, **given}


def add_model(parser: argparse.ArgumentParser) -> None:
    """Which model, and in what precision."""
    parser.add_argument(
        "--model",
        metavar="PATH",
        help="a .gguf file, or a Hugging Face folder with config.json, *.safetensors and tokenizer.json "
        "(Llama, Mistral, SmolLM2, Qwen2, Qwen3); default: the installed SmolLM2-135M-Instruct",
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="of weights and cache; float32 is the faster one on a CPU; default: %(default)s",
    )
