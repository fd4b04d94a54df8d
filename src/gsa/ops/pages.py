"""Large results on huge pages.

The memory of a large result is new to the process, and the kernel hands it out page by page as it is first written. At
4 KB a page, that costs as much as a third of the computation. Linux gives 2 MB pages to memory for which it is asked.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import sys
from collections.abc import Callable

from torch import Tensor

LARGE = 16 << 20


def on_huge_pages(x: Tensor) -> Tensor:
    """x itself, uninitialised and about to be written; the kernel has been asked for huge pages where that helps."""
    if x.device.type == "cpu" and x.nbytes >= LARGE:
        advise = _madvise()
        if advise is not None:
            start = -(-x.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
            advise(start, x.data_ptr() + x.nbytes - start, mmap.MADV_HUGEPAGE)  # a refusal changes nothing
    return x


@functools.cache
def _madvise() -> Callable[[int, int, int], int] | None:
    if sys.platform != "linux" or not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    function = ctypes.CDLL(None).madvise
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    function.restype = ctypes.c_int
    return function
