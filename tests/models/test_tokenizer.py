"""Tokenizers: ids of awkward strings, chat turns, and streams that never print half a character."""

import json

import numpy as np
import pytest

from gumbeljax import models
from gumbeljax.models.gguf import GGUFFile
from gumbeljax.models.tokenizer import TextStream, default_system, from_gguf
from tests.models.golden import FOLDER, read_tiny, smollm2_path, write_folder, write_gguf


@pytest.fixture(scope="module")
def smollm2_tokenizer():
    return from_gguf(GGUFFile(smollm2_path()))


@pytest.fixture(scope="module")
def golden():
    with np.load(FOLDER / "smollm2.npz") as file:
        return dict(file)


def test_ids_are_those_of_transformers(smollm2_tokenizer, golden):
    for i, text in enumerate(json.loads(str(golden["texts"]))):
        assert smollm2_tokenizer.encode(text) == golden[f"text_{i}"].tolist(), text


def test_chat_turns_are_those_of_the_template(smollm2_tokenizer, golden):
    for i, prompt in enumerate(json.loads(str(golden["prompts"]))):
        assert smollm2_tokenizer.chat(prompt) == golden[f"prompt_{i}"].tolist()
    text = smollm2_tokenizer.bpe.decode(smollm2_tokenizer.chat("hi", "Be brief."), skip_special_tokens=False)
    assert text == ("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")


def test_ends_are_the_end_of_turn_and_of_text(smollm2_tokenizer):
    assert smollm2_tokenizer.eos_tokens == (0, 2)


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_stream_prints_whole_characters(smollm2_tokenizer, golden, size):
    for text in json.loads(str(golden["texts"])):
        tokens = smollm2_tokenizer.encode(text)
        stream = TextStream(smollm2_tokenizer)
        pieces = [stream.push(tokens[i : i + size]) for i in range(0, len(tokens), size)]
        assert not any("\ufffd" in piece for piece in pieces)
        assert "".join(pieces) + stream.flush() == smollm2_tokenizer.decode(tokens)


def test_stream_holds_back_an_incomplete_character_only(smollm2_tokenizer):
    tokens = smollm2_tokenizer.encode("ok \U0001f9ff")
    assert smollm2_tokenizer.decode(tokens[:-1]).endswith("\ufffd")  # the emoji takes several tokens
    stream = TextStream(smollm2_tokenizer)
    assert stream.push(tokens[:-1]).startswith("ok")
    assert stream.push(tokens[-1:]).endswith("\U0001f9ff")
    assert stream.flush() == ""
    # Cut off for good: shown as a replacement character at the end, not lost.
    stream = TextStream(smollm2_tokenizer)
    assert "\ufffd" not in stream.push(tokens[:-1])
    assert "\ufffd" in stream.flush()


def test_stream_goes_on_after_bytes_that_are_no_character(smollm2_tokenizer):
    rng = np.random.default_rng(0)
    single_bytes = [i for i in range(49152) if smollm2_tokenizer.decode([i]) == "\ufffd"]
    tokens = rng.choice(single_bytes, 40).tolist() + smollm2_tokenizer.encode(" and on it goes")
    stream = TextStream(smollm2_tokenizer)
    pieces = [stream.push([token]) for token in tokens]
    assert "".join(pieces[:40])  # it does not wait forever
    assert ("".join(pieces) + stream.flush()).endswith(" and on it goes")


def test_folder_tokenizer(tmp_path):
    tiny = read_tiny("tiny_llama")
    folder = write_folder(tmp_path / "model", tiny)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [18, 21]}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "<|im_start|> ..."}))
    tokenizer = models.load(folder).tokenizer
    assert tokenizer.encode("ab12 c<|im_end|>") == [19, 9, 10, 18, 2, 21]
    assert tokenizer.decode([19, 9, 10, 18, 2, 21]) == "ab12 c"
    assert {18, 21} <= set(tokenizer.eos_tokens)
    assert tokenizer.bos_token is None


def test_gguf_tokenizer_of_another_family(tmp_path):
    tokenizer = models.load(write_gguf(tmp_path / "model.gguf", read_tiny("tiny_qwen2"))).tokenizer
    assert tokenizer.encode("ab12 c<|im_end|>") == [19, 9, 10, 18, 2, 21]
    assert tokenizer.eos_tokens == (21,)
    with pytest.raises(ValueError, match="chat needs a checkpoint with a ChatML template, got none"):
        tokenizer.chat("hi")


def test_default_system_message():
    assert default_system("{% if x %}{{ '<|im_start|>system\\nYou are Q.<|im_end|>\\n' }}{% endif %}") == "You are Q."
    assert default_system("{{ '<|im_start|>' + message['role'] }}") is None
