"""`gsa generate`, as one types it."""

from __future__ import annotations

import io
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gsa.console import Output
from gsa.infer import Sampling
from gsa.infer.compute import automatic
from gsa.infer.text import TextEngine, Writing
from gsa.models import LM
from gsa.models.checkpoint import load_model, save_model
from gsa.train.checkpoint import save_checkpoint
from tests.cli.generating import PROMPT, by_engine, greedy, run
from tests.infer.talking import write_model, write_tokenizer
from tests.models.cases import model


def test_help(capsys: pytest.CaptureFixture) -> None:
    code, out, _ = run(capsys, "--help")
    assert code == 0
    for told in (
        "Continues a text",
        "[PROMPT]",
        "-n N, --max-tokens N",
        "  --stop STOP  ",
        "may be given several times",
    ):
        assert told in out


def test_the_text_is_streamed_as_it_is_made(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    pieces: list[str] = []
    monkeypatch.setattr(Output, "write", lambda self, text: pieces.append(text))
    assert run(capsys, PROMPT, "-n", "20", "--temperature", "0") == (0, "", "")
    assert "".join(pieces) == by_engine(PROMPT, 20) + "\n"
    assert len(pieces) > 20


def test_the_prompt_is_repeated_if_asked_for(capsys: pytest.CaptureFixture) -> None:
    text = greedy(capsys, PROMPT, "-n", "10")
    assert text == by_engine(PROMPT, 10)
    assert greedy(capsys, PROMPT, "--max-tokens", "10", "--echo") == PROMPT + text
    code, out, _ = run(capsys, PROMPT, "-n", "10", "--temperature", "0", "--echo", "--json")
    assert (code, json.loads(out)["text"]) == (0, PROMPT + text)


def test_files_come_before_the_prompt(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_bytes(b"Call me\r\nna\xc3\xafve ")
    expected = by_engine("Call me\r\nnaïve Ishmael.", 8)
    assert greedy(capsys, "Ishmael.", "--file", tmp_path / "a.txt", "-n", "8") == expected
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"Call me\r\nna\xc3\xafve Ishmael.")))
    assert greedy(capsys, "--file", "-", "-n", "8") == expected


def test_json_tells_all(capsys: pytest.CaptureFixture) -> None:
    code, out, err = run(capsys, PROMPT, "-n", "5", "--json", "--logprobs", "2", "--weights", "int8")
    found = json.loads(out)
    assert (code, err) == (0, "")
    assert list(found) == ["text", "tokens", "reason", "logprobs", "top", "seed", "stats"]
    assert (len(found["tokens"]), len(found["logprobs"]), len(found["top"][0])) == (5, 5, 2)
    assert (found["reason"], type(found["seed"])) == ("length", int)
    stats = found["stats"]
    assert (stats["tokens"], stats["weights"], stats["state_bytes"]) == (5, "int8", 262144)
    assert stats["prompt_tokens"] == len(TextEngine.load().encode(PROMPT))
    assert min(stats["prompt_tokens_per_second"], stats["tokens_per_second"], stats["weight_bytes"]) > 0
    assert "logprobs" not in json.loads(run(capsys, PROMPT, "-n", "1", "--json")[1])
    assert stats["compute"] == automatic("int8")


