"""docs/results.md has the tables of the records that it names, and every record is named."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import ModuleType

import pytest

from gsa.paper.mqar import SETTINGS
from tests.scripts import DOCS
from tests.scripts import script as loaded

PAGE = DOCS / "results.md"
NUMBER = re.compile(r"(?<![\w.,-])-?\d(?:[\d,]*\d)?(?:\.\d+)?(?![\w-])")


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return loaded(DOCS / "results/experiments.py")


def test_the_page_is_in_step_with_the_records(script: ModuleType) -> None:
    page = PAGE.read_text()
    assert script.updated(page) == page, "`make results` was not run"


def test_every_record_is_shown() -> None:
    named = set(re.findall(r"<!-- from (\S+) -->", PAGE.read_text()))
    files = [*DOCS.glob("results/paper/*/*.json"), *DOCS.glob("results/distill/*.json")]
    assert named == {str(file.relative_to(DOCS)) for file in files}


def numbers(text: str) -> list[str]:
    return [found.replace(",", "") for found in NUMBER.findall(text)]


def untold(prose: str, told: list[float]) -> list[str]:
    """The numbers of a text that are none of those told, rounded as they are."""
    return [
        number
        for number in numbers(prose)
        if not any(
            abs(abs(value) - abs(float(number))) <= 0.51 * 10.0 ** -len(number.partition(".")[2]) for value in told
        )
    ]


def values(record: object) -> list[float]:
    """All numbers in a record, shares also in percent."""
    if isinstance(record, dict):
        return [value for part in record.values() for value in values(part)]
    if isinstance(record, list):
        return [value for part in record for value in values(part)]
    if isinstance(record, bool) or not isinstance(record, int | float):
        return []
    return [record, 100 * record] if abs(record) <= 1 else [record]


def test_every_number_of_the_prose_stands_in_a_record(script: ModuleType) -> None:
    section = PAGE.read_text().partition("\n## The paper's experiments\n")[2].partition("\n## ")[0]
    records = [DOCS / found for found in re.findall(r"<!-- from (\S+) -->", section)]
    told = [float(number) for path in records for number in numbers(script.section(path))]
    told += [value for path in records for value in values(json.loads(path.read_text())["settings"])]
    prose = re.sub(r"`[^`]*`|\]\([^)]*\)|<!--.*?-->", "", script.MARKED.sub("", section))
    assert len(numbers(prose)) > 10
    assert untold(prose, told) == []
    assert untold(prose + " and 12345.678, to the digit", told) == ["12345.678"]


def test_a_mark_is_replaced_by_tables_and_the_rest_stays(script: ModuleType, tmp_path: Path) -> None:
    base = {"pairs": 4, "length": 16}
    settings = {"setting": "scaled", "base": base, "widths": [8], "further": [], "seeds": 2, "rates": [0.01]}
    assert set(settings) <= {"setting", *vars(SETTINGS["scaled"])}
    row = {"label": "GSA", "system": "gsa", "width": 8, "heads": 1, "slots": 4, "convolution": True, "variant": False}
    rows = [{**row, "state": 64, "lr": 0.01, "seconds": 3.0, "accuracy": 0.75, "accuracies": [0.7, 0.8]}]
    record = {
        "experiment": "mqar",
        "command": "gsa paper mqar",
        "date": "2026-01-01",
        "settings": settings,
        "rows": rows,
    }
    (tmp_path / "mqar.json").write_text(json.dumps(record))
    page = script.updated("before\n<!-- from mqar.json -->\nold\n<!-- to here -->\nafter\n", tmp_path)
    assert page.startswith("before\n<!-- from mqar.json -->\n\n`gsa paper mqar`, 2026-01-01:\n")
    assert "| GSA | 1 | 4 | 64 | 75.0 | 70.0 | 80.0 | 0.01 | 3 |" in page
    assert "old" not in page
    assert page.endswith("<!-- to here -->\nafter\n")
