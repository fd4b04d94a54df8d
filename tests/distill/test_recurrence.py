"""docs/results/recurrence.py: cross-entropy by how far back the next token stood last."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from gsa.convert import Choices
from gsa.convert.by_position import compare
from gsa.convert.load import load_teacher
from gsa.data.shards import Tokens
from gsa.distill.prepare import spread_rows
from gsa.errors import GSAError
from gsa.models.checkpoint import read_model
from tests.convert.families import made
from tests.distill.small import material
from tests.scripts import DOCS, script

NEAR, FAR, LENGTH = 6, 18, 80
"""Windows of 4 and 16 tokens, with two sinks."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    material(tmp_path, window=4)
    made(tmp_path / "source", tmp_path / "wide", Choices(to="hybrid", window=16, sinks=2, slots=4))
    return tmp_path


def options(folder: Path) -> list[str]:
    return [
        *(str(folder / "out.json"), "--teacher", str(folder / "source"), "--tokens", f"bytes={folder / 'train'}"),
        *("--near", str(NEAR), "--far", str(FAR), "--rows", "3", "--length", str(LENGTH)),
        *(f"small={folder / 'student'}", f"wide={folder / 'wide'}"),
    ]


def test_kinds_of_tokens_sum_to_all_of_them(folder: Path) -> None:
    page = script(DOCS / "results/recurrence.py")
    page.main([*options(folder), "--pair", "small", "wide"])
    record = json.loads((folder / "out.json").read_text())
    losses, ahead = page.tables(record)
    assert [row[0] for row in losses.rows] == ["1 to 6 back", "7 to 18 back", "more than 18 back", "not yet"]
    assert sum(row[1] for row in losses.rows) == pytest.approx(1)

    rows = spread_rows(Tokens.open(folder / "train"), LENGTH, 3)
    teacher = load_teacher(str(folder / "source"))
    small, wide = (compare(read_model(folder / name), teacher, rows) for name in ("student", "wide"))
    for column, figures in ((2, small.teacher_ce), (3, small.student_ce), (4, wide.student_ce)):
        mean = sum(row[1] * row[column] for row in losses.rows)
        assert mean == pytest.approx(float(figures[:, FAR:].mean()), abs=1e-4)
    *by_kind, whole = ahead.rows
    assert whole[1] == pytest.approx(float((wide.student_ce - small.student_ce)[:, FAR:].mean()), abs=1e-4)
    assert sum(row[4] for row in by_kind) == pytest.approx(whole[4])
    assert whole[2] <= whole[1] <= whole[3]


def test_tokens_back_are_those_of_the_last_time() -> None:
    page = script(DOCS / "results/recurrence.py")
    row = torch.randint(9, (60,), generator=torch.Generator().manual_seed(0))
    found = page.tokens_back(row).tolist()
    for place, back in enumerate(found, 1):
        before = [place - i for i in range(place) if row[i] == row[place]]
        assert back == (min(before) if before else page.NEVER)


def test_what_does_not_fit_is_refused(folder: Path) -> None:
    page = script(DOCS / "results/recurrence.py")
    with pytest.raises(GSAError, match="nobody is none of the students small, wide"):
        page.main([*options(folder), "--pair", "small", "nobody"])
    with pytest.raises(GSAError, match="expected near < far < length - 1, got 6, 6 and 80"):
        page.main([*options(folder), "--far", "6"])
    assert not (folder / "out.json").exists()
