"""`gsa eval MODEL --tasks LIST`: runs tasks one after the other, each to a result file; goes on where it stopped."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gsa import __version__
from gsa.errors import GSAError
from gsa.eval.arguments import MaxLengths
from gsa.eval.groups import GROUPS
from gsa.eval.local_data import DataFolder
from gsa.eval.paper_tables import Entry, tables
from gsa.eval.results import FORMAT, Result, folder_of, load_result, save_result
from gsa.eval.tasks.jobs import Job, Missing, find_jobs
from gsa.extras import require
from gsa.table import Table

if TYPE_CHECKING:
    from gsa.eval.reader import Reader


@dataclass(frozen=True)
class Request:
    """What is to be evaluated, and how."""

    tasks: str
    data: str | None = None
    limit: int | None = None
    batch_size: int = 32
    output: str | None = None
    max_lengths: MaxLengths = (None,)
    """Tokens that inputs are cut to, a run of each; None is each task's own."""
    shots: int | None = None
    again: bool = False

    def __post_init__(self) -> None:
        for name, least in (("limit", 1), ("batch_size", 1), ("shots", 0)):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < least):
                raise GSAError(f"eval: {name} must be a whole number of at least {least}, got {value!r}")


@dataclass
class Report:
    """What came of it."""

    groups: list[str]
    entries: list[Entry]
    missing: list[Missing]
    folder: Path | None = None
    """Where the results are; None if there are none."""

    def tables(self, width: int | None = None) -> list[Table]:
        """The paper's tables with our rows, and one of other tasks; if wanted, made for so many characters."""
        return tables(self.groups, self.entries, self.missing, width)

    def facts(self) -> dict[str, Any]:
        """Everything but the samples, which stand in the result files."""
        results = [{key: value for key, value in each.result.items() if key != "samples"} for each in self.entries]
        return {
            "folder": None if self.folder is None else str(self.folder),
            "results": results,
            "missing": [asdict(each) for each in self.missing],
        }


def run_tasks(request: Request, opened: Callable[[], Reader], say: Callable[[str], None]) -> Report:
    """Runs what is asked for. Names and documents are checked before the model is opened."""
    for package in ("lm_eval", "datasets"):
        require(package, "gsa eval --tasks")
    with quiet():
        jobs, missing = find_jobs(request.tasks, DataFolder(request.data), request.shots, request.max_lengths)
        for each in missing:
            say(str(each))
        names = [name.strip() for name in request.tasks.split(",")]
        report = Report([name for name in dict.fromkeys(names) if name in GROUPS], [], missing)
        if not jobs:
            return report
        reader = opened()
        folder = report.folder = folder_of(reader, request.output)
        try:
            for number, job in enumerate(jobs, 1):
                path = folder / job.file_name(request.limit)
                place = f"task {number} of {len(jobs)}"
                report.entries.append(Entry(job.asked_length, _finished(job, request, reader, path, place, say)))
        except KeyboardInterrupt:
            say(
                f"stopped in {place} ({job.found.title}). What is finished lies in {folder}, the answers of this task "
                "too; the same command goes on from there"
            )
            raise
    return report


def _finished(job: Job, request: Request, reader: Reader, path: Path, place: str, say: Callable[[str], None]) -> Result:
    """The result of a job: from its file, if it was run before, or else now."""
    identity = _identity(job, request, reader)
    if path.exists() and not request.again:
        earlier = load_result(path)
        if earlier.get("identity") == identity:
            say(f"{place}: {job.found.title} is finished, {path}; --again would run it anew")
            return earlier
        differing = [name for name, value in identity.items() if earlier.get("identity", {}).get(name) != value]
        say(f"{place}: {job.found.title} is run anew, since {path} is of another {', '.join(differing)}")
    result = _run(job, request, reader, path, place) | {"identity": identity}
    save_result(result, path)
    _answers(path).unlink(missing_ok=True)
    return result


def _identity(job: Job, request: Request, reader: Reader) -> dict[str, Any]:
    """What a result depends on; where it is the same, it need not be made again."""
    about = reader.about
    return {
        "model": about["fingerprint"],
        "weights": about.get("weights"),
        "compute": about.get("compute"),
        "definition": job.found.version,
        "documents": job.found.digest,
        "shots": job.found.shots,
        "limit": request.limit,
        "max_length": job.max_length,
    }


