"""`gsa generate` run within a test, and what it should write."""

from __future__ import annotations

from pathlib import Path

import pytest

from gsa.infer import Sampling
from gsa.infer.text import TextEngine
from tests.cli import running

PROMPT = "Call me Ishmael."


def run(capsys: pytest.CaptureFixture, *args: str | Path) -> tuple[int, str, str]:
    return running.run(capsys, "generate", *args)


def greedy(capsys: pytest.CaptureFixture, *args: str | Path) -> str:
    """The text of a run that goes well, without the line end."""
    code, out, err = run(capsys, "--temperature", "0", *args)
    assert code == 0, err
    assert out[-1] == "\n"
    return out[:-1]


def by_engine(prompt: str, count: int) -> str:
    engine = TextEngine.load()
    return "".join(piece.text for piece in engine.stream(prompt, Sampling(max_tokens=count, temperature=0)))
