"""The learning rate over a run."""

from __future__ import annotations

from math import cos, pi


def learning_rate(step: int, *, steps: int, warmup: int, peak: float, floor: float) -> float:
    """The rate of a step (the first is 0): a straight line up to `peak`, then half a cosine down to `floor`.

    >>> [round(learning_rate(step, steps=6, warmup=2, peak=1.0, floor=0.1), 3) for step in range(6)]
    [0.5, 1.0, 0.868, 0.55, 0.232, 0.1]
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step + 1 - warmup) / max(steps - warmup, 1)
    return floor + (peak - floor) * (1 + cos(pi * min(progress, 1.0))) / 2
