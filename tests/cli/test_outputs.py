"""Every verb ends in one line where its output is full or closed, and in silence where nobody reads it any more."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gsa.data.prepare import prepare
from gsa.infer.text import TextEngine
from tests.cli.running import run
from tests.cli.streams import ENDS, output
from tests.cli.test_messages import VERBS

CHEAP = {
    "help": (),
    "doctor": (),
    "generate": ("It was", "-n", "2"),
    "state save": ("--file", "text.txt", "--out", "other.state"),
    "state show": ("a.state",),
    "models": ("--json",),
    "tokenizer train": ("text.txt", "--vocab-size", "257", "--out", "tokenizer"),
    "data prepare": ("text.txt", "--tokenizer", "bytes", "--out", "tokens", "--json"),
    "data check": ("tokens",),
    "completion": ("tcsh",),
    "bench accuracy": (),
}
"""Verbs that run in a moment, with arguments; the others print by the same means, and their help is tried below."""


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("gsa.bench.accuracy.measure", lambda: {"none": {"outputs": 1e-7, "gradients": 1e-7}})
    monkeypatch.setattr("gsa.models.presets", lambda: ["gsa-tiny"])
    Path("text.txt").write_text("It was the best of times.\n")


@pytest.mark.parametrize("kind", ENDS)
@pytest.mark.parametrize("name", CHEAP)
def test_an_output_that_fails(capsys: pytest.CaptureFixture, name: str, kind: str) -> None:
    if name == "state show":
        engine = TextEngine.load()
        engine.engine.read(engine.encode("It was")).save("a.state")
    if name.startswith("data"):
        prepare(["text.txt"], "bytes", "tokens", processes=1, progress=False)
    with output(kind):
        code, _, err = run(capsys, *VERBS[name][0], *CHEAP[name])
    told = [line for line in err.splitlines(keepends=True) if line.startswith("gsa:")]  # others are about the work
    assert (code, told) == (ENDS[kind][0], [ENDS[kind][1]] if ENDS[kind][1] else [])
    assert "Traceback" not in err


@pytest.mark.parametrize("kind", ENDS)
def test_help_to_an_output_that_fails(capsys: pytest.CaptureFixture, kind: str) -> None:
    for name, (path, _) in VERBS.items():
        with output(kind):
            code, _, err = run(capsys, *path, "--help")
        assert (code, err) == ENDS[kind], name


@pytest.mark.parametrize(
    ("redirected", "code", "said"),
    [
        (">/dev/full", 2, "gsa: standard output cannot be written: No space left on device\n"),
        (">&-", 2, "gsa: standard output cannot be written: it is closed\n"),
    ],
)
def test_in_a_shell(redirected: str, code: int, said: str) -> None:
    for args in ("--version", "help", "bench --help"):
        command = f"{sys.executable} -m gsa {args} {redirected}"
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (code, said)


def test_a_pipe_that_ends_early() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run([sys.executable, "-m", "gsa", "help"], stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("module", ["gsa.cli", "gsa.console", "gsa.errors", "gsa.cli.verbs"])
def test_ctrl_c_while_the_command_is_imported(module: str) -> None:
    """From the first line of the command on; `gsa` itself is imported before it."""
    script = f"""
import sys

class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            raise KeyboardInterrupt

import gsa
sys.modules.pop("gsa.errors")
sys.meta_path.insert(0, Interrupting())
from gsa.__main__ import start
sys.argv = ["gsa", "--version"]
start()
"""
    if module == "gsa.cli.verbs":
        script = script.replace('"--version"', '"help"')
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "\ngsa: stopped\n")
