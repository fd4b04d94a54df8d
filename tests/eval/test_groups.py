"""The paper's groups and numbers."""

import pytest

from gsa.errors import GSAError
from gsa.eval.groups import GROUPS, TASKS, expanded
from gsa.eval.local_data import FILES


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
