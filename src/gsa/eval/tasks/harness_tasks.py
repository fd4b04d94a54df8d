"""Tasks of lm-evaluation-harness, as it defines them; from `--data`, only the source of their documents is another."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import lm_eval.tasks
from datasets import Dataset
from lm_eval.api.task import Task as HarnessTask
from lm_eval.tasks import TaskManager

from gsa.errors import GSAError
from gsa.eval import hub
from gsa.eval.groups import GROUPS, TASKS, Task
from gsa.eval.local_data import Row
from gsa.eval.tasks.documents import Documents

VERSION = f"lm-eval {version('lm_eval')}"
"""Of the definitions."""
SEED = 1234
"""Of the choice of examples: the harness's own default."""
EVALUATED, EXAMPLES = "evaluated", "examples"
_FOLDER = Path(lm_eval.tasks.__file__).parent


def local_tasks(task: Task, documents: Documents, shots: int, limit: int | None) -> list[HarnessTask]:
    """A task, or its subtasks, with documents from files. Of a task, more than the limit are used for examples only."""
    manager = _manager(task.folder)
    if task.parts is None:
        entries = [_entry(task.name, documents.rows if shots else documents.rows[:limit], documents.examples)]
    else:
        field = task.part_field
        names = list(dict.fromkeys(row[field] for row in documents.rows))
        entries = [
            _entry(
                task.parts + name,
                [row for row in documents.rows if row[field] == name],
                None if documents.examples is None else [row for row in documents.examples if row[field] == name],
            )
            for name in names
        ]
        if unknown := [entry["task"] for entry in entries if entry["task"] not in manager.all_tasks]:
            raise GSAError(f"{documents.origin}: {task.title} has no {field} {unknown[0].removeprefix(task.parts)!r}")
    if task.name == "bbh":  # its examples stand in the harness
        for entry in entries:
            del entry["fewshot_split"]
    return _with_shots(list(manager.load({"group": "local", "task": entries})["tasks"].values()), shots)


def local_notes(task: Task, documents: Documents, shots: int) -> list[str]:
    """What makes a task with documents from files other than the harness's own."""
    notes = []
    if shots and documents.examples is None and task.name != "bbh":
        notes.append(
            f"{task.title}: the {shots} examples are drawn from the evaluated set itself, without the document in "
            "question, since there is no other file"
        )
    if documents.file == "triviaqa_wikipedia_nocontext.validation":
        notes.append(f"{task.title}: only the questions about Wikipedia, a part of the harness's set")
    return notes


def hub_tasks(task: Task, shots: int) -> list[HarnessTask]:
    """A task, or its subtasks, with documents of the Hub; NoData if they cannot be had."""
    manager = _manager(task.folder)
    names = (
        [task.name] if task.parts is None else [name for name in manager.all_subtasks if name.startswith(task.parts)]
    )
    with hub.asked(task.hub):
        made = list(manager.load(names)["tasks"].values())
    return _with_shots(made, shots)


def other_tasks(name: str, shots: int | None) -> list[HarnessTask]:
    """What the harness has by a name that is not known here: a task, or all of a group or tag."""
    manager = _all_tasks()
    if name not in manager.all_tasks:
        close = get_close_matches(name, list(dict.fromkeys([*GROUPS, *TASKS, *manager.all_tasks])), 3)
        hint = f"; did you mean {' or '.join(close)}?" if close else ""
        raise GSAError(f"eval: there is no task {name!r}, here or in lm-evaluation-harness{hint}")
    with hub.asked("its documents"):
        made = list(manager.load([name])["tasks"].values())
    return _with_shots(made, shots)


@cache
def _all_tasks() -> TaskManager:
    """Every task of the harness, looked for once."""
    return TaskManager()


def _manager(folder: str) -> TaskManager:
    """The tasks of one folder of the harness, since to look through all of them takes many seconds."""
    return TaskManager(include_defaults=False, include_path=_FOLDER / folder)


def _entry(name: str, rows: Sequence[Row], examples: Sequence[Row] | None) -> dict[str, Any]:
    """What is other than in the harness's own definition."""
    splits = {EVALUATED: Dataset.from_list(list(rows))}
    if examples:
        splits[EXAMPLES] = Dataset.from_list(list(examples))
    return {
        "task": name,
        "custom_dataset": lambda **_: splits,
        "training_split": None,
        "validation_split": None,
        "test_split": EVALUATED,
        # Where both are the same set, the harness leaves the document itself out of its examples.
        "fewshot_split": EXAMPLES if examples else EVALUATED,
    }


def _with_shots(tasks: list[HarnessTask], shots: int | None) -> list[HarnessTask]:
    """Sets the number of examples as the harness does: a task that says 0 itself keeps it."""
    for task in tasks:
        own = task.get_config("num_fewshot")
        if own != 0:
            task.set_config(key="num_fewshot", value=shots if shots is not None else own or 0)
        task.set_fewshot_seed(seed=SEED)
    return tasks
