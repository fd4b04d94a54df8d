"""The command line in this process: exit code, output and errors."""

from pathlib import Path

import pytest

from gsa.cli import main


def run(capsys: pytest.CaptureFixture, *args: str | Path) -> tuple[int, str, str]:
    code = 0
    try:
        main([str(arg) for arg in args])
    except SystemExit as exit_:
        code = int(exit_.code or 0)
    return (code, *capsys.readouterr())
