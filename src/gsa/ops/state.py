"""The recurrent states: what a sequence leaves behind for its continuation.

Shape letters: N sequences, H key/value heads, K key width, V value width, M slots.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gsa.errors import GSAError


class SlotState(NamedTuple):
    """The slot memory of gated slot attention; fp32, or fp64 for fp64 inputs."""

    k: Tensor
    """Key memory [N, H, K, M]."""
    v: Tensor
    """Value memory [N, H, M, V]."""

    @classmethod
    def zeros(
        cls,
        *,
        batch: int,
        heads: int,
        slots: int,
        key_width: int,
        value_width: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> SlotState:
        """The memory of sequences that have not begun: `batch` of them, with so many key/value heads.

        `dtype` is that of the state: fp32, or fp64 for fp64 inputs.

        >>> SlotState.zeros(batch=1, heads=2, slots=4, key_width=8, value_width=16).v.shape
        torch.Size([1, 2, 4, 16])
        """
        sizes = {"batch": batch, "heads": heads, "slots": slots, "key_width": key_width, "value_width": value_width}
        for name, size in sizes.items():
            least = 0 if name == "batch" else 1
            if type(size) is not int or size < least:
                raise GSAError(f"SlotState.zeros: {name} must be a whole number, at least {least}, got {size!r}")
        if dtype not in (torch.float32, torch.float64):
            raise GSAError(f"SlotState.zeros: dtype must be torch.float32 or torch.float64, got {dtype}")
        return cls(
            torch.zeros(batch, heads, key_width, slots, dtype=dtype, device=device),
            torch.zeros(batch, heads, slots, value_width, dtype=dtype, device=device),
        )


class BoundedMemoryState(NamedTuple):
    """The slot memory of ABC together with its running normaliser."""

    k: Tensor
    """Key memory [N, H, K, M]."""
    v: Tensor
    """Value memory [N, H, M, V]."""
    log_z: Tensor
    """Log of the write strengths summed so far [N, H, M]; -inf before the first write."""


class JoinedSlotState(NamedTuple):
    """The slot memory of `joined_slots`: sums that are not divided yet, and what they are divided by."""

    k: Tensor
    """Key memory [N, H, K, M]."""
    v: Tensor
    """Value memory [N, H, M, V]."""
    mass: Tensor
    """How many tokens a slot stands for [N, H, M]; 0 before the first write."""


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype sums are carried in: fp64 for fp64 inputs, fp32 for everything narrower."""
    return torch.float64 if dtype == torch.float64 else torch.float32
