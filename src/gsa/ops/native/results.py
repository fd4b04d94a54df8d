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

from gsa.errors import OutOfMemory

LARGE = 4 << 20
"""Bytes; memory for larger results comes from here."""


class Region:
    """A stretch of memory of which one result at a time can be made."""

    def __init__(self, size: int):
        try:
            self.map = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise OutOfMemory(f"no memory for a result of {size} bytes: {error}") from None
        self.size = size


class Pool:
    """Regions in use, and idle ones: at most twice as much as was in use at any one time.

    Regions come back from finalizers, which may run at any moment in any thread, even inside these functions: so there
    is no lock, and only single operations that cannot be interrupted.
    """

    def __init__(self) -> None:
        self._idle: deque[Region] = deque()  # longest idle first
        self._used: set[Region] = set()
        self._peak = 0  # bytes

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Like torch.empty, on the CPU."""
        count = math.prod(shape)
        size = count * dtype.itemsize
        if size <= LARGE or not hasattr(mmap, "MADV_FREE"):
            return torch.empty(shape, dtype=dtype, device="cpu")
        region = self._take(size)
        buffer = (ctypes.c_char * size).from_buffer(region.map)
        weakref.finalize(buffer, self._give_back, region).atexit = False
        result = torch.frombuffer(buffer, dtype=dtype, count=count).view(shape)
        if torch.are_deterministic_algorithms_enabled() and torch.utils.deterministic.fill_uninitialized_memory:  # type: ignore[attr-defined]
            result.fill_(math.nan)  # as torch does to show reads of what was never written
        return result

    def _take(self, size: int) -> Region:
        idle: list[Region] = []
        while self._idle:
            try:
                idle.append(self._idle.popleft())
            except IndexError:  # another thread was faster
                break
        region = next((b for b in idle if b.size == size), None)
        if region is None:
            region = Region(size)
        else:
            idle.remove(region)
        self._used.add(region)
        self._peak = max(self._peak, sum(b.size for b in self._used.copy()))
        excess = sum(b.size for b in idle) - 2 * self._peak
        for old in idle:
            if excess > 0:
                excess -= old.size  # and it goes back to the system
            else:
                self._idle.append(old)
        return region

    def _give_back(self, region: Region) -> None:
        self._used.discard(region)
        region.map.madvise(mmap.MADV_FREE)
        self._idle.append(region)


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
