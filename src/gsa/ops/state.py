"""The recurrent states: what a sequence leaves behind for its continuation.

Shape letters: N sequences, H key/value heads, K key width, V value width, M slots.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class SlotState(NamedTuple):
    """The slot memory of gated slot attention; fp32, or fp64 for fp64 inputs."""

    k: Tensor
    """Key memory [N, H, K, M]."""
    v: Tensor
    """Value memory [N, H, M, V]."""


class BoundedMemoryState(NamedTuple):
    """The slot memory of ABC together with its running normaliser."""

    k: Tensor
    """Key memory [N, H, K, M]."""
    v: Tensor
    """Value memory [N, H, M, V]."""
    log_z: Tensor
    """Log of the write strengths summed so far [N, H, M]; -inf before the first write."""


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype sums are carried in: fp64 for fp64 inputs, fp32 for everything narrower."""
    return torch.float64 if dtype == torch.float64 else torch.float32
