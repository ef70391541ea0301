"""``gumbeljax generate``: one JSON object per prompt, in order, whatever the batch; one sentence for what is wrong."""

import io
import json

import jax.numpy as jnp
import pytest

from gumbeljax import models
from gumbeljax.cli.generate import build_parser, parse_line
from tests.cli import command
from tests.models.golden import read_tiny, write_folder

FLAGS = ("--raw", "--quiet", "--max-new-tokens", "9", "--temperature", "1", "--chunk-size", "4", "--page-size", "4")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("cli") / "model", read_tiny("tiny_qwen3"))


def call(capsys, *arguments):
    return command.call(capsys, "generate", *arguments)


def answers(capsys, *arguments):
    code, out, err = call(capsys, *arguments)
    assert (code, err) == (0, "")
    return [json.loads(line) for line in out.splitlines()]


def test_answers_come_in_order_and_do_not_depend_on_the_batch(capsys, folder):
    prompts = ("ab1", "cd", "ab12345678", "hg0", "ab123456")
    batched, alone = (answers(capsys, *prompts, *FLAGS, "--model", folder, "--batch", batch) for batch in (3, 1))
    assert batched == alone
    assert [answer["prompt"] for answer in batched] == list(prompts)
    for i, answer in enumerate(batched):
        assert set(answer) == {"index", "prompt", "text", "reason", "num_prompt_tokens", "tokens", "log_prob"}
        assert answer["index"] == i
        assert answer["reason"] in ("eos", "length")
        assert len(answer["tokens"]) == 9 or answer["reason"] == "eos"
        assert answer["log_prob"] < 0
    assert answers(capsys, *prompts, *FLAGS, "--model", folder, "--no-prefix-sharing") == batched
    assert answers(capsys, *prompts, *FLAGS, "--model", folder, "--seed", 1) != batched


def test_a_file_may_set_options_line_by_line(capsys, folder, tmp_path, monkeypatch):
    own = {"prompt": "cd", "temperature": 0, "max_new_tokens": 3, "seed": 5}
    lines = ["ab1", "", json.dumps(own), '{"prompt": "cd", "seed": 5}']
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines), encoding="utf-8")
    out = answers(capsys, "ef", "--file", tmp_path / "prompts.jsonl", *FLAGS, "--model", folder)
    assert [answer["prompt"] for answer in out] == ["ef", "ab1", "cd", "cd"]
    assert len(out[2]["tokens"]) <= 3
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines)))
    code, text, _ = call(capsys, "--file", "-", *FLAGS, "--model", folder, "--output", tmp_path / "out.jsonl")
    assert (code, text) == (0, "")
    again = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text(encoding="utf-8").splitlines()]
    # A line with a seed of its own gets the same text wherever it stands.
    assert [answer["tokens"] for answer in again[1:]] == [answer["tokens"] for answer in out[2:]]


def test_stop_strings_are_cut_from_the_text(capsys, folder):
    (whole,) = answers(capsys, "ab1", *FLAGS, "--model", folder)
    assert len(whole["text"]) >= 4
    stop = whole["text"][2:4]
    (cut,) = answers(capsys, "ab1", *FLAGS, "--model", folder, "--stop", stop, "--stop", "never")
    assert cut["reason"] == "stop"
    assert cut["text"] == whole["text"][: whole["text"].index(stop)]
    assert cut["tokens"] == whole["tokens"][: len(cut["tokens"])]


def test_sampling_options_reach_the_draw(capsys, folder):
    greedy, top_1 = (
        answers(capsys, "ab1", "cd", *FLAGS, "--model", folder, *extra)
        for extra in (("--temperature", "0"), ("--top-k", "1", "--repetition-penalty", "1"))
    )
    assert [answer["tokens"] for answer in greedy] == [answer["tokens"] for answer in top_1]
    (penalised,) = answers(capsys, "ab1", *FLAGS, "--model", folder, "--temperature", "0", "--presence-penalty", "1000")
    assert len(set(penalised["tokens"])) == len(penalised["tokens"])
    (longer,) = answers(capsys, "ab1", *FLAGS, "--model", folder, "--min-new-tokens", "9")
    assert len(longer["tokens"]) == 9


def test_progress_goes_to_standard_error(capsys, folder):
    code, out, err = call(capsys, "ab1", "cd", *(flag for flag in FLAGS if flag != "--quiet"), "--model", folder)
    assert code == 0
    assert "2/2" in err and "tokens/s" in err
    assert len(out.splitlines()) == 2


@pytest.mark.parametrize(
    "arguments,match",
    [
        ((), "prompts must be at least one, got none"),
        (("hi", "--top-k", "-1"), "--top-k: must be a whole number of at least 0, got -1"),
        (("hi", "--top-p", "1.5"), "--top-p: must be a number from 0 to 1, got 1.5"),
        (("hi", "--min-p", "x"), "--min-p: must be a number from 0 to 1, got x"),
        (("hi", "--batch", "0"), "--batch: must be a whole number of at least 1, got 0"),
        (("hi", "--raw", "--system", "x"), "--system must go without --raw"),
        (("--file", "/no/such/file"), "--file must be readable, got /no/such/file: No such file or directory; check"),
        (("hi", "--temp", "1"), "unrecognized arguments: --temp"),
    ],
)
def test_bad_arguments_get_one_sentence_and_exit_code_2(capsys, arguments, match):
    code, out, err = call(capsys, *arguments)
    assert (code, out) == (2, "")
    assert match in err
    assert err.startswith("gumbeljax generate: ")
    assert err.endswith(".\n") and err.count("\n") == 1


