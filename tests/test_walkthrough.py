"""docs/walkthrough.md does what it says: every block is run, in one folder, in order."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.cli.running import run

PAGE = Path(__file__).parent.parent / "docs/walkthrough.md"
BLOCK = re.compile(r"^```(python|console|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
STEPS = "--steps 400"


def without_numbers(line: str) -> str:
    """A line in which times, sizes and fingerprints do not count."""
    return re.sub(r"\b[0-9a-f]{12}\b|\d[\d,.]*", "#", line)


@pytest.mark.parametrize("steps", [2, pytest.param(400, marks=pytest.mark.slow)])
def test_every_block_runs(
    steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    page = PAGE.read_text()
    assert STEPS in page
    blocks = BLOCK.findall(page.replace(STEPS, f"--steps {steps}"))
    assert len(blocks) >= 8
    names: dict[str, Any] = {}
    for kind, content in blocks:
        if kind == "python":
            exec(compile(content, PAGE.name, "exec"), names)
        elif kind == "console":
            for part in re.split(r"^\$ ", content, flags=re.MULTILINE)[1:]:
                command, *shown = part.replace("\\\n", "").splitlines()
                program, *arguments = shlex.split(command)
                assert program == "gsa"
                code, out, err = run(capsys, *arguments)
                assert code == 0, (command, err)
                printed = {without_numbers(line) for line in (out + err).splitlines()}
                for line in shown:
                    assert without_numbers(line) in printed, (command, line, printed)
    assert (tmp_path / "models/first/model.safetensors").exists()
    assert (tmp_path / "end.state").exists()
