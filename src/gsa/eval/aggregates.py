"""From the scores of single documents to metrics with standard errors, and to the samples of a result file."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any

import numpy as np
from lm_eval.api import metrics as harness_metrics
from lm_eval.api.task import Task

from gsa.eval.standard_error import ratio_error

RESAMPLED = 1000
"""Times that documents are drawn anew where there is no formula for a standard error."""
SEED = 0

Aggregation = Callable[[Sequence[Any]], float]
_MEANS = (harness_metrics.mean, np.mean)
_UNITS = {"word_perplexity": "words", "byte_perplexity": "bytes", "bits_per_byte": "bytes"}


class Scores:
    """Scores of documents, gathered from one task of the harness or from all its subtasks."""

    def __init__(self) -> None:
        self._ids: list[int | str] = []
        self._values: dict[str, list[Any]] = {}
        self._aggregations: dict[str, Aggregation] = {}
        self._better: dict[str, bool] = {}
        self._parts: dict[str, dict[str, float]] = {}

    def add(self, name: str, task: Task, samples: Sequence[dict[str, Any]], *, several: bool) -> None:
        """Takes in what the harness logged of a task; `several`, if others are added to it."""
        filters = list(dict.fromkeys(sample["filter"] for sample in samples))
        documents = [sample["doc_id"] for sample in samples if sample["filter"] == filters[0]]
        self._ids += [f"{name}/{number}" if several else number for number in documents]
        found: dict[str, list[Any]] = {}
        for sample in samples:
            for metric in sample["metrics"]:
                key = metric if len(filters) == 1 else f"{metric},{sample['filter']}"
                found.setdefault(key, []).append(sample[metric])
                self._aggregations[key] = task.aggregation().get(metric, harness_metrics.mean)
                self._better[key] = bool(task.higher_is_better().get(metric, True))
        for key, values in found.items():
            self._values.setdefault(key, []).extend(values)
        self._parts[name] = {key: float(self._aggregations[key](values)) for key, values in found.items()}

    def metrics(self) -> dict[str, dict[str, Any]]:
        """Every metric over all documents, as a result file has it."""
        return {
            key: {
                "value": float(self._aggregations[key](values)),
                "stderr": standard_error(self._aggregations[key], values),
                "higher_is_better": self._better[key],
            }
            for key, values in self._values.items()
        }

    def samples(self) -> dict[str, list[Any]]:
        """What is kept of every document: its number, and its scores."""
        kept: dict[str, list[Any]] = {"id": self._ids}
        for key, values in self._values.items():
            found = samples_of(key, self._aggregations[key], values)
            kept |= {name: column for name, column in found.items() if len(column) == len(self._ids)}
        return kept

    def parts(self) -> dict[str, dict[str, float]]:
        """Every metric of each subtask."""
        return self._parts


def standard_error(aggregation: Aggregation, values: Sequence[Any]) -> float | None:
    """How far the metric would vary over other documents of the kind; None for a single one.

    Of perplexities it is that of the mean log-likelihood (a word, a byte), carried over by their slope.
    """
    if len(values) < 2:
        return None
    if aggregation in (*_MEANS, harness_metrics.perplexity):
        error = ratio_error(values)
    elif aggregation in (harness_metrics.weighted_perplexity, harness_metrics.bits_per_byte):
        error = ratio_error(*zip(*values, strict=True))
    else:
        return _by_drawing(aggregation, values)
    if error is None or aggregation in _MEANS:
        return error
    slope = 1 / math.log(2) if aggregation is harness_metrics.bits_per_byte else float(aggregation(values))
    return error * slope


def _by_drawing(aggregation: Aggregation, values: Sequence[Any]) -> float:
    """The same for any metric: how far it varies over documents that are drawn anew."""
    draw = np.random.default_rng(SEED)
    drawn = [
        float(aggregation([values[place] for place in draw.integers(len(values), size=len(values))]))
        for _ in range(RESAMPLED)
    ]
    return float(np.std(drawn, ddof=1))


def samples_of(name: str, aggregation: Aggregation, values: Sequence[Any]) -> dict[str, list[float]]:
    """What of a metric is kept for every document: scores whose mean it is; of perplexities, the loss in nats."""
    if aggregation is harness_metrics.perplexity:
        return {"nats": [-float(value) for value in values]}
    if name in _UNITS:
        likelihoods, weights = zip(*values, strict=True)
        return {"nats": [-float(value) for value in likelihoods], _UNITS[name]: list(map(float, weights))}
    if aggregation in _MEANS and all(isinstance(value, Real) for value in values):
        return {name: list(map(float, values))}
    return {}