@pytest.mark.parametrize(
    "line,match",
    [
        ("{oops", "line 1 must be a JSON object"),
        ('{"text": "a"}', "line 1 must have a text in the field prompt, got None"),
        ('{"prompt": "a", "top_k": 3}', "got 'top_k'; pass --top-k for the lines without it"),
        ('{"prompt": "a", "topk": 3}', "got 'topk'; leave it out"),
        ('{"prompt": "a", "temperature": "hot"}', "line 1 must have numbers as sampling options"),
        ('{"prompt": "a", "temperature": -1}', "temperature of line 1 must be a number of at least 0, got -1; fix it"),
        ('{"prompt": "a", "temperature": NaN}', "temperature of line 1 must be a number of at least 0, got nan; fix it"),
    ],
)
def test_bad_lines_are_named(capsys, tmp_path, line, match):
    (tmp_path / "prompts").write_text(line)
    code, _, err = call(capsys, "--file", tmp_path / "prompts")
    assert code == 2
    assert match in err and err.count("\n") == 1


def test_what_does_not_fit_is_said(capsys, folder):
    code, _, err = call(capsys, "ab", *FLAGS, "--model", folder, "--max-new-tokens", "300")
    assert code == 2 and "must fit the model's context of 256 tokens, got 301" in err
    code, _, err = call(capsys, "ab", *FLAGS, "--model", folder, "--num-pages", "2")
    assert code == 2 and "--num-pages must be at least 3 for 10 tokens in pages of 4, got 2; raise it" in err
    assert err.count("\n") == 1


def test_a_tokenizer_with_more_ids_than_the_model_is_found_out(capsys, folder, monkeypatch):
    monkeypatch.setattr("gumbeljax.models.tokenizer.Tokenizer.encode", lambda self, text: [1, 10**6])
    for arguments in (("generate", "ab", *FLAGS), ("ab", "--raw", "--quiet", "--max-new-tokens", "9")):
        code, _, err = command.call(capsys, *arguments, "--model", folder)
        assert code == 2 and "must hold token ids from 0 to" in err and "got 1000000; encode it with" in err
        assert err.count("\n") == 1


def test_help_is_complete(capsys):
    code, out, _ = call(capsys, "--help")
    assert code == 0
    for action in build_parser()._actions:
        assert action.help
        assert all(name in out for name in action.option_strings)
    assert "continuous batching" in out and "fields of the output" in out
    assert r"--stop $'\n\n'" in out  # without the dollar sign a shell passes four characters


def test_options_of_lines_obey_the_rules_of_the_flags():
    assert parse_line('{"prompt": "Hi", "top_k": 3, "min_new_tokens": 2}', 1, {"top_k": 5})[3:] == (2, None, {"top_k": 3})
    for field, value, rule in (
        ("top_k", 0.5, "a whole number of at least 0"),
        ("top_p", 7, "a number from 0 to 1"),
        ("min_p", -1, "a number from 0 to 1"),
        ("repetition_penalty", 0, "a number of at least"),
    ):
        with pytest.raises(ValueError, match=f"^{field} of line 3 must be {rule}.* got {value}; fix it$"):
            parse_line(json.dumps({"prompt": "Hi", field: value}), 3, {field: 1})


def test_a_file_that_is_no_text_and_a_folder_that_is_not_there(capsys, tmp_path):
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    code, _, err = call(capsys, "--file", tmp_path / "bytes")
    assert code == 2 and "--file must be text in UTF-8, got " in err and err.count("\n") == 1
    code, _, err = call(capsys, "hi", "--output", tmp_path / "no" / "such")
    assert code == 2 and "--output must lie in a folder that exists" in err and err.count("\n") == 1


def test_a_text_without_a_law_is_valid_json(capsys, folder, monkeypatch):
    """A model whose weights are NaN: the reason says so, and no number is not written as NaN."""
    load = models.load

    def broken(*arguments, **options):
        loaded = load(*arguments, **options)
        loaded.model.norm.scale[...] = loaded.model.norm.scale[...] * jnp.nan
        return loaded

    monkeypatch.setattr(models, "load", broken)
    code, out, _ = call(capsys, "ab", *FLAGS, "--model", folder)
    (answer,) = [json.loads(line, parse_constant=pytest.fail) for line in out.splitlines()]
    assert code == 0 and (answer["reason"], answer["tokens"], answer["text"], answer["log_prob"]) == ("no law", [-1], "", None)


@pytest.mark.parametrize("field", [{"seed": -1}, {"seed": "7"}, {"max_new_tokens": 2.5}, {"max_new_tokens": 0}, {"stop": [1]},
                                   {"min_new_tokens": -1}, {"min_new_tokens": True},
                                   {"stop": ""}], ids=str)
def test_a_line_with_an_odd_field(field):
    with pytest.raises(ValueError, match=f"line 3 must have .* as {next(iter(field))}, got"):
        parse_line(json.dumps({"prompt": "Hi", **field}), 3, {})


def test_one_stop_string_of_a_line_is_not_split_into_letters():
    assert parse_line('{"prompt": "Hi", "stop": "END"}', 1, {}).stop == ["END"]
