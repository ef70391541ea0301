"""``gumbeljax generate``: many prompts through one server, JSON lines out."""

import argparse
import json
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from gumbeljax.cli.arguments import (
    KNOBS,
    Parser,
    add_model,
    add_sampling,
    check_sampling,
    count,
    count_or_none,
    sampling_options,
    seed,
)

DESCRIPTION = """\
Continue many prompts with a language model of the Llama family, several at a time (continuous batching), and write one
JSON object per prompt to standard output, in the order of the prompts. Progress goes to standard error.
A prompt's text depends on the seed and the prompt's number, not on the batch."""

EPILOG = """\
examples:
  gumbeljax generate "Name a colour." "Name a river." --temperature 0
  gumbeljax generate --file prompts.txt --batch 8 --top-p 0.9 > answers.jsonl
  gumbeljax generate --file prompts.jsonl --stop $'\\n\\n' --raw

A file has one prompt per line, plain text or a JSON object: {"prompt": "...", "seed": 7, "max_new_tokens": 20,
"min_new_tokens": 2, "stop": ["."], "temperature": 0.5}; all but the prompt may be left out. - is standard input.

fields of the output: index, prompt, text (cut before a stop string), reason (eos, stop, length, no law), num_prompt_tokens,
tokens, log_prob (sum of the model's own log-probabilities of the tokens; null for no law)"""


class Prompt(NamedTuple):
    """One line of input; None: as the command line says."""

    text: str
    seed: int | None = None
    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    stop: list[str] | None = None
    sampling: dict[str, float] = {}  # noqa: RUF012


def build_parser() -> argparse.ArgumentParser:
    """All flags of the command."""
    parser = Parser(
        allow_abbrev=False, prog="gumbeljax generate", description=DESCRIPTION, epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="what to answer or continue")
    parser.add_argument("--file", metavar="PATH", help="one prompt per line; - reads standard input")
    add_model(parser)
    parser.add_argument("--batch", type=count, default=4, metavar="N", help="prompts at a time; default: %(default)s")
    parser.add_argument("--seed", type=seed, default=0, metavar="N", help="seed of the keys; default: %(default)s")
    parser.add_argument(
        "--max-new-tokens", type=count, default=128, metavar="N", help="most tokens per prompt; default: %(default)s"
    )
    parser.add_argument(
        "--min-new-tokens", type=count_or_none, default=0, metavar="N", help="no end before so many; default: %(default)s"
    )
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end a text before this string; may be given several times"
    )
    parser.add_argument("--raw", action="store_true", help="continue the prompts as they are, without chat turns")
    parser.add_argument("--system", metavar="TEXT", help="system message; default: the one of the model's template")
    parser.add_argument("--output", metavar="PATH", help="write here instead of standard output")
    parser.add_argument(
        "--chunk-size", type=count, default=16, metavar="N", help="steps between two looks of the host; default: %(default)s"
    )
    parser.add_argument("--page-size", type=count, default=16, metavar="N", help="slots per cache page; default: %(default)s")
    parser.add_argument(
        "--num-pages", type=count, metavar="N", help="pages of the cache; default: enough for a full batch of longest texts"
    )
    parser.add_argument("--no-prefix-sharing", action="store_true", help="run equal beginnings of prompts every time")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    add_sampling(parser, 0.7)
    return parser


def read_prompts(options: argparse.Namespace) -> list[Prompt]:
    """Prompts of the command line, then those of the file."""
    prompts = [Prompt(text) for text in options.prompts]
    if options.file is not None:
        try:
            text = sys.stdin.read() if options.file == "-" else Path(options.file).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"--file must be text in UTF-8, got {error} in {options.file}; convert it") from error
        except OSError as error:
            raise ValueError(f"--file must be readable, got {options.file}: {error.strerror}; check the path") from error
        allowed = sampling_options(options)
        prompts += [parse_line(line, i, allowed) for i, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not prompts:
        raise ValueError("prompts must be at least one, got none; write some, or pass --file PATH")
    return prompts


def parse_line(line: str, number: int, allowed: dict[str, Any]) -> Prompt:
    """One line of a file.

    >>> parse_line("Name a colour.", 1, {})
    Prompt(text='Name a colour.', seed=None, max_new_tokens=None, min_new_tokens=None, stop=None, sampling={})
    >>> parse_line('{"prompt": "Hi", "temperature": 0}', 2, {"temperature": 0.7}).sampling
    {'temperature': 0}
    """
    if not line.lstrip().startswith("{"):
        return Prompt(line)
    try:
        fields = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"line {number} must be a JSON object since it begins with a brace, got: {error}; fix it") from error
    if not isinstance(fields.get("prompt"), str):
        raise ValueError(f"line {number} must have a text in the field prompt, got {fields.get('prompt')!r}; add it")
    own = {name: fields.pop(name) for name in Prompt._fields[1:-1] if name in fields}
    text = fields.pop("prompt")
    for name in fields:
        if name not in allowed:
            way_out = f"pass --{name.replace('_', '-')} for the lines without it" if name in KNOBS else "leave it out"
            raise ValueError(
                f"line {number} must have fields of the help text and sampling options given as flags, got {name!r}; {way_out}"
            )
    if any(not isinstance(value, int | float) or isinstance(value, bool) for value in fields.values()):
        raise ValueError(f"line {number} must have numbers as sampling options, got {fields}; fix it")
    for name, value in fields.items():
        try:
            check_sampling(name, value)
        except argparse.ArgumentTypeError as error:
            raise ValueError(f"{name} of line {number} {error}; fix it") from error
    for name, least, most in (("seed", 0, 2**32 - 1), ("max_new_tokens", 1, 2**31 - 1), ("min_new_tokens", 0, 2**31 - 1)):
        value = own.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most):
            raise ValueError(f"line {number} must have a whole number from {least} to {most} as {name}, got {value!r}; fix it")
    if own.get("stop") is not None:
        texts = [own["stop"]] if isinstance(own["stop"], str) else own["stop"]
        if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
            raise ValueError(f"line {number} must have a text, or a list of texts, as stop, got {own['stop']!r}; fix it")
        own["stop"] = texts
    return Prompt(text, **own, sampling=fields)


