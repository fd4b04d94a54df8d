"""Where sequences begin and end: one per row of a batch, or packed end to end in its only row (cu_seqlens)."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor

from gsa.errors import GSAError
from gsa.ops.memory import readable


def sequence_count(x: Tensor, cu_seqlens: Tensor | None) -> int:
    """N: the rows of x, or the packed sequences."""
    return x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1


def sequence_bounds(B: int, T: int, cu_seqlens: Tensor | None) -> list[tuple[int, int, int]]:
    """(row, start, stop) of every sequence; checks the values of cu_seqlens."""
    if cu_seqlens is None:
        return [(b, 0, T) for b in range(B)]
    bounds = readable("cu_seqlens", cu_seqlens).tolist()
    if bounds[0] != 0 or bounds[-1] != T:
        raise GSAError(f"cu_seqlens must run from 0 to T = {T}, but runs from {bounds[0]} to {bounds[-1]}")
    for n, (start, stop) in enumerate(pairwise(bounds)):
        if stop < start:
            raise GSAError(f"cu_seqlens must not decrease, but entry {n + 1} is {stop} after {start}")
    return [(0, start, stop) for start, stop in pairwise(bounds)]


def max_marks(x: Tensor, cu_seqlens: Tensor | None, save: str, span: int) -> int:
    """The largest number of states that may be kept, from shapes alone: one at the beginning of every sequence, and of
    every further `span` tokens of it."""
    if save == "nothing":
        return 0
    if cu_seqlens is None:
        return x.shape[0] * -(-x.shape[1] // span)
    return x.shape[1] // span + cu_seqlens.shape[0] - 1