def _answers(path: Path) -> Path:
    """Where the answers of a job are kept as they come."""
    return path.with_suffix(".answers")


def _run(job: Job, request: Request, reader: Reader, path: Path, place: str) -> Result:
    """Runs a job, part by part. Answers are kept in a file beside the result as they come."""
    from lm_eval.evaluator import evaluate

    from gsa.eval.aggregates import Scores
    from gsa.eval.answers import Answers
    from gsa.eval.harness import HarnessModel

    began = time.monotonic()
    parts = job.found.parts(reader.tokenizer, job.max_length, request.limit)
    counts = _shares([len(part.eval_docs) for part in parts], request.limit)
    asked = [(part, count) for part, count in zip(parts, counts, strict=True) if count]
    scores = Scores()
    with _length_of(reader, None if job.found.cuts else job.max_length), Answers(_answers(path)) as answers:
        for number, (part, count) in enumerate(asked, 1):
            which = f" {number} of {len(asked)} ({part.task_name})" if len(asked) > 1 else ""
            answers.title = f"{place}, {job.found.title}{which}"
            model = HarnessModel(reader, request.batch_size, answers=answers)
            found = evaluate(model, {"tasks": {part.task_name: part}}, limit=count, bootstrap_iters=0)
            assert found is not None
            scores.add(part.task_name, part, found["samples"][part.task_name], several=len(asked) > 1)
    metrics = scores.metrics()
    return {
        "format": FORMAT,
        "model": {**reader.about, "name": reader.name},
        "task": job.found.name,
        "title": job.found.title,
        "group": job.group,
        "version": parts[0].VERSION,
        "shots": job.found.shots,
        "limit": request.limit,
        "data": job.found.data,
        "metrics": metrics,
        "main": job.found.main or next(iter(metrics)),
        "samples": scores.samples(),
        "parts": scores.parts() if len(asked) > 1 else {},
        "notes": [*job.found.notes, *_shortened(job, reader)],
        "settings": {"batch_size": request.batch_size, "max_length": job.max_length},
        "seconds": round(time.monotonic() - began, 3),
        "gsa": __version__,
        "packages": {name: version(name) for name in ("lm_eval", "datasets", "torch", "transformers")},
    }


@contextmanager
def _length_of(reader: Reader, length: int | None) -> Iterator[None]:
    """While entered, the reader sees at most so many tokens at once, or as many as its model can."""
    own = reader.max_length
    reader.max_length = min((each for each in (own, length) if each is not None), default=None)
    try:
        yield
    finally:
        reader.max_length = own


def _shortened(job: Job, reader: Reader) -> list[str]:
    if reader.max_length is None or (job.max_length or 0) <= reader.max_length:
        return []
    return [f"{job.found.title}: the model reads at most {reader.max_length:,} tokens, less than the task's"]


def _shares(sizes: Sequence[int], limit: int | None) -> list[int]:
    """How many documents of each part are used, so that all together are at most `limit`, spread evenly.

    >>> _shares([5, 1, 9], 8)
    [4, 1, 3]
    """
    if limit is None:
        return list(sizes)
    shares = [0] * len(sizes)
    left = min(limit, sum(sizes))
    while left:
        open_ = [place for place, size in enumerate(sizes) if shares[place] < size]
        for place in open_[:left] if left < len(open_) else open_:
            shares[place] += 1
            left -= 1
    return shares


@contextmanager
def quiet() -> Iterator[None]:
    """While entered, libraries show no bars and tell no warnings of their own."""
    import datasets
    from tqdm import tqdm

    make_bar = tqdm.__init__

    def make_none(self: Any, *args: Any, **options: Any) -> None:
        make_bar(self, *args, **options | {"disable": True})

    tqdm.__init__ = make_none
    logger = logging.getLogger("lm_eval")
    level, bars = logger.level, datasets.are_progress_bars_disabled()
    logger.setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        tqdm.__init__ = make_bar
        logger.setLevel(level)
        if not bars:
            datasets.enable_progress_bars()
