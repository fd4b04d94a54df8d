"""Several models on the same tasks: their metrics side by side, and each one's difference to the first."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gsa.errors import GSAError
from gsa.eval.paired import Difference, paired_difference
from gsa.eval.parts import documents_of, parts_of
from gsa.eval.results import Result

_CONDITIONS = {"version": "versions", "shots": "shots", "limit": "limits", "data": "data"}
"""Fields in which results of one task may differ, so that they measure other things; and all settings do, but these:"""
_HARMLESS = ("batch_size",)


@dataclass(frozen=True)
class Contender:
    """A row of the comparison: results of one model."""

    source: str
    """The file, the folder or the model, as it was given."""
    results: Sequence[Result]

    @property
    def name(self) -> str:
        return str(self.results[0]["model"].get("name", self.source))


@dataclass(frozen=True)
class Settings:
    """Of the bootstrap."""

    resamples: int = 10_000
    confidence: float = 0.95
    seed: int = 0

    def __post_init__(self) -> None:
        if not 100 <= self.resamples <= 10**7:
            raise GSAError(f"compare: resamples must be 100 to 10,000,000, got {self.resamples:,}")
        if not 0 < self.confidence < 1:
            raise GSAError(f"compare: confidence must be between 0 and 1, got {self.confidence}")
        if self.seed < 0:
            raise GSAError(f"compare: seed must be at least 0, got {self.seed}")


class Comparison:
    """The report is made in here: what stands in the columns, and what has to be said of it."""

    def __init__(self, contenders: Sequence[Contender], settings: Settings, *, all_metrics: bool = False) -> None:
        """With `all_metrics`, tasks have a column for each metric, and not for the main one alone."""
        self._contenders, self._settings, self._all_metrics = contenders, settings, all_metrics
        self._labels = _labels(contenders)
        self._warnings: list[str] = []

    def report(self) -> dict[str, Any]:
        """All numbers of the comparison, as JSON has them."""
        tasks, draws = [], []
        for header, results in _columns(self._contenders).items():
            first = next(result for result in results if result is not None)
            others = [name for name in first["metrics"] if name != first["main"]] if self._all_metrics else []
            self._compare_conditions(header, results)
            for metric in (first["main"], *others):
                task, found = self._task(header, metric, results)
                tasks.append(task | {"task": first["task"], "main": metric == first["main"]})
                draws.append(found)
        return {
            "models": [
                {"label": label, "source": each.source}
                for label, each in zip(self._labels, self._contenders, strict=True)
            ],
            "tasks": tasks,
            "average": self._average(tasks, draws),
            "resamples": self._settings.resamples,
            "confidence": self._settings.confidence,
            "seed": self._settings.seed,
            "warnings": self._warnings,
        }

    def _task(
        self, header: str, metric: str, results: list[Result | None]
    ) -> tuple[dict[str, Any], list[Difference | None]]:
        """The column of a metric: values, and differences to the first model; these also with their draws."""
        known = {label: each for label, each in zip(self._labels, results, strict=True) if each is not None}
        for label, result in known.items():
            if metric not in result["metrics"]:
                self._warnings.append(f"{header}: {label} has no {metric}, but {', '.join(result['metrics'])}")
        values = [None if result is None else _value(result, metric) for result in results]
        higher = next(iter(known.values()))["metrics"][metric]["higher_is_better"]
        differences = [None, *(self._difference(header, metric, results, place) for place in range(1, len(results)))]
        task = {
            "header": header,
            "metric": metric,
            "higher_is_better": higher,
            "values": values,
            "differences": [None if each is None else _facts(each, higher) for each in differences],
        }
        return task, differences

    def _compare_conditions(self, header: str, results: list[Result | None]) -> None:
        """Says in what the results of one task differ, beside the model."""
        known = {label: each for label, each in zip(self._labels, results, strict=True) if each is not None}
        conditions = {
            words: {label: each.get(name) for label, each in known.items()} for name, words in _CONDITIONS.items()
        }
        conditions["contents of the data"] = {label: _digest(each) for label, each in known.items()}
        for name in dict.fromkeys(name for each in known.values() for name in each["settings"]):
            if name not in _HARMLESS:
                values = {label: each["settings"].get(name) for label, each in known.items()}
                conditions[f"settings of {name}"] = values
        for words, found in conditions.items():
            if len({repr(value) for value in found.values()}) > 1:
                each = ", ".join(f"{_word(value)} ({label})" for label, value in found.items())
                self._warnings.append(f"{header}: the {words} differ: {each}")

    def _difference(self, header: str, metric: str, results: list[Result | None], place: int) -> Difference | None:
        """Of one model to the first, over the documents that both have; None, and a warning, if there is none."""
        first, second = results[0], results[place]
        if first is None or second is None or metric not in first["metrics"] or metric not in second["metrics"]:
            return None
        sides = []
        for label, result in ((self._labels[0], first), (self._labels[place], second)):
            try:
                sides.append((documents_of(result), parts_of(result, metric)))
            except GSAError as error:
                self._warnings.append(f"{header}: no interval, since in {label} {error}")
                return None
        (places, parts), (other_places, other_parts) = sides
        common = [id_ for id_ in places if id_ in other_places]
        if len(common) < max(len(places), len(other_places)):
            self._warnings.append(
                f"{header}: {self._labels[0]} has {len(places):,} documents, {self._labels[place]} "
                f"{len(other_places):,}; "
                + (f"the difference is over the {len(common):,} that both have" if common else "none is in both")
            )
        if not common:
            return None
        found = paired_difference(
            parts.of([places[id_] for id_ in common]),
            other_parts.of([other_places[id_] for id_ in common]),
            resamples=self._settings.resamples,
            confidence=self._settings.confidence,
            seed=[self._settings.seed, *f"{header} {metric}".encode()],  # each column has draws of its own
        )
        if not math.isfinite(found.low + found.high):
            self._warnings.append(f"{header}: no interval, since {metric} has no end for some of the resamples")
            return None
        return found

    def _average(self, tasks: list[dict[str, Any]], draws: list[list[Difference | None]]) -> dict[str, Any] | None:
        """The mean over the tasks in which higher is better and that all models have, if there are two at least."""
        chosen = [
            place
            for place, task in enumerate(tasks)
            if task["main"]
            and task["higher_is_better"]
            and all(value and value["value"] is not None for value in task["values"])
        ]
        if len(chosen) < 2:
            return None
        values: list[dict[str, Any]] = []
        differences: list[dict[str, Any] | None] = []
        for place in range(len(self._contenders)):
            cells = [tasks[task]["values"][place] for task in chosen]
            errors = [cell["stderr"] for cell in cells]
            mean = sum(cell["value"] for cell in cells) / len(cells)
            error = None if None in errors else math.sqrt(sum(error**2 for error in errors)) / len(errors)
            values.append({"value": mean, "stderr": error})
            found = [draws[task][place] for task in chosen]
            known = [each for each in found if each is not None]
            if len(known) < len(found):
                differences.append(None)
                continue
            mean = sum(each.value for each in known) / len(known)
            together = np.mean([each.draws for each in known], axis=0)
            documents = sum(each.documents for each in known)
            differences.append(_facts(Difference.of(mean, together, self._settings.confidence, documents), True))
        return {"tasks": [tasks[task]["header"] for task in chosen], "values": values, "differences": differences}


def _columns(contenders: Sequence[Contender]) -> dict[str, list[Result | None]]:
    """The results of each task, a place for each model. A task that a model has several times has several columns."""
    titles, told = _titles(contenders), variants([contender.results for contender in contenders])
    found: dict[str, list[Result | None]] = {}
    for place, contender in enumerate(contenders):
        for result in contender.results:
            header = titled(titles[result["task"]], result, told)
            cells = found.setdefault(header, [None] * len(contenders))
            if cells[place] is not None:
                raise GSAError(f"{contender.source} has two results of {header}, expected one")
            cells[place] = result
    return found


def titled(title: str, result: Result, told: dict[str, list[str]]) -> str:
    """A title with what tells a result apart from others of the same task and model."""
    facts = _facts_of(result)
    return ", ".join([title, *(f"{name} {_word(facts.get(name))}" for name in told.get(result["task"], ()))])


def variants(models: Sequence[Sequence[Result]]) -> dict[str, list[str]]:
    """What tells runs of a task apart, by the task, where a model has several."""
    counts = [Counter(result["task"] for result in results) for results in models]
    found: dict[str, list[str]] = {}
    for task in {task for each in counts for task, count in each.items() if count > 1}:
        runs = [_facts_of(result) for results in models for result in results if result["task"] == task]
        names = dict.fromkeys(name for facts in runs for name in facts)
        found[task] = [name for name in names if len({repr(facts.get(name)) for facts in runs}) > 1]
    return found


def _facts_of(result: Result) -> dict[str, Any]:
    """How a task was run."""
    settings = {name: value for name, value in result["settings"].items() if name not in _HARMLESS}
    return {"shots": result["shots"], "limit": result["limit"], **settings}


def _titles(contenders: Sequence[Contender]) -> dict[str, str]:
    """A title for each task; the name of the task, where two have the same title or a task has two."""
    pairs = {(result["task"], result["title"]) for contender in contenders for result in contender.results}
    tasks, titles = [task for task, _ in pairs], [title for _, title in pairs]
    return {task: title if tasks.count(task) == titles.count(title) == 1 else task for task, title in pairs}


def _labels(contenders: Sequence[Contender]) -> list[str]:
    """The names of the models; where several have the same, what they were given as."""
    names = [each.name for each in contenders]
    return [each.name if names.count(each.name) == 1 else each.source for each in contenders]


def _digest(result: Result) -> Any:
    """What tells documents of other content apart, if the result has it."""
    identity = result.get("identity")
    found = identity.get("documents") if isinstance(identity, dict) else None
    return found[:12] if isinstance(found, str) else None


def _value(result: Result, metric: str) -> dict[str, Any] | None:
    found = result["metrics"].get(metric)
    return None if found is None else {name: _finite(found.get(name)) for name in ("value", "stderr")}


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _facts(found: Difference, higher_is_better: bool) -> dict[str, Any]:
    better = None if not found.excludes_zero else (found.value > 0) == higher_is_better
    return {
        "value": found.value,
        "low": found.low,
        "high": found.high,
        "better": better,
        "documents": found.documents,
    }


def _word(value: Any) -> str:
    return "none" if value is None else ",".join(map(str, value)) if isinstance(value, list) else str(value)
