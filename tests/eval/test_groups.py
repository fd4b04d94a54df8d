"""The paper's groups and numbers."""

from pathlib import Path

import pytest

from gsa.errors import GSAError
from gsa.eval.groups import GROUPS, TASKS, expanded
from gsa.eval.local_data import FILES
from gsa.eval.paper_tables import Entry, tables
from gsa.eval.tasks_picture import save_picture
from tests.eval.results import result


def test_groups_expand_in_order_and_no_task_comes_twice() -> None:
    found = expanded("piqa, paper-commonsense,paper-t2r")
    assert list(found)[:3] == ["piqa", "lambada_openai", "wikitext"]
    assert len(found) == len(set(found)) == 7 + 4
    assert found["piqa"] is None
    assert found["arc_easy"] is GROUPS["paper-commonsense"]
    assert found["mmlu"] is GROUPS["paper-t2r"]


@pytest.mark.parametrize(
    ("names", "said"), [("paper-recal", "did you mean paper-recall?"), ("piqa,,mmlu", "with commas")]
)
def test_lists_that_mean_nothing_are_refused(names: str, said: str) -> None:
    with pytest.raises(GSAError, match=said.replace("?", r"\?")):
        expanded(names)


def test_every_row_of_the_paper_has_a_value_for_every_column_and_its_average() -> None:
    for group in GROUPS.values():
        columns = [column for column in group.columns if column.of_paper]
        for row in group.rows:
            assert len(row.values) == len(columns) + group.has_average, (group.name, row)
            counted = [value for column, value in zip(columns, row.values, strict=False) if column.averaged]
            if group.has_average and None not in row.values:
                average = sum(value for value in counted if value is not None) / len(counted)
                assert row.values[-1] == pytest.approx(average, abs=0.06), (group.name, row)


def test_every_column_is_a_metric_of_a_known_task_and_every_file_is_of_the_layout() -> None:
    for group in GROUPS.values():
        assert all(column.task in TASKS for column in group.columns)
    for task in TASKS.values():
        assert all(name in FILES for name in (*task.files, *([task.examples] if task.examples else [])))


LONG_NAME = "folder/SmolLM2-135M-Instruct.Q4_1.gguf"


def test_tables_fit_into_80_characters_and_names_are_told_whole() -> None:
    entries = [Entry(None, result(LONG_NAME, name, [1, 0], notes=[])) for name in ("piqa", "arc_easy")]
    for name in ("paper-commonsense", "paper-t2r"):
        (table,) = tables([name], entries, [], 80)
        assert table.width() <= 80
        assert table.rows[0]["model"].endswith("…")
        assert any(note.endswith("… is SmolLM2-135M-Instruct.Q4_1.gguf.") for note in table.notes)
        (whole,) = tables([name], entries, [])
        assert whole.rows[0]["model"] == "SmolLM2-135M-Instruct.Q4_1.gguf"
    entries = [Entry(length, entry.result) for entry in entries for length in (2048, 4096)]
    (table,) = tables(["paper-t2r"], entries, [], 96)
    assert [row["model"] for row in table.rows[:4:2]] == ["SmolLM2-13…, 2,048 tokens", "SmolLM2-13…, 4,096 tokens"]


def test_pictures_have_panels_for_groups_and_other_tasks(tmp_path: Path) -> None:
    entries = [Entry(None, result("a", "piqa", [1, 0])), Entry(2048, result("a", "boolq", [1, 0]))]
    assert save_picture(["paper-t2r"], entries, tmp_path / "bars.png")
    assert (tmp_path / "bars.png").read_bytes().startswith(b"\x89PNG")
    lower = result("a", "wiki", [1, 0])
    lower["metrics"]["acc"]["higher_is_better"] = False
    assert not save_picture([], [Entry(None, lower)], tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()
