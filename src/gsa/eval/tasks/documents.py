"""The documents of a task: from `--data`, or else from the Hub."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from gsa.eval.groups import Task
from gsa.eval.hub import NoData, dataset_rows, zipped_rows
from gsa.eval.local_data import DataFolder, Row, expected_file


@dataclass(frozen=True)
class Documents:
    """Rows, checked, and where they came from."""

    rows: list[Row]
    examples: list[Row] | None
    """For few-shot prompts; None if there are no others than the rows themselves."""
    file: str
    """Which file of the layout they are, or are like."""
    origin: str
    """The file, or the dataset of the Hub."""
    digest: str
    """Tells other documents apart; of the Hub, the name of the dataset."""


def from_folder(task: Task, data: DataFolder) -> Documents | None:
    """What `--data` has for a task."""
    for file in task.files:
        if (path := data.find(file)) is not None:
            names = [file]
            if task.examples is not None and data.find(task.examples) is not None:
                names.append(task.examples)
            digest = hashlib.sha256("".join(map(data.digest, names)).encode()).hexdigest()
            examples = data.rows(names[1]) if len(names) > 1 else None
            return Documents(data.rows(file), examples, file, path.name, digest)
    return None


def from_hub(task: Task, shots: int) -> Documents:
    """What the Hub has for a task of ours; NoData if it cannot be had."""
    if not task.hub:
        raise NoData("datasets none has it in this form")
    if task.examples is None:
        return Documents(dataset_rows(task.hub, task.files[0]), None, task.files[0], task.hub, task.hub)
    archive = task.files[0].removeprefix("scrolls_").removesuffix(".validation")
    rows = zipped_rows(task.hub, archive, "validation", task.files[0])
    examples = zipped_rows(task.hub, archive, "train", task.examples) if shots else None
    origin = f"{task.hub}, {archive}.zip"
    return Documents(rows, examples, task.files[0], origin, origin)


def gap(task: Task) -> str:
    """What would have to be in `--data` for a task to run."""
    return " or ".join(expected_file(name) for name in task.files)
