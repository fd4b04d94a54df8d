"""docs/results.md has the tables of the result files in docs/results/, and no others."""

import json
from pathlib import Path
from types import ModuleType

import pytest

from tests.eval.results import result, saved, text_result
from tests.scripts import DOCS
from tests.scripts import script as loaded


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return loaded(DOCS / "results/evaluations.py")


def test_the_page_is_in_step_with_the_files(script: ModuleType) -> None:
    page = (DOCS / "results.md").read_text()
    assert script.updated(page, script.gathered()) == page, "`make results` was not run"


def test_tables_of_several_models(script: ModuleType, tmp_path: Path) -> None:
    one = [result("a", "piqa", [1, 0, 1, 0]), text_result("a", [2.0, 4.0], [3, 5])]
    other = [
        result("org/b.gguf", "piqa", [1, 1, 1, 0]),
        result("org/b.gguf", "arc_easy", [0, 1], limit=2),
        result("org/b.gguf", "long_qasper_yesno", [0, 1], settings={"max_length": 4096}),
    ]
    for number, results in enumerate((one, other)):
        path = script.gather(saved(tmp_path / str(number), *(each | {"notes": []} for each in results)), tmp_path)
        lines = json.loads(path.read_text())["results"]
        assert [line["samples"] for line in lines] == [{}] * len(results)
        assert path.read_text().count("\n") == len(results) + 2  # changes of one result are changes of one line
    runs = script.gathered(tmp_path)
    assert list(runs) == ["a", "b", "b, 2 documents each"]
    page = script.updated(f"before\n{script.BEGIN}\nold\n{script.END}\nafter\n", runs)
    assert page.startswith(f"before\n{script.BEGIN}\n\n**paper-commonsense")
    assert "old" not in page
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    commonsense = rows[: next(i for i, row in enumerate(rows) if i and row.startswith("| model"))]
    assert [row.split(" | ")[0] for row in commonsense[2:9]] == [
        "| a",
        "| ±",
        "| b",
        "| ±",
        "| b, 2 documents each",
        "| ±",
        "| Xfmr++",
    ]
    assert "| 50.0 |" in commonsense[2]
    assert "| 75.0 |" in commonsense[4]
    assert any(row.startswith("| b, 4,096 tokens |") for row in rows)  # not the length of the paper
    assert rows[-1].startswith("| TEXT | text.jsonl | bits_per_byte ↓ | 1.0820 |")
    with pytest.raises(ValueError, match="must have the marks"):
        script.updated("nothing", runs)
