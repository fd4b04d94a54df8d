"""Differences of two models on the same documents, with intervals from a paired bootstrap.

A metric is a mean over documents, or a ratio of two sums over them, as bits per byte and perplexities are, or is made
of several of these. Documents are drawn anew, with replacement, each with what both models made of it: what makes a
document hard for both cancels.

Shape letters: N documents, P parts of a metric.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]
_AT_ONCE = 2**22
"""Numbers that are drawn at a time, so that memory does not grow with documents x resamples."""


@dataclass(frozen=True)
class Parts:
    """What a metric is made of: sums over documents, what they are divided by, and what is made of the ratios."""

    sums: Numbers
    """[N, P]"""
    weights: Numbers
    """[N], all 1 for means."""
    form: Callable[[Numbers], Numbers]
    """Ratios [..., P] to values [...]."""

    def value(self) -> float:
        """The metric over all documents; inf where it has no end."""
        return float(self.of_sums(self.table().sum(axis=0)))

    def table(self) -> Numbers:
        """Sums and weights [N, P + 1]."""
        return np.column_stack([self.sums, self.weights])

    def of_sums(self, table: Numbers) -> Numbers:
        """The metric of tables [..., P + 1] that are summed over documents."""
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
            return self.form(table[..., :-1] / table[..., -1:])

    def of(self, places: list[int]) -> Parts:
        """The same for some of the documents."""
        return Parts(self.sums[places], self.weights[places], self.form)


def mean_of(scores: Numbers) -> Parts:
    """The parts of a metric that is the mean of scores [N]."""
    return Parts(scores[:, None], np.ones(len(scores)), lambda ratios: ratios[..., 0])


@dataclass(frozen=True)
class Difference:
    """The second minus the first, with the interval that the true one lies in with the wanted confidence."""

    value: float
    low: float
    high: float
    draws: Numbers
    """The same difference for every resample."""
    documents: int

    @classmethod
    def of(cls, value: float, draws: Numbers, confidence: float, documents: int) -> Difference:
        """The middle of the draws that has this confidence."""
        outside = (1 - confidence) / 2
        low, high = np.quantile(draws, [outside, 1 - outside])
        return cls(value, float(low), float(high), draws, documents)

    @property
    def excludes_zero(self) -> bool:
        return self.low > 0 or self.high < 0


def paired_difference(
    first: Parts, second: Parts, *, resamples: int, confidence: float, seed: int | list[int]
) -> Difference:
    """The difference of a metric between two models, whose parts are of the same documents in the same order.

    >>> first, second = mean_of(np.array([0.0, 0, 1, 1])), mean_of(np.array([1.0, 0, 1, 1]))
    >>> found = paired_difference(first, second, resamples=1000, confidence=0.95, seed=0)
    >>> found.value, found.low, found.high
    (0.25, 0.0, 0.75)
    """
    tables = [first.table(), second.table()]
    sums = _resampled_sums(np.concatenate(tables, axis=1), resamples, np.random.default_rng(seed))
    border = tables[0].shape[1]
    draws = second.of_sums(sums[:, border:]) - first.of_sums(sums[:, :border])
    return Difference.of(second.value() - first.value(), draws, confidence, len(first.sums))


def _resampled_sums(table: Numbers, resamples: int, random: np.random.Generator) -> Numbers:
    """Sums [resamples, columns] of rows drawn anew from a table [documents, columns]."""
    count = len(table)
    distinct, numbers = np.unique(table, axis=0, return_counts=True)
    if len(distinct) * 8 < count:
        # Of right and wrong answers there are four kinds of documents: how often each kind is drawn is one number.
        return random.multinomial(count, numbers / count, size=resamples) @ distinct
    found = np.empty((resamples, table.shape[1]))
    at_once = max(1, _AT_ONCE // count)
    for begin in range(0, resamples, at_once):
        drawn = random.integers(count, size=(min(at_once, resamples - begin), count), dtype=np.int32)
        for column, values in enumerate(table.T):
            found[begin : begin + at_once, column] = np.ascontiguousarray(values)[drawn].sum(axis=1)
    return found
