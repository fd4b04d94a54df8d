"""docs/results/distilled.py: students measured one by one are those measured together."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gsa.convert.audit import ahead, shares
from gsa.convert.by_position import Reading, compare_all
from gsa.convert.load import load_teacher
from gsa.data.shards import Tokens
from gsa.distill.prepare import spread_rows
from gsa.errors import GSAError
from gsa.models.checkpoint import read_model
from tests.convert.families import Choices, made
from tests.distill.small import material
from tests.scripts import DOCS, script

NEAR = 6
"""A window of four tokens and two sinks."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    material(tmp_path, window=4)
    made(tmp_path / "source", tmp_path / "wide", Choices(to="hybrid", window=16, sinks=2, slots=4))
    return tmp_path


def options(folder: Path) -> list[str]:
    fixed = ["--teacher", str(folder / "source"), "--tokens", f"bytes={folder / 'train'}", "--near", str(NEAR)]
    return [str(folder / "out.json"), *fixed, "--rows", "3", "--length", "80"]


def test_students_are_added_and_figures_are_those_of_all_tokens(folder: Path, capsys: pytest.CaptureFixture) -> None:
    page = script(DOCS / "results/distilled.py")
    page.main([*options(folder), f"small={folder / 'student'}"])
    page.main([*options(folder), f"wide={folder / 'wide'}", f"small={folder / 'nowhere'}", "--window", "small"])
    page.main([*options(folder), "--pair", "wide", "small"])
    record = json.loads((folder / "out.json").read_text())
    assert (list(record["students"]), record["window"], record["pairs"]) == (
        ["small", "wide"],
        "small",
        [["wide", "small"]],
    )
    by_position, recovered, pairs = page.tables(record)
    assert [row[0] for row in by_position.rows] == ["teacher", "small", "wide"]

    models = {name: read_model(folder / place) for name, place in (("small", "student"), ("wide", "wide"))}
    rows = spread_rows(Tokens.open(folder / "train"), 80, 3)
    readings = {name: Reading.of(model) for name, model in models.items()}
    found = compare_all(readings, Reading.of(load_teacher(str(folder / "source"))), rows)
    for row in by_position.rows[1:]:
        assert row[2:-2] == pytest.approx([place.student_ce for place in found[row[0]].places()], abs=1e-5)
    for table, expected in ((recovered, shares(found, "small", NEAR)), (pairs, ahead(found, "wide", "small", NEAR))):
        assert [figure.positions for _, figure in table.rows] == [figure.positions for figure in expected]
        for (_, own), true in zip(table.rows, expected, strict=True):
            assert (own.value, own.low, own.high) == pytest.approx(
                (true.value, true.low, true.high), rel=1e-3, abs=1e-5
            )


def test_what_does_not_fit_is_refused(folder: Path) -> None:
    page = script(DOCS / "results/distilled.py")
    with pytest.raises(GSAError, match="nobody is no student"):
        page.main([*options(folder), f"small={folder / 'student'}", "--window", "nobody"])
    assert not (folder / "out.json").exists()
    page.main([*options(folder), f"small={folder / 'student'}"])
    with pytest.raises(GSAError, match="of other tokens or another window"):
        page.main([*options(folder), "--near", "9", f"wide={folder / 'wide'}"])
    with pytest.raises(GSAError, match="expected rows"):
        page.main([*options(folder), "--rows", "2", f"wide={folder / 'wide'}"])
    record = json.loads((folder / "out.json").read_text())
    record["tokens"]["bytes"]["teacher_ce"][0][0] += 0.1
    (folder / "out.json").write_text(json.dumps(record))
    with pytest.raises(GSAError, match="other tokens, or another teacher"):
        page.main([*options(folder), f"wide={folder / 'wide'}"])
    with pytest.raises(SystemExit):
        page.main([*options(folder), "student"])
