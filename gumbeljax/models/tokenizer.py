"""Text to tokens and back, through the ``tokenizers`` package, for GGUF files and Hugging Face folders."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as BPETokenizer

from gumbeljax.models.gguf import GGUFFile
from gumbeljax.models.hf import read_json

# The splitting rule of Qwen2 and Llama 3 tokenizers; they differ in how many digits stay together.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_END_NAMES = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end_of_text|>")
_CONTROL = 3  # token type of special tokens in GGUF metadata


class Tokenizer(NamedTuple):
    """A BPE tokenizer with what its checkpoint says about special tokens."""

    bpe: BPETokenizer
    eos_tokens: tuple[int, ...]  # any of these ends a text
    bos_token: int | None  # put before every text, if the checkpoint asks for one
    chat_template: str | None

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``; special tokens spelled in the text become their ids."""
        tokens = self.bpe.encode(text, add_special_tokens=False).ids
        return tokens if self.bos_token is None else [self.bos_token, *tokens]

    def decode(self, tokens: Iterable[int]) -> str:
        """Text of ``tokens`` without special tokens; an incomplete character becomes U+FFFD."""
        return self.bpe.decode(list(tokens), skip_special_tokens=True)

    def chat(self, prompt: str, system: str | None = None) -> list[int]:
        """Token ids that ask a ChatML model (SmolLM2, Qwen) to answer ``prompt``.

        Args:
          prompt: what the user says.
          system: the system message; by default the one that the checkpoint's template carries, if any.

        Raises:
          ValueError: the checkpoint has no ChatML template.
        """
        template = self.chat_template or ""
        if "<|im_start|>" not in template:
            got = "another template" if template else "none"
            raise ValueError(f"chat needs a checkpoint with a ChatML template, got {got}; pass the text as it is.")
        if system is None:
            system = default_system(template)
        turns = [] if system is None else [("system", system)]
        turns.append(("user", prompt))
        text = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in turns)
        return self.encode(text + "<|im_start|>assistant\n")


def default_system(template: str) -> str | None:
    r"""The system message a ChatML template puts in when the user gives none.

    >>> default_system("{{ '<|im_start|>system\nYou help.<|im_end|>\n' }}")
    'You help.'
    """
    found = re.search(r"<\|im_start\|>system(?:\n|\\n)([^{}'\"]+?)<\|im_end\|>", template)
    return found.group(1) if found else None


class TextStream:
    """Text of a token stream, piece by piece, each piece whole characters.

    A byte-level token may hold part of a character: text is held back while it ends in an incomplete one.

    ``push`` returns the text that the new tokens completed, ``flush`` what is left.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        # Text of tokens[_start:_shown] is printed; decoding from _start keeps the spacing that a decoder
        # gives a token in the middle of a text.
        self._start = self._shown = 0

    def push(self, tokens: Sequence[int]) -> str:
        self._tokens.extend(int(token) for token in tokens)
        return self._take(is_last=False)

    def flush(self) -> str:
        return self._take(is_last=True)

    def _take(self, is_last: bool) -> str:
        shown = self._tokenizer.decode(self._tokens[self._start : self._shown])
        text = self._tokenizer.decode(self._tokens[self._start :])
        if text.endswith("\ufffd") and not is_last:
            # Only the tail may be incomplete, and a character has at most four bytes, so at most three tokens.
            for held in range(1, 4):
                whole = self._tokenizer.decode(self._tokens[self._start : len(self._tokens) - held])
                if len(self._tokens) - held <= self._shown:
                    return ""
                if not whole.endswith("\ufffd"):
                    self._start, self._shown = self._shown, len(self._tokens) - held
                    return whole[len(shown) :]
            # Four bytes that are no character will never become one.
        self._start, self._shown = self._shown, len(self._tokens)
        return text[len(shown) :]


def _pre_tokenizer(kind: str, source: str) -> pre_tokenizers.PreTokenizer:
    if kind in ("smollm", "starcoder"):
        return pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    if kind in ("gpt-2", "default"):
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if kind in ("qwen2", "llama-bpe"):
        words = _WORDS.format(digits="" if kind == "qwen2" else "{1,3}")
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(words), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    raise ValueError(
        f"tokenizer.ggml.pre in {source} must be one of smollm, starcoder, gpt-2, default, qwen2, llama-bpe, "
        f"got {kind!r}; load the checkpoint's Hugging Face folder, whose tokenizer.json is complete."
    )


def from_gguf(file: GGUFFile) -> Tokenizer:
    """The tokenizer that a GGUF file carries in its metadata."""
    source = file.path.name
    if file.need("tokenizer.ggml.model") != "gpt2":
        raise ValueError(
            f"tokenizer.ggml.model in {source} must be gpt2 (byte-level BPE), "
            f"got {file.get('tokenizer.ggml.model')!r}; load the checkpoint's Hugging Face folder instead."
        )
    kind = file.get("tokenizer.ggml.pre", "default")
    names, merges = file.need("tokenizer.ggml.tokens"), file.need("tokenizer.ggml.merges")
    bpe = BPETokenizer(
        models.BPE(
            {name: i for i, name in enumerate(names)},
            [tuple(merge.split(" ", 1)) for merge in merges],
            ignore_merges=kind == "llama-bpe",
        )
    )
    if kind == "qwen2":
        bpe.normalizer = normalizers.NFC()
    bpe.pre_tokenizer = _pre_tokenizer(kind, source)
    bpe.decoder = decoders.ByteLevel()
    types = file.get("tokenizer.ggml.token_type", [])
    special = [AddedToken(n, special=True, normalized=False) for n, t in zip(names, types, strict=False) if t == _CONTROL]
    bpe.add_special_tokens(special)
    return Tokenizer(
        bpe,
        _eos_tokens(bpe, [file.get("tokenizer.ggml.eos_token_id")]),
        # Llama 3 files without the flag want a BOS; the other byte-level families do not.
        file.get("tokenizer.ggml.bos_token_id") if file.get("tokenizer.ggml.add_bos_token", kind == "llama-bpe") else None,
        file.get("tokenizer.chat_template"),
    )


def from_hf(folder: Path) -> Tokenizer:
    """The tokenizer of a Hugging Face folder: ``tokenizer.json`` and what its configuration files add."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ValueError(f"tokenizer.json must be in the model folder {folder}, got none; download it again.")
    try:
        bpe = BPETokenizer.from_file(str(path))
    except Exception as error:  # the Rust side raises plain Exception
        raise ValueError(f"{path} must be a tokenizer file, got: {error}; download it again.") from error
    optional = {
        name: read_json(folder / name) if (folder / name).is_file() else {}
        for name in ("config.json", "generation_config.json", "tokenizer_config.json")
    }
    ends = []
    for name in ("config.json", "generation_config.json"):
        found = optional[name].get("eos_token_id")
        ends += found if isinstance(found, list) else [found]
    template = optional["tokenizer_config.json"].get("chat_template")
    if template is None and (folder / "chat_template.jinja").is_file():
        template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    # The file's own post-processor knows whether a BOS is wanted.
    start = bpe.encode("", add_special_tokens=True).ids
    return Tokenizer(bpe, _eos_tokens(bpe, ends), start[0] if start else None, template)


def _eos_tokens(bpe: BPETokenizer, named: Iterable[int | None]) -> tuple[int, ...]:
    """The ids named by the checkpoint and the usual end-of-text tokens that its vocabulary has."""
    ends = {int(token) for token in named if token is not None}
    ends |= {token for token, added in bpe.get_added_tokens_decoder().items() if added.content in _END_NAMES}
    return tuple(sorted(ends))
