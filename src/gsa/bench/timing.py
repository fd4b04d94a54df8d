"""Timing of several functions against each other."""

from __future__ import annotations

import time
from collections.abc import Callable


def race(contenders: dict[str, Callable[[], object]], seconds: float = 4.0, rounds: int = 3) -> dict[str, float]:
    """The best time of each, in seconds. They take turns, so that a slow moment of the machine hits all alike.

    Runs for about `seconds`, but at least so many rounds. What takes long is warmed up but once.
    """
    best = dict.fromkeys(contenders, float("inf"))
    begin, done = time.perf_counter(), 0
    for f in contenders.values():
        if _clock(f) < 1.0:
            _clock(f)
    while done < rounds or (time.perf_counter() - begin < seconds and done < 50):
        for name, f in contenders.items():
            best[name] = min(best[name], _clock(f))
        done += 1
    return best


def _clock(f: Callable[[], object]) -> float:
    start = time.perf_counter()
    f()
    return time.perf_counter() - start
