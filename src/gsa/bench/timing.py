"""Timing of several functions against each other."""

from __future__ import annotations

import time
from collections.abc import Callable

TURN = 0.3  # seconds


def race(contenders: dict[str, Callable[[], object]], seconds: float = 4.0, rounds: int = 4) -> dict[str, float]:
    """The best time of each, in seconds.

    They take turns, so that a slow stretch of the machine hits all alike: in every round each runs once, and again
    while its turn of 0.3 s lasts. There are so many rounds at least, and more while `seconds` have not passed. A run of
    each before the first round is to warm up.
    """
    best = dict.fromkeys(contenders, float("inf"))
    for f in contenders.values():
        f()
    begin, done = time.perf_counter(), 0
    while done < rounds or time.perf_counter() - begin < seconds:
        for name, f in contenders.items():
            turn = time.perf_counter()
            now = turn
            while now - turn < TURN:
                before = now
                f()
                now = time.perf_counter()
                best[name] = min(best[name], now - before)
        done += 1
    return best
