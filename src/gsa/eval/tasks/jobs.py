"""Jobs: what a list of tasks comes to, with documents found and checked before the model is loaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from gsa.errors import GSAError
from gsa.eval.groups import TASKS, Task, expanded
from gsa.eval.hub import NoData
from gsa.eval.local_data import DataFolder
from gsa.eval.results import result_file
from gsa.eval.tasks.documents import Documents, from_folder, from_hub, gap

if TYPE_CHECKING:
    from lm_eval.api.task import Task as HarnessTask

    from gsa.eval.reader import ReaderTokenizer

    Parts = Callable[[ReaderTokenizer, int | None, int | None], list[HarnessTask]]


@dataclass(frozen=True)
class Found:
    """A task whose documents are at hand."""

    name: str
    title: str
    main: str | None
    """The metric that stands for the task; None is the first that it has."""
    shots: int
    """Examples before each document."""
    version: str
    """Tells other definitions apart."""
    data: str
    """The file, or the dataset of the Hub."""
    digest: str
    """Tells other documents apart."""
    notes: list[str]
    """What makes it other than the original."""
    parts: Parts
    """For a tokenizer, a length and a limit of documents: the task as the harness runs it, or its subtasks."""
    cuts: bool = False
    """Whether it cuts its documents to the length itself, so that the reader need not."""


@dataclass(frozen=True)
class Job:
    """A task to be run, at one length."""

    found: Found
    group: str | None
    max_length: int | None
    """Tokens that inputs are cut to; None leaves it to the model."""
    asked_length: int | None
    """What was asked for; None, where it is the task's own."""

    def file_name(self, limit: int | None) -> str:
        """Where its result goes."""
        usual = TASKS.get(self.found.name)
        unusual: dict[str, int | None] = {}
        if self.max_length != (None if usual is None else usual.max_length):
            unusual["length"] = self.max_length
        if usual is not None and self.found.shots != usual.shots:
            unusual["shots"] = self.found.shots
        if limit is not None:
            unusual["limit"] = limit
        return result_file(self.found.name, unusual)


@dataclass(frozen=True)
class Missing:
    """A task that cannot be run for want of documents."""

    task: str
    title: str
    reason: str
    file: str
    """What would fill the gap in `--data`; empty if no file would."""

    def __str__(self) -> str:
        gap = f"there is no {self.file} in --data, and of the Hub's " if self.file else ""
        name = self.task if self.title == self.task else f"{self.title} ({self.task})"
        return f"{name} cannot be had: {gap}{self.reason}"


def find_jobs(
    tasks: str, data: DataFolder, shots: int | None, lengths: Sequence[int | None]
) -> tuple[list[Job], list[Missing]]:
    """What is to be run, a job for each length, where None is a task's own; and what cannot be."""
    ready: list[tuple[Found, str | None, int | None]] = []
    missing: list[Missing] = []
    for name, group in expanded(tasks).items():
        task = TASKS.get(name)
        try:
            found = _others(name, shots) if task is None else [_known(task, data, shots)]
        except NoData as error:
            title, file = (name, "") if task is None else (task.title, gap(task))
            missing.append(Missing(name, title, str(error), file))
            continue
        own = None if task is None else task.max_length
        ready += [(each, None if group is None else group.name, own) for each in found]
    jobs = [
        Job(found, group_name, own if length is None else length, length)
        for length in lengths
        for found, group_name, own in ready
    ]
    return jobs, missing


def _known(task: Task, data: DataFolder, shots: int | None) -> Found:
    """A task of the table: from `--data`, or else from the Hub."""
    count = task.shots if shots is None else shots
    documents = from_folder(task, data)
    if task.kind == "harness":
        return _of_harness(task, documents, count)
    documents = documents or from_hub(task, count)
    return _long(task, documents, count) if task.kind == "long" else _cloze(task, documents, count)


def _of_harness(task: Task, documents: Documents | None, shots: int) -> Found:
    from gsa.eval.tasks.harness_tasks import VERSION, hub_tasks, local_notes, local_tasks

    about = partial(Found, task.name, task.title, task.main, shots, VERSION)
    if documents is None:
        loaded = hub_tasks(task, shots)
        return about(task.hub, task.hub, [], lambda *_: loaded)
    notes = local_notes(task, documents, shots)
    return about(
        documents.origin, documents.digest, notes, lambda *given: local_tasks(task, documents, shots, given[2])
    )


def _long(task: Task, documents: Documents, shots: int) -> Found:
    from gsa.eval.tasks.long import VERSION, long_notes, long_task

    about = partial(Found, task.name, task.title, task.main, shots, VERSION)
    notes = long_notes(task, documents, shots)
    return about(documents.origin, documents.digest, notes, lambda *_: [long_task(task, documents, shots)])


def _cloze(task: Task, documents: Documents, shots: int) -> Found:
    from gsa.eval.tasks.cloze import VERSION, cloze_notes, cloze_task

    if shots:
        raise GSAError(f"eval: {task.name} is a zero-shot task, got --shots {shots}")

    def cut(tokenizer: ReaderTokenizer, length: int | None, limit: int | None) -> list[HarnessTask]:
        assert length is not None  # the task has one of its own
        return [cloze_task(task, documents, tokenizer, length)]

    notes = cloze_notes(task, documents)
    title = f"{task.title} (question form)" if notes else task.title
    about = partial(Found, task.name, title, task.main, 0, VERSION)
    return about(documents.origin, documents.digest, notes, cut, cuts=True)


def _others(name: str, shots: int | None) -> list[Found]:
    """What lm-evaluation-harness has by this name: a task, or every task of a group."""
    from gsa.eval.tasks.harness_tasks import VERSION, other_tasks

    return [
        Found(
            name=task.task_name,
            title=task.task_name,
            main=None,
            shots=task.get_config("num_fewshot") or 0,
            version=VERSION,
            data=task.DATASET_PATH or "unknown",
            digest=task.DATASET_PATH or "unknown",
            notes=[],
            parts=lambda *_, only=task: [only],
        )
        for task in other_tasks(name, shots)
    ]
