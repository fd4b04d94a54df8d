"""Cells of a grid: computed once, in other processes, and never lost."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from gsa.errors import GSAError
from gsa.paper.cells import Cell, run_cells


def square(settings: dict[str, Any]) -> dict[str, Any]:
    if settings["x"] == "die":
        os._exit(9)
    return {"square": settings["x"] ** 2, "process": os.getpid()}


def run(folder: Path, *xs: Any, processes: int = 1) -> tuple[list[dict[str, Any]], list[str]]:
    said: list[str] = []
    cells = [Cell(f"x {x}", {"x": x}) for x in xs]
    found = run_cells(
        cells, square, folder, processes=processes, say=said.append, told=lambda result: f"{result['square']}"
    )
    return found, said


def test_results_come_in_order_and_are_computed_once(tmp_path: Path) -> None:
    found, said = run(tmp_path, 3, 1, 3)
    assert [result["square"] for result in found] == [9, 1, 9]
    assert found[0]["settings"] == {"x": 3}
    assert found[0]["process"] != os.getpid()
    assert len(said) == 2
    assert said[0].startswith("[1/2] x 3: 9, ")
    assert "left" in said[0]
    more, said = run(tmp_path, 1, 2, 3)
    assert [result["square"] for result in more] == [1, 4, 9]
    assert said[0] == "2 of 3 are there already"
    assert len(said) == 2
    assert more[0] == found[1]


def test_a_damaged_result_is_computed_again(tmp_path: Path) -> None:
    for x, damage in ((5, "{"), (6, '{"square": 1}'), (7, '{"square": 1, "settings": {"x": 9}, "seconds": 1}')):
        (tmp_path / Cell("", {"x": x}).file).write_text(damage)
    assert [result["square"] for result in run(tmp_path, 5, 6, 7)[0]] == [25, 36, 49]


def test_a_process_that_dies_is_said_and_the_others_results_stay(tmp_path: Path) -> None:
    with pytest.raises(GSAError, match=r"x die or one beside it was killed.*goes on with what is missing"):
        run(tmp_path, 2, "die")
    assert [json.loads(file.read_text())["square"] for file in tmp_path.glob("*.json")] == [4]


def test_a_folder_is_of_one_command_at_a_time(tmp_path: Path) -> None:
    from gsa.locks import locked

    with locked(tmp_path, "test"), pytest.raises(GSAError):
        run(tmp_path, 1)
