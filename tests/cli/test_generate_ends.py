"""`gsa generate` with terminals, pipes and full disks, and when it is told to end: nothing is lost."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gsa.console import Output, shown
from gsa.errors import GSAError
from gsa.infer import State
from gsa.infer.text import TextEngine
from tests.cli.generating import PROMPT, by_engine, run
from tests.cli.streams import ENDS, output


@pytest.mark.parametrize("kind", ENDS)
@pytest.mark.parametrize("json_", [(), ("--json",)])
def test_an_output_that_fails_loses_no_state(
    capsys: pytest.CaptureFixture, tmp_path: Path, kind: str, json_: tuple[str, ...]
) -> None:
    state = tmp_path / "a.state"
    with output(kind):
        code, _, err = run(capsys, PROMPT, "-n", "3", "--save-state", state, *json_)
    saved = State.load(state, TextEngine.load().engine.model)
    assert (code, err) == (ENDS[kind][0], f"gsa: {state}: the state after {saved.tokens} tokens\n{ENDS[kind][1]}")


def test_streams_may_be_closed(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """As they are None then, for Python."""
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdin", None)
        assert run(capsys, "--file", "-") == (2, "", "gsa: standard input cannot be read: it is closed\n")
    monkeypatch.setattr(sys, "stderr", None)
    assert run(capsys, PROMPT, "-n", "3", "--temperature", "0", "--stats") == (0, by_engine(PROMPT, 3) + "\n", "")
    assert run(capsys, "the whale " * 5000, "-n", "0", "--temperature", "0") == (0, "\n", "")
    assert run(capsys, "--file", "nowhere") == (2, "", "")


@pytest.mark.parametrize("json_", [(), ("--json",)])
def test_a_state_that_cannot_be_saved_loses_no_text(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, json_: tuple[str, ...]
) -> None:
    def fail(self: State, path: str) -> None:
        raise GSAError("the disk is full")

    monkeypatch.setattr(State, "save", fail)
    args = (PROMPT, "-n", "3", "--temperature", "0", "--stats", "--save-state", tmp_path / "a.state")
    code, out, err = run(capsys, *args, *json_)
    assert (json.loads(out)["text"] + "\n" if json_ else out) == by_engine(PROMPT, 3) + "\n"
    assert (code, "gsa: 3 tokens" in err) == (2, True)
    assert err.endswith("gsa: the disk is full\n")


def test_ctrl_c_while_the_state_is_saved_loses_nothing(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    save, state = State.save, tmp_path / "a.state"

    def interrupted(self: State, path: str) -> None:
        signal.raise_signal(signal.SIGINT)
        save(self, path)

    monkeypatch.setattr(State, "save", interrupted)
    code, out, _ = run(capsys, PROMPT, "-n", "3", "--temperature", "0", "--save-state", state)
    assert (code, out) == (130, by_engine(PROMPT, 3) + "\n")
    State.load(state, TextEngine.load().engine.model)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("é\n\t😀 a", "é\n\t😀 a"),
        ("\x1b[31m\r\x07\x9b1m\x7f", "\\x1b[31m\\r\\x07\\x9b1m\\x7f"),
        ("\u202eb\u2066", "\\u202eb\\u2066"),
        ("a\r\nb\rc", "a\r\nb\\rc"),
    ],
)
def test_a_terminal_gets_text_only(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, text: str, expected: str
) -> None:
    assert shown(text) == expected
    Output().write(text)
    assert capsys.readouterr().out == text
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    Output().write(text)
    assert capsys.readouterr().out == expected


def test_a_line_end_may_come_in_two_pieces(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    output = Output()
    for piece in ("a\r", "\nb\r", "c\r", "\r", "\n"):
        output.write(piece)
    assert capsys.readouterr().out == "a\r\nb\\rc\\r\r\n"


def test_what_the_output_cannot_encode_is_spelt(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(raw, encoding="ascii"))
    Output().write("naïve")
    assert raw.getvalue() == b"na\\xefve"


def test_a_long_prompt_shows_how_far_it_is_read(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("gsa.reading_bar.WORTH_SHOWING", 600)
    code, _, err = run(capsys, "the whale " * 600, "-n", "2")
    assert code == 0
    assert "tokens/s" in err
    assert run(capsys, "the whale", "-n", "2")[2] == ""  # not worth a bar


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_text_and_keeps_what_there_is(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: int
) -> None:
    write, written = Output.write, []

    def interrupted(self: Output, text: str) -> None:
        write(self, text)
        written.append(text)
        if len(written) == 5:
            signal.raise_signal(number)

    monkeypatch.setattr(Output, "write", interrupted)
    state = tmp_path / "a.state"
    code, out, err = run(capsys, PROMPT, "-n", "5000", "--temperature", "0", "--save-state", state, "--stats")
    assert code == 128 + number
    assert out[-1] == "\n"
    assert by_engine(PROMPT, 10).startswith(out[:-1])
    assert "tokens/s" in err
    engine = TextEngine.load()
    kept = State.load(state, engine.engine.model)
    assert len(engine.encode(PROMPT)) < kept.tokens < len(engine.encode(PROMPT)) + 10


def test_a_prompt_that_was_not_read_leaves_no_state(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    signals = [signal.SIGINT]
    monkeypatch.setattr(Output, "write", lambda self, text: signals and signal.raise_signal(signals.pop()))
    code, _, err = run(capsys, "the whale " * 3000, "--save-state", tmp_path / "a.state")
    assert (code, os.listdir(tmp_path)) == (130, [])
    assert "the prompt was not read to its end; no state is saved" in err


def started(*args: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "gsa", "generate", PROMPT, "-n", "100000", "--threads", "1", *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def test_ctrl_c_ends_cleanly() -> None:
    process = started("--stats")
    first = process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert (first + out).endswith(b"\n")
    assert b"Traceback" not in err
    assert b"seed" in err


def test_a_closed_pipe_ends_it_in_silence() -> None:
    process = started()
    process.stdout.read(5)
    process.stdout.close()
    assert process.wait(timeout=60) == 141
    assert process.stderr.read() == b""
    process.stderr.close()
