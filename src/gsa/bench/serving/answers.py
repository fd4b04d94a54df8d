"""Answers with the times at which they came, and what follows from those of many clients."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any


@dataclass
class Answer:
    """One answer on its way. Times are in seconds, by one clock for all."""

    asked: float
    arrivals: list[float] = field(default_factory=list)
    """When events with text came, or tokens."""
    tokens: int = 0
    """How many it has, as whoever wrote it has counted them: an event may bring several, or none."""
    prompt: int = 0
    """Tokens that were asked with, as they were counted there."""
    cached: int = 0
    """Tokens of its prompt that were not read again."""

    def tokens_within(self, begin: float, end: float) -> float:
        """Tokens that came in a window; of an answer that lies only partly in it, by its arrivals."""
        if not self.arrivals:
            return 0.0
        return self.tokens * sum(begin <= time < end for time in self.arrivals) / len(self.arrivals)


def summary(answers: Sequence[Answer], begin: float, end: float) -> dict[str, Any]:
    """What came in a window: tokens a second, and times to the first token and between tokens, in seconds."""
    inside = [answer for answer in answers if answer.arrivals and begin <= answer.arrivals[0] < end]
    first = [answer.arrivals[0] - answer.asked for answer in inside]
    between = [later - time for answer in inside for time, later in pairwise(answer.arrivals) if later < end]
    tokens = sum(answer.tokens_within(begin, end) for answer in answers)
    events = sum(begin <= time < end for answer in answers for time in answer.arrivals)
    return {
        "seconds": end - begin,
        "answers": len(inside),
        "tokens": tokens,
        "tokens_per_second": tokens / (end - begin),
        "tokens_per_event": tokens / events if events else None,
        "cached_tokens": sum(answer.cached for answer in inside),
        "first_token": percentiles(first),
        "between_tokens": percentiles(between),
    }


def percentiles(times: Iterable[float]) -> dict[str, float | None]:
    """The median and the time that 99% do not exceed; None if there are no times.

    >>> percentiles([0.4, 0.1, 0.3, 0.2, 0.5])
    {'p50': 0.3, 'p99': 0.5}
    """
    ordered = sorted(times)
    return {
        name: ordered[math.ceil(share * len(ordered)) - 1] if ordered else None
        for name, share in (("p50", 0.5), ("p99", 0.99))
    }
