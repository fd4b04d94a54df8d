"""From a result file to what its metrics are made of, document by document."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from gsa.errors import GSAError
from gsa.eval.paired import Numbers, Parts, mean_of
from gsa.eval.results import Result
from gsa.terminal import quoted

_RATIOS: dict[str, tuple[str, Callable[[Numbers], Numbers]]] = {
    "loss": ("tokens", lambda nats: nats[..., 0]),
    "perplexity": ("tokens", lambda nats: np.exp(nats[..., 0])),
    "bits_per_byte": ("bytes", lambda nats: nats[..., 0] / math.log(2)),
    "byte_perplexity": ("bytes", lambda nats: np.exp(nats[..., 0])),
    "word_perplexity": ("words", lambda nats: np.exp(nats[..., 0])),
}
"""Metrics that are made of a sum of nats over documents: what it is divided by, and what is made of the ratio."""
_GEOMETRIC = {"rouge": ("rouge1", "rouge2", "rougeL")}
"""Metrics that are the geometric mean of the means of others."""
_EQUAL = 1e-6
"""How far a metric may lie from what its documents give, relative to it: sums may be taken in any order."""


def parts_of(result: Result, metric: str) -> Parts:
    """What a metric is made of, for each document of a result; raises where the documents do not give the metric.

    Samples under the name of the metric are scores whose mean it is. Losses, bits and perplexities are made of `nats`
    over `tokens`, `bytes` or `words`; or over documents, where those are not among the samples. `rouge` is made of
    `rouge1`, `rouge2` and `rougeL`.
    """
    samples = result["samples"]
    if metric in _RATIOS and "nats" in samples:
        nats, (unit, form) = _column(samples, "nats"), _RATIOS[metric]
        weights = _column(samples, unit) if unit in samples else np.ones(len(nats))
        parts = Parts(nats[:, None], weights, form)
    elif metric in samples:
        parts = mean_of(_column(samples, metric))
    elif metric in _GEOMETRIC and all(name in samples for name in _GEOMETRIC[metric]):
        columns = np.column_stack([_column(samples, name) for name in _GEOMETRIC[metric]])
        parts = Parts(columns, np.ones(len(columns)), lambda means: means.prod(axis=-1) ** (1 / means.shape[-1]))
    else:
        raise GSAError(f"there are no samples of {quoted(metric)}")
    if not len(parts.sums):
        raise GSAError("there are no samples")
    value, found = result["metrics"][metric]["value"], parts.value()
    if value is None or not math.isclose(value, found, rel_tol=_EQUAL, abs_tol=1e-9):
        raise GSAError(f"the samples give a {metric} of {found:.6g}, the file says {value}")
    return parts


def documents_of(result: Result) -> dict[Any, int]:
    """Where each document is in the samples, by its id."""
    ids = result["samples"].get("id")
    if not ids:
        raise GSAError("the samples have no ids of documents")
    if not all(type(id_) in (str, int) for id_ in ids):
        raise GSAError("the ids of documents must be texts or whole numbers")
    places = {id_: place for place, id_ in enumerate(ids)}
    if len(places) < len(ids):
        raise GSAError("ids of documents come twice in the samples")
    return places


def _column(samples: dict[str, Any], name: str) -> Numbers:
    for value in samples[name]:
        if type(value) not in (int, float, bool) or not math.isfinite(value):
            raise GSAError(f"the samples of {quoted(name)} must be numbers, got {quoted(value)}")
    return np.array(samples[name], dtype=np.float64)