def test_compute(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    code, _, err = run(capsys, PROMPT, "-n", "1", "--compute", "fp32", "--stats")
    assert (code, "bf16; prompts in fp32" in err) == (0, True)
    monkeypatch.setattr("gsa.infer.compute.missing_unit", lambda compute: f"this CPU has no unit for {compute}")
    code, out, err = run(capsys, PROMPT, "--compute", "bf16")
    assert (code, out) == (2, "")
    assert "compute bf16 was asked for, and this CPU has no unit for bf16; auto and fp32 run everywhere" in err


def test_a_seed_gives_the_same_text_again(capsys: pytest.CaptureFixture) -> None:
    args = (PROMPT, "-n", "12", "--temperature", "1.5", "--json")
    texts = []
    for _ in range(2):
        found = json.loads(run(capsys, *args)[1])
        assert found["tokens"] == json.loads(run(capsys, *args, "--seed", str(found["seed"]))[1])["tokens"]
        texts.append(found["text"])
    assert texts[0] != texts[1]
    assert json.loads(run(capsys, PROMPT, "-n", "1", "--temperature", "0", "--json")[1])["seed"] is None


def test_stats_go_to_standard_error(capsys: pytest.CaptureFixture) -> None:
    code, out, err = run(capsys, PROMPT, "-n", "5", "--seed", "7", "--stats")
    assert code == 0
    assert "gsa:" not in out
    for told in ("first token after", "tokens of prompt", "5 tokens, ", "tokens/s", "state 256.0 KB", "seed 7", "bf16"):
        assert told in err
    _, _, err = run(capsys, PROMPT, "-n", "0", "--temperature", "0", "--stats")
    assert "gsa: 0 tokens\n" in err
    assert "first token" not in err
    assert "seed" not in err


def test_a_state_that_grows_is_told_so(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", case="attention")
    code, out, err = run(capsys, PROMPT, "-n", "5", "--model", folder, "--stats", "--json")
    assert (code, json.loads(out)["stats"]["state_bytes"]) == (0, None)
    assert "state grows with the text" in err


def test_options_arrive(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    arrived: list[tuple[Sampling, list[str]]] = []
    stream = TextEngine.stream

    def watched(self: TextEngine, prompt: str, sampling: Sampling, **options: object) -> Writing:
        arrived.append((sampling, options["stop"]))
        return stream(self, prompt, sampling, **options)

    monkeypatch.setattr(TextEngine, "stream", watched)
    filters = ("--top-k", "9", "--top-p", "0.5", "--min-p", "0.1", "--repetition-penalty", "1.2")
    filters += ("--presence-penalty", "0.5", "--frequency-penalty", "-0.5")
    args = ("-n", "3", "--temperature", "0.7", *filters, "--seed", "4", "--stop", "null", "--stop", "- a: b")
    assert run(capsys, PROMPT, *args)[0] == 0
    expected = Sampling(
        max_tokens=3, temperature=0.7, top_k=9, top_p=0.5, min_p=0.1, repetition_penalty=1.2, seed=4, logprobs=None
    )
    expected = replace(expected, presence_penalty=0.5, frequency_penalty=-0.5)
    assert arrived == [(expected, ["null", "- a: b"])]


def test_threads_are_set(capsys: pytest.CaptureFixture) -> None:
    import torch

    assert run(capsys, PROMPT, "-n", "1", "--threads", "2")[0] == 0
    assert torch.get_num_threads() == 2


def test_a_stop_string_ends_the_text(capsys: pytest.CaptureFixture) -> None:
    whole = by_engine(PROMPT, 30)
    stop = whole[20:25]
    assert greedy(capsys, PROMPT, "-n", "30", "--stop", "@@", "--stop", stop) == whole[: whole.index(stop)]


@pytest.mark.parametrize(
    "prompt", ["null", "5", "{a: b}", "[1", "--", "- x", "--my_var x_y", "--a_b=c", "--print-config", "--help"]
)
def test_a_prompt_is_only_text(capsys: pytest.CaptureFixture, prompt: str) -> None:
    assert greedy(capsys, "-n", "3", "--echo", "--", prompt).startswith(prompt)


def test_a_state_goes_on_as_if_never_interrupted(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    state = tmp_path / "a.state"
    code, first, err = run(capsys, PROMPT, "-n", "8", "--temperature", "0", "--save-state", state)
    assert (code, "tokens" in err) == (0, True)
    before = state.read_bytes()
    assert first[:-1] + greedy(capsys, "--state", state, "-n", "9") == by_engine(PROMPT, 17)
    question = greedy(capsys, " What?", "--state", state, "-n", "9")
    assert question == greedy(capsys, PROMPT + first[:-1] + " What?", "-n", "9")
    assert state.read_bytes() == before


def checkpoint(run_folder: Path, step: int, lm: LM, tokenizer: Path) -> Path:
    return save_checkpoint(run_folder, step, lm.config, {"model": lm.state_dict()}, {}, tokenizer=tokenizer)


def test_a_run_is_its_newest_whole_checkpoint(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    lm = load_model(folder)
    checkpoint(tmp_path / "run", 1, lm, folder)
    for x in lm.parameters():
        x.data.mul_(-1)
    newest = checkpoint(tmp_path / "run", 2, lm, folder)
    texts = {name: greedy(capsys, PROMPT, "-n", "9", "--model", tmp_path / name) for name in ("model", "run")}
    assert texts["model"] != texts["run"] == greedy(capsys, PROMPT, "-n", "9", "--model", newest)
    (newest / "model.safetensors").write_bytes(b"")
    code, out, err = run(capsys, PROMPT, "-n", "9", "--model", tmp_path / "run", "--temperature", "0")
    assert (code, out[:-1], "the one before is looked at" in err) == (0, texts["model"], True)
    (tmp_path / "none" / "checkpoints").mkdir(parents=True)
    code, _, err = run(capsys, PROMPT, "--model", tmp_path / "none")
    assert (code, "has no whole checkpoint" in err) == (2, True)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("",), "there is no text to continue"),
        (("--file", "nowhere.txt"), "nowhere.txt cannot be read: No such file"),
        (("--file", "latin.txt", "--strict"), "latin.txt is not UTF-8 at byte 2"),
        (("a", "--model", "nowhere"), "there is no folder nowhere"),
        (("a", "--weights", "int3"), "int3"),
        (("a", "--compute", "fp8"), "fp8"),
        (("a", "--threads", "0"), "threads must be at least 1, got 0"),
        (("a", "--threads", "100000"), "threads must be at most 1024, got 100000"),
        (("a", "--model", ""), "model must be a name or a folder, got ''"),
        (("a", "--file", ""), "file must be the name of a file, or - for standard input, got ''"),
        (("a", "--temperature", "-1"), "temperature must be at least 0"),
        (("a", "-n", "many"), "many"),
        (("a", "--stop", ""), "at least one character"),
        (("a", "--logprobs", "2"), "--logprobs is told with --json only"),
        (("a", "--state", "latin.txt"), "latin.txt"),
        (("a", "--save-state", "nowhere/a.state"), "'nowhere/a.state' cannot be written"),
        (("a", "--save-state", "."), "'.' cannot be written"),
        (("a", "--save-state", os.devnull), "'/dev/null' cannot be written"),
        (("a", "--save-state", "n" * 250), "n' cannot be written: File name too long"),  # while it is unfinished
        (("a", "--save-state", "n" * 300), "n' cannot be used: File name too long"),
        (("é\udcff",), "the prompt is not UTF-8 at byte 2"),
        (("a", "--stop", "\udcff"), "a stop string is not UTF-8 at byte 0"),
    ],
)
def test_mistakes_end_with_a_sentence(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, args: tuple[str, ...], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO()))  # empty
    Path("latin.txt").write_bytes(b"na\xefve")
    code, out, err = run(capsys, *args)
    assert (code, out) == (2, "")
    assert message in err
    assert "Traceback" not in err
    assert os.listdir() == ["latin.txt"]


def test_tokens_that_the_tokenizer_does_not_know_are_told(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    """Already the first id beyond the tokenizer's, which is all that this model says."""
    write_tokenizer(tmp_path)
    lm = model("gsa", vocab_size=5000)
    with torch.no_grad():
        direction = lm.lm_head.weight[259].clone()
        lm.lm_head.weight.copy_(-direction.expand(5000, -1))
        lm.lm_head.weight[259] = direction
    save_model(lm, tmp_path)
    code, out, err = run(capsys, PROMPT, "-n", "9", "--temperature", "0", "--model", tmp_path, "--json")
    assert json.loads(out)["tokens"] == [259] * 9
    told = "gsa: 9 of 9 tokens have no text: the tokenizer knows 259 of the model's 5,000\n"
    assert (code, err) == (0, told)
