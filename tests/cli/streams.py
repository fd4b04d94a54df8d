"""Standard outputs that cannot be written."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

CANNOT = "gsa: standard output cannot be written: "
ENDS = {
    "full": (2, f"{CANNOT}No space left on device\n"),
    "closed": (2, f"{CANNOT}it is closed\n"),
    "unread": (141, ""),
}
"""The exit code of a command with each, and what it says at the end."""


@contextmanager
def output(kind: str) -> Iterator[None]:
    """While entered, standard output is a full disk, closed, or a pipe that nobody reads."""
    with pytest.MonkeyPatch.context() as patch:
        if kind == "closed":
            patch.setattr(sys, "stdout", None)  # as Python has it
            yield
            return
        with open(_unread() if kind == "unread" else "/dev/full", "w", encoding="utf-8") as stream:
            patch.setattr(sys, "stdout", stream)
            yield


def _unread() -> int:
    reading, writing = os.pipe()
    os.close(reading)
    return writing
