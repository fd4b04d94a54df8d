"""The demo shows what it says, and needs a folder to write to."""

import os
from pathlib import Path

import pytest

from gsa.bench.timing import race
from gsa.cli import demo
from gsa.ops.native import library

from .running import run

needs_native = pytest.mark.skipif(library.unavailable(None) is not None, reason="the native engine cannot run here")


@needs_native
def test_demo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(demo, "POSITIONS", (8, 64))
    monkeypatch.setattr(demo, "WRITTEN", 5)
    monkeypatch.setattr("gsa.pretrained.book", lambda: "It was a dark and stormy night. " * 50)
    monkeypatch.setattr("gsa.bench.timing.TURN", 0.0001)
    monkeypatch.setattr("gsa.bench.timing.race", lambda contenders, seconds, rounds: race(contenders, 0.0, 1))
    demo.demo(str(tmp_path / "new"))
    shown = capsys.readouterr().out
    assert demo.PROMPT in shown
    assert "262,144" in shown  # bytes of the state, at every position
    assert {path.name for path in (tmp_path / "new").iterdir()} == {
        "sense-and-sensibility.state",
        "time_per_token.png",
        "memory.png",
    }


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
