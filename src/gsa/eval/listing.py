"""`gsa eval --list`: groups and tasks, and where the documents of each come from."""

from __future__ import annotations

from typing import Any

from gsa.eval.groups import GROUPS, TASKS, Task
from gsa.eval.local_data import DataFolder, expected_file
from gsa.table import Column, Table


def listing(folder: str | None) -> tuple[dict[str, Any], list[Table]]:
    """All of it as JSON has it, and a table for each group. The Hub is not asked."""
    data = DataFolder(folder)
    facts = {name: _facts(task, data) for name, task in TASKS.items()}
    columns = [
        Column("task", "task", left=True),
        Column("shots", "shots"),
        Column("documents", _documents, left=True),
    ]
    tables = [
        Table(f"{name}: {group.title}", columns, [facts[task] for task in group.tasks])
        for name, group in GROUPS.items()
    ]
    told = "Documents are files of --data where they are there, and else datasets of the Hugging Face Hub."
    others = "Any other name is looked for in lm-evaluation-harness; `lm-eval ls tasks` shows its tasks."
    tables[-1] = Table(tables[-1].title, columns, tables[-1].rows, [told, others])
    return {"groups": {name: group.tasks for name, group in GROUPS.items()}, "tasks": facts}, tables


def _facts(task: Task, data: DataFolder) -> dict[str, Any]:
    here = next((path.name for name in task.files if (path := data.find(name)) is not None), None)
    return {
        "task": task.name,
        "title": task.title,
        "shots": task.shots,
        "metric": task.main,
        "max_length": task.max_length,
        "here": here,
        "hub": task.hub or None,
        "file": " or ".join(expected_file(name) for name in task.files),
    }


def _documents(row: dict[str, Any]) -> str:
    return row["here"] or (f"Hub: {row['hub']}" if row["hub"] else f"missing: {row['file']}")
