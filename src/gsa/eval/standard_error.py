"""The standard error of a mean, or of a ratio of two sums over documents."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np


def ratio_error(sums: Sequence[float], weights: Sequence[float] | None = None) -> float | None:
    """How far sum(sums) / sum(weights) would vary over other documents of the kind, to first order.

    Without weights it is that of the mean. Of a single document nothing is known.

    >>> ratio_error([2.0, 0.0]), ratio_error([3.0])
    (1.0, None)
    """
    values = np.asarray(sums, dtype=float)
    sizes = np.ones(len(values)) if weights is None else np.asarray(weights, dtype=float)
    count = len(values)
    if count < 2:
        return None
    rest = values - values.sum() / sizes.sum() * sizes
    return float(math.sqrt(count / (count - 1) * float((rest**2).sum())) / sizes.sum())