def run(options: argparse.Namespace) -> None:
    """Load, serve, write. Raises ValueError with one sentence for what the user can fix."""
    from rich.console import Console

    from gumbeljax import models

    if options.raw and options.system is not None:
        raise ValueError("--system must go without --raw, got both; drop one of them")
    if "" in options.stop:
        raise ValueError("--stop must have at least one character, got none; leave it out")
    prompts = read_prompts(options)
    if options.output is not None and not Path(options.output).absolute().parent.is_dir():
        raise ValueError(f"--output must lie in a folder that exists, got {options.output}; make the folder first")
    console = Console(stderr=True, quiet=options.quiet, highlight=False)
    with console.status("Loading the model ..."):
        loaded = models.load(options.model or models.find_smollm2(), dtype=options.dtype)
    answers = serve_prompts(loaded, prompts, options, console)
    if options.output is None:
        for answer in answers:
            print(json.dumps(answer, ensure_ascii=False), flush=True)
        return
    with open(options.output, "w", encoding="utf-8") as file:
        for answer in answers:
            print(json.dumps(answer, ensure_ascii=False), file=file, flush=True)


def serve_prompts(loaded, prompts: list[Prompt], options: argparse.Namespace, console) -> Iterator[dict[str, Any]]:
    """The answers, in order, each as soon as those before it are there."""
    import jax
    import numpy as np
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from gumbeljax import sample_with_log_probs
    from gumbeljax.decode import Request, serve
    from gumbeljax.decode.stops import cut_text
    from gumbeljax.nnx import as_decode_fn

    model, tokenizer = loaded
    decode_fn, params = as_decode_fn(model)
    w, known = model.head(), tokenizer.bpe.get_vocab_size()
    sample_fn = partial(sample_with_log_probs, valid_vocab=known) if known < w.shape[0] else sample_with_log_probs
    requests, key = [], jax.random.key(options.seed)
    for i, prompt in enumerate(prompts):
        tokens = tokenizer.encode(prompt.text) if options.raw else tokenizer.chat(prompt.text, options.system)
        own = jax.random.fold_in(key, i) if prompt.seed is None else jax.random.key(prompt.seed)
        stop = options.stop if prompt.stop is None else prompt.stop
        most = prompt.max_new_tokens or options.max_new_tokens
        least = options.min_new_tokens if prompt.min_new_tokens is None else prompt.min_new_tokens
        if not len(tokens):
            raise ValueError(f"prompt {i} must hold at least one token, got {prompt.text!r}; write something")
        requests.append(Request(tokens, own, most, least, tokenizer.eos_tokens, stop, prompt.sampling))
    longest = max(len(request.prompt) + request.max_new_tokens for request in requests)
    if longest > model.config.max_positions:
        raise ValueError(
            f"prompts with their new tokens must fit the model's context of {model.config.max_positions} tokens, "
            f"got {longest}; shorten one of them"
        )
    pages = -(-longest // options.page_size)
    if options.num_pages is not None and options.num_pages < pages:
        raise ValueError(
            f"--num-pages must be at least {pages} for {longest} tokens in pages of {options.page_size}, "
            f"got {options.num_pages}; raise it, or leave it out"
        )
    batch = min(options.batch, len(requests))
    cache = model.init_paged_cache(batch, longest, page_size=options.page_size, num_pages=options.num_pages)
    progress = Progress(
        TextColumn("prompts"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.fields[speed]}"),
        console=console, disable=options.quiet, transient=False,
    )  # fmt: skip
    pieces, done, following, num_tokens = [[] for _ in requests], {}, 0, 0
    with progress:
        task = progress.add_task("prompts", total=len(requests), speed="compiling")
        start, is_warm = 0.0, False
        for output in serve(
            decode_fn, params, w, requests, cache, text_fn=tokenizer.decode, chunk_size=options.chunk_size,
            shares_prefix=not options.no_prefix_sharing, sample_fn=sample_fn, **sampling_options(options),
        ):  # fmt: skip
            now = progress.get_time()
            is_warm = is_warm or bool(pieces[output.index])
            if is_warm:
                num_tokens += len(output.tokens)
                progress.update(task, speed=f"{num_tokens / (now - start):.0f} tokens/s")
            else:  # the first chunk, which compiles, is not counted
                start = now
            pieces[output.index].append(output)
            if output.reason is None:
                continue
            progress.advance(task)
            parts, request = pieces[output.index], requests[output.index]
            tokens = np.concatenate([part.tokens for part in parts]).tolist()
            log_prob = float(sum(part.draws.model_log_prob.sum() for part in parts))
            done[output.index] = {
                "index": output.index,
                "prompt": prompts[output.index].text,
                "text": cut_text(tokenizer.decode([t for t in tokens if t >= 0]), request.stop),
                "reason": output.reason,
                "num_prompt_tokens": len(request.prompt),
                "tokens": tokens,
                "log_prob": round(log_prob, 4) if np.isfinite(log_prob) else None,  # JSON has no NaN
            }
            while following in done:
                yield done.pop(following)
                following += 1
        if not is_warm:
            progress.update(task, speed="")
