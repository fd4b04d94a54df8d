"""Timing of several functions against each other."""

from __future__ import annotations

import time
from collections.abc import Callable

TURN = 0.3  # seconds

Clock = Callable[[Callable[[], object]], float]
"""Runs a function and tells how many seconds that took."""


def wall_clock(f: Callable[[], object]) -> float:
    """The seconds until f returns."""
    before = time.perf_counter()
    f()
    return time.perf_counter() - before


def gpu_clock(f: Callable[[], object]) -> float:
    """The seconds the GPU takes from the start of f's work to its end; f itself returns before that."""
    import torch

    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()  # nothing earlier is waited for in there
    begin.record()
    f()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def race(
    contenders: dict[str, Callable[[], object]], seconds: float = 4.0, rounds: int = 4, clock: Clock = wall_clock
) -> dict[str, float]:
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
            while True:
                best[name] = min(best[name], clock(f))
                if time.perf_counter() - turn >= TURN:
                    break
        done += 1
    return best
