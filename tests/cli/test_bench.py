"""``gumbeljax bench``: a table, numbers and a plot; the numbers hang together."""

import json

import pytest

from gumbeljax.cli.bench import SHAPES, build_parser
from tests.cli import command
from tests.models.golden import read_tiny, write_folder

FLAGS = ("--new-tokens", "60", "--prompt-tokens", "6", "--repeats", "1", "--batch", "1,3")


def call(capsys, *arguments):
    return command.call(capsys, "bench", *arguments)


@pytest.mark.parametrize("cache", ["paged", "contiguous"])
def test_table_numbers_and_plot(capsys, tmp_path, cache):
    pytest.importorskip("matplotlib")
    numbers, plot = tmp_path / "tpot.json", tmp_path / "tpot.png"
    code, out, _ = call(capsys, "--shape", "tiny", *FLAGS, "--cache", cache, "--json", numbers, "--plot", plot, "--top-k", "5")
    assert code == 0
    assert "TPOT" in out and f"{cache} cache" in out
    facts = json.loads(numbers.read_text())
    assert (facts["model"], facts["cache"], facts["sampling"]) == ("tiny", cache, {"temperature": 1.0, "top_k": 5})
    assert [t["batch"] for t in facts["timings"]] == [1, 3]
    d_model, d_ff, num_layers, num_heads, num_kv_heads, head_dim, vocab, *_ = SHAPES["tiny"]
    weights = vocab * d_model + d_model + num_layers * (
        d_model * (2 * num_heads + 2 * num_kv_heads) * head_dim + 3 * d_model * d_ff + 2 * d_model
    )
    for t in facts["timings"]:
        assert t["tokens_per_second"] == pytest.approx(1e3 * t["batch"] / t["tpot_ms"])
        cached = 2 * num_layers * num_kv_heads * head_dim * t["batch"] * (6 + 60 / 2)
        assert t["read_gb"] == pytest.approx(4 * (weights + cached) / 1e9)
        assert t["gb_per_second"] == pytest.approx(1e3 * t["read_gb"] / t["tpot_ms"])
    assert plot.read_bytes()[:4] == b"\x89PNG"


def test_a_real_checkpoint(capsys, tmp_path):
    folder = write_folder(tmp_path / "small_qwen", read_tiny("tiny_qwen3"))
    code, out, _ = call(capsys, "--model", folder, *FLAGS)
    assert code == 0
    assert "small_qwen, float32" in out


@pytest.mark.parametrize(
    "arguments,match",
    [
        (("--shape", "huge"), "--shape: invalid choice: 'huge'"),
        (("--batch", "1,x"), "--batch: must be a whole number of at least 1, got x"),
        (("--shape", "tiny", "--model", "x"), "--shape must go without --model"),
        (("--shape", "tiny", "--new-tokens", "1"), "--new-tokens must be at least 2"),
        (("--shape", "tiny", "--plot", "/no/such/folder/a.png"), "must lie in a folder that exists, got /no/such/folder/a.png"),
        (("--shape", "tiny", "--plot", "a.bmp"), "--plot must end in .png, .svg or .pdf, got a.bmp"),
    ],
)
def test_bad_arguments_get_one_sentence(capsys, arguments, match):
    code, out, err = call(capsys, *arguments)
    assert (code, out) == (2, "")
    assert match in err
    assert err.startswith("gumbeljax bench: ") and err.endswith(".\n") and err.count("\n") == 1


def test_a_difference_lost_in_noise_is_an_error_and_no_number(capsys, monkeypatch):
    monkeypatch.setattr("time.perf_counter", lambda: 1.0)
    code, out, err = call(capsys, "--shape", "tiny", *FLAGS)
    assert (code, out) == (2, "")
    assert "--new-tokens must make a run longer than this machine's noise, got 60 tokens in 0.0 ms" in err
    assert err.endswith(".\n") and "\n" not in err[:-1].splitlines()[-1]


def test_help_is_complete(capsys):
    code, out, _ = call(capsys, "--help")
    assert code == 0
    for action in build_parser()._actions:
        assert action.help
        assert all(name in out for name in action.option_strings)
