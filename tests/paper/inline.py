"""Cells computed here and now: starting processes takes longer than what these tests compute."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gsa.paper.cells import Cell


class Inline:
    """In the place of `run_cells`; remembers results, and counts what was computed."""

    def __init__(self) -> None:
        self.results: dict[str, dict[str, Any]] = {}

    def __call__(
        self,
        cells: Sequence[Cell],
        compute: Callable[[dict[str, Any]], dict[str, Any]],
        folder: Path,
        *,
        processes: int,
        say: Callable[[str], None],
        told: Callable[[dict[str, Any]], str],
    ) -> list[dict[str, Any]]:
        for cell in cells:
            if cell.file not in self.results:
                result = {**compute(cell.settings), "settings": cell.settings, "seconds": 0.5}
                self.results[cell.file] = result
                say(f"{cell.name}: {told(result)}")
        return [self.results[cell.file] for cell in cells]
