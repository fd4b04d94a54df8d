"""docs/results/distill_runs.py: what is there is not made again."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.running import run
from tests.scripts import DOCS, script

KINDS = ("convert", "distill")


def test_what_is_missing_is_made_in_order_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = script(DOCS / "results/distill_runs.py")
    called: list[list[str]] = []
    monkeypatch.setattr(page.subprocess, "run", lambda command, **options: called.append(list(map(str, command))))
    args = [str(tmp_path), "--data", "data", "--source", "model.gguf", "--processes", "1"]
    page.main([*args, "gsa32:0", "window128:1", "gsa32:1"])
    words = [" ".join(command) for command in called]
    assert [next(word for word in found.split() if word in KINDS or word.endswith(".py")) for found in words] == [
        "convert",
        str(DOCS / "results/distill_corpus.py"),
        "convert",
        str(DOCS / "results/window_student.py"),
        "distill",
        "distill",
        "distill",
        str(DOCS / "results/distilled.py"),
    ]
    assert "--slots 32" in words[2]
    assert "--window 128" in words[3]
    assert [(Path(command[4]).name, command[command.index("--seed") + 1]) for command in called[4:7]] == [
        ("gsa32", "0"),
        ("window128", "1"),
        ("gsa32", "1"),
    ]
    for place in ("teacher", "heldout-squad", "students/gsa32", "students/window128", "runs/gsa32-0/model"):
        (tmp_path / place).mkdir(parents=True)
    called.clear()
    page.main([*args, "gsa32:0", "window128:1"])
    assert [found for command in called for found in command if found in KINDS] == ["distill"]
    assert f"gsa32-0={tmp_path / 'runs/gsa32-0/model'}" in called[-1]


def test_its_options_are_those_of_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    page = script(DOCS / "results/distill_runs.py")
    runs = page.Runs(tmp_path, Path("data"), Path("model.gguf"))
    for command in (runs.distil(page.Run("gsa", 0))[0], runs.student("gsa32")[0]):
        told = run(capsys, command[3], "--help")[1]
        assert all(option in told for option in command if option.startswith("--"))


def test_a_run_that_nobody_knows_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    page = script(DOCS / "results/distill_runs.py")
    with pytest.raises(SystemExit):
        page.main([str(tmp_path), "--data", "data", "--source", "model.gguf", "mamba:0"])
    assert "got 'mamba:0'; it is gsa, gsa32" in capsys.readouterr().err
