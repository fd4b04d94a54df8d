"""Where prompts come from, and what a terminal shows of them."""

from __future__ import annotations

import io
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gsa.infer import State
from gsa.infer.text import TextEngine
from tests.cli import running
from tests.cli.generating import by_engine, run

LATIN = "naïve\ncafé ".encode("latin-1")
REPLACED = "na\ufffdve\ncaf\ufffd "


def piped(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content)))


def test_a_prompt_may_come_through_a_pipe(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    piped(monkeypatch, b"It was")
    assert run(capsys, "-n", "4", "--temperature", "0") == (0, by_engine("It was", 4) + "\n", "")
    piped(monkeypatch, b"never read")
    assert run(capsys, "It was", "-n", "4", "--temperature", "0")[1] == by_engine("It was", 4) + "\n"
    piped(monkeypatch, b"")
    assert run(capsys)[2].startswith("gsa: generate: there is no text to continue; give a prompt, --file, --state")


def test_a_prompt_may_stand_in_a_file_of_settings(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    file, again = tmp_path / "a.yaml", tmp_path / "again.yaml"
    file.write_text("prompt: It was\nmax_tokens: 4\ntemperature: 0\n")
    code, printed, _ = run(capsys, "--config", file, "--print-config")
    again.write_text(printed)
    assert code == 0
    for path in (file, again):
        assert run(capsys, "--config", path) == (0, by_engine("It was", 4) + "\n", "")
        assert run(capsys, "--config", path, "He said")[1] == by_engine("He said", 4) + "\n"


def test_a_mark_of_utf8_is_no_text(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("It was", "utf-8-sig")
    for more in ((), ("--strict",)):
        found = run(capsys, "--file", file, "-n", "4", "--temperature", "0", *more)
        assert found == (0, by_engine("It was", 4) + "\n", "")


def test_a_state_that_is_not_there(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    place = tmp_path / "nofile"
    (tmp_path / "a.txt").write_text("It was")
    said = f"gsa: state: {place}: there is no such file\n"
    assert run(capsys, "--state", place, "x") == (2, "", said)
    save = ("state", "save", "--state", place, "--file", tmp_path / "a.txt", "--out", tmp_path / "out")
    assert running.run(capsys, *save) == (2, "", said)


def test_standard_input_is_not_read_beside_a_state(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    engine = TextEngine.load()
    engine.engine.read(engine.encode("It was")).save(tmp_path / "a.state")
    piped(monkeypatch, b"never read")
    code, out, _ = run(capsys, "--state", tmp_path / "a.state", "-n", "4", "--temperature", "0")
    assert (code, out) == (0, by_engine("It was", 4) + "\n")


def test_what_is_not_utf8_is_replaced_and_told(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    latin, state = tmp_path / "latin.txt", tmp_path / "a.state"
    latin.write_bytes(LATIN)
    said = f"gsa: {latin}: replaced 2 bytes that are not UTF-8, the first at byte 2 in line 1\n"
    code, out, err = run(capsys, "--file", latin, "-n", "4", "--temperature", "0")
    assert (code, out, err) == (0, by_engine(REPLACED, 4) + "\n", said)
    code, _, err = running.run(capsys, "state", "save", "--file", latin, "--out", state)
    assert (code, err) == (0, said)
    engine = TextEngine.load()
    assert State.load(state, engine.engine.model).tokens == len(engine.encode(REPLACED))


def test_strict_refuses_it(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    latin, state = tmp_path / "latin.txt", tmp_path / "a.state"
    latin.write_bytes(LATIN)
    refused = (2, "", f"gsa: {latin} is not UTF-8 at byte 2\n")
    assert run(capsys, "--file", latin, "--strict") == refused
    assert running.run(capsys, "state", "save", "--file", latin, "--out", state, "--strict") == refused
    assert not state.exists()


@pytest.mark.parametrize(
    ("args", "environment", "shown"),
    [
        ((), {"TERM": "xterm"}, "\x1b[2mIt was\x1b[22m"),
        ((), {"TERM": "dumb"}, "It was"),
        ((), {"TERM": "xterm", "NO_COLOR": "1"}, "It was"),
        (("--echo",), {"TERM": "xterm"}, "It was"),
        (("--no-echo",), {"TERM": "xterm"}, ""),
    ],
)
def test_a_terminal_shows_the_prompt(
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    args: tuple[str, ...],
    environment: dict[str, str],
    shown: str,
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    code, out, _ = run(capsys, "It was", "-n", "4", "--temperature", "0", *args)
    assert (code, out) == (0, shown + by_engine("It was", 4) + "\n")


def test_a_terminal_shows_the_end_of_a_long_prompt(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    out = run(capsys, "a" * 600 + "b" * 600, "-n", "1")[1]
    assert out.startswith("..." + "a" * 400 + "b" * 600)


def test_on_a_real_terminal() -> None:
    """The prompt, dim, and right behind it the text."""
    here, there = pty.openpty()
    command = [sys.executable, "-m", "gsa", "generate", "It was", "-n", "3", "--temperature", "0"]
    environment = {**os.environ, "TERM": "xterm", "NO_COLOR": ""}
    done = subprocess.run(command, stdin=there, stdout=there, stderr=subprocess.PIPE, env=environment)
    os.close(there)
    shown = os.read(here, 10_000).decode()
    os.close(here)
    assert done.returncode == 0, done.stderr
    assert shown == "\x1b[2mIt was\x1b[22m" + by_engine("It was", 3).replace("\n", "\r\n") + "\r\n"


def test_ctrl_c_while_a_prompt_is_read(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    def update(self: object, tokens: int) -> None:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("gsa.reading_bar.ReadingBar.update", update)
    code, out, err = run(capsys, "the whale " * 3000)
    assert (code, out, err) == (130, "\n", "gsa: stopped\n")
