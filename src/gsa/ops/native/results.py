"""Memory for large results, used again.

malloc hands out large blocks as fresh pages, or gives the end of its heap back to the system in between, and the system
zeroes pages one by one: at long sequences that takes a third as long as the arithmetic. Here such memory is kept when a
result is gone, for the next one of the same size. While it is idle it is marked as free, so the system takes it back
whenever it runs short.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import weakref
from collections import deque

import torch
from torch import Tensor

LARGE = 4 << 20
"""Bytes from which on memory comes from here."""
PATIENCE = 256
"""Memory that as many large results in a row had no use for goes back to the system."""


class Block:
    """A stretch of memory of which one result at a time can be made."""

    def __init__(self, size: int):
        self.map = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.size = size
        self.last_used = 0
        """Number of the result it was last used for."""


class Pool:
    def __init__(self) -> None:
        self._idle: deque[Block] = deque()  # appended to from finalizers, which may run at any moment
        self._results = 0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Like torch.empty, on the CPU."""
        count = math.prod(shape)
        size = count * dtype.itemsize
        if size <= LARGE or not hasattr(mmap, "MADV_FREE"):
            return torch.empty(shape, dtype=dtype)
        self._results += 1
        block = self._take(size)
        block.last_used = self._results
        buffer = (ctypes.c_char * size).from_buffer(block.map)
        weakref.finalize(buffer, self._give_back, block).atexit = False
        result = torch.frombuffer(buffer, dtype=dtype, count=count).view(shape)
        if torch.are_deterministic_algorithms_enabled() and torch.utils.deterministic.fill_uninitialized_memory:  # type: ignore[attr-defined]
            result.fill_(math.nan)  # as torch does to show reads of what was never written
        return result

    def _take(self, size: int) -> Block:
        kept: list[Block] = []
        found: Block | None = None
        while self._idle:
            block = self._idle.popleft()
            if found is None and block.size == size:
                found = block
            elif self._results - block.last_used <= PATIENCE:
                kept.append(block)
        self._idle.extend(kept)
        return Block(size) if found is None else found

    def _give_back(self, block: Block) -> None:
        block.map.madvise(mmap.MADV_FREE)
        self._idle.append(block)


_pool = Pool()


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Room for a result on the CPU."""
    return _pool.empty(shape, dtype)


def empty_like(x: Tensor) -> Tensor:
    """Room for the gradient of x, which C++ can fill: its last dimension is contiguous."""
    if x.is_contiguous():
        return empty(tuple(x.shape), x.dtype)
    like = torch.empty_like(x)  # keeps the order of the dimensions, if x has one
    return like if x.shape[-1] <= 1 or like.stride(-1) == 1 else empty(tuple(x.shape), x.dtype)
