"""The arguments of the compiled operators: tensors to pointers. What reaches C++ was checked before, by gsa.ops and
here."""

from __future__ import annotations

from ctypes import byref, c_int64
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from gsa.errors import GSAError
from gsa.ops.calls import JoinedSlotsCall, LinearCall, SlotCall
from gsa.ops.memory import address, located, readable
from gsa.ops.native.library import check_memory
from gsa.ops.native.structs import CHUNK, DTYPE_CODES, STATUS_CODES, GsaShape, GsaTensor, int32
from gsa.ops.sequences import max_marks, sequence_bounds

MARK_CHUNKS = 4
"""The forward pass keeps a state at every so many chunks; the backward pass computes those between them again."""

MAX_FEATURES, MAX_QUERIES, MAX_PRODUCT = 1 << 24, 1 << 16, 1 << 30
"""So that no index in C++ overflows: widths, query heads per head of k, and in the step the product of both."""


class Arguments:
    """A structure being filled; holds the tensors whose memory it points to."""

    def __init__(self, struct: Any):
        self.struct = struct
        self.alive: list[Any] = []

    def tensors(self, **tensors: Tensor | None) -> None:
        """Tensors [B, T, heads, width], or [B, heads, width] for a step; copied if their last dimension has gaps."""
        for name, x in tensors.items():
            if x is None:
                continue
            if x.stride(-1) != 1 and x.shape[-1] > 1:
                x = readable(name, x)
            x, begin = located(name, x)
            strides = x.stride()
            if x.shape[-1] > MAX_FEATURES:
                raise GSAError(f"{name} has heads of {x.shape[-1]}, the native engine takes at most {MAX_FEATURES}")
            self.alive.append(x)
            time = strides[1] if x.dim() == 4 else 0
            setattr(
                self.struct,
                name,
                GsaTensor(begin, strides[0], time, strides[-2], DTYPE_CODES[x.dtype], x.shape[-1]),
            )

    def states(self, dtype: torch.dtype, **states: Tensor | None) -> None:
        """Dense states of the dtype that sums are carried in, to be read."""
        for name, x in states.items():
            if x is None:
                continue
            if x.dtype != dtype or not x.is_contiguous():
                x = readable(name, x).to(dtype)
            x, begin = located(name, x)
            self.alive.append(x)
            setattr(self.struct, name, begin)

    def results(self, **states: Tensor) -> None:
        """Dense states to be written, in the dtype that sums are carried in already."""
        for name, x in states.items():
            self.alive.append(x)
            setattr(self.struct, name, address(name, x))

    def shape(
        self, q: Tensor, heads: int, cu_seqlens: Tensor | None, scale: float = 1.0, save: str = "nothing"
    ) -> None:
        """Sequences and heads of a call with queries q [B, T, HQ, K]."""
        if cu_seqlens is None:
            bounds = _rows(q.shape[0], q.shape[1])
        else:
            found = sequence_bounds(q.shape[0], q.shape[1], cu_seqlens)
            bounds = tuple((c_int64 * len(found))(*column) for column in zip(*found, strict=True)) or _rows(0, 0)
        self.alive.append(bounds)
        self.struct.shape = GsaShape(
            len(bounds[0]),
            *bounds,
            *heads_and_queries(q, heads),
            _mark_chunks(save),
            torch.get_num_threads(),
            q.dtype == torch.float64,
            scale,
        )

    def run(self, function: Any, *arguments: int) -> bool:
        """Calls the function; whether all gates were good, as far as it says so."""
        status = function(byref(self.struct), *arguments)
        if status == STATUS_CODES["bad_gates"]:
            return False
        check_memory(status)
        return True


def heads_and_queries(q: Tensor, heads: int) -> tuple[int, int]:
    """Heads of keys and values, and of q [..., HQ, K] for each of them, as C++ counts them."""
    queries = q.shape[-2] // heads
    if queries > MAX_QUERIES:
        raise GSAError(f"q has {queries} heads per head of k, the native engine takes at most {MAX_QUERIES}")
    return int32("heads", heads), queries


def kept_states(call: LinearCall | SlotCall | JoinedSlotsCall) -> int:
    """How many states the forward pass may keep.

    They lie in one dimension. With this number as a size of its own, torch's compilers would take one and several for
    two cases, and an exported graph would be valid for short sequences or for long ones.
    """
    return max_marks(call.q, call.cu_seqlens, call.save, CHUNK * _mark_chunks(call.save))


def _mark_chunks(save: str) -> int:
    return 1 if save == "states" else MARK_CHUNKS


@lru_cache(64)
def _rows(B: int, T: int) -> tuple[Any, ...]:
    """Rows, starts and stops of a batch that is not packed."""
    kind = c_int64 * B
    return kind(*range(B)), kind(), kind(*[T] * B)
