"""The heap of a process that trains: large blocks stay in it from step to step.

By default glibc maps large blocks as fresh pages and unmaps them when they are free, and gives the end of the heap back
in between. A training step asks for the same blocks again and again, and the system zeroes their pages each time: an
eighth to a sixth of a step. Set for a whole process, so commands do it and functions of the package do not.
"""

from __future__ import annotations

import ctypes
import os
import platform

TRIM_THRESHOLD, MMAP_THRESHOLD, MMAP_MAX = -1, -3, -4  # parameters of mallopt, from malloc.h
MOST = 2**31 - 1  # bytes: the largest value that mallopt takes


def keep_large_blocks() -> bool:
    """Has malloc keep memory for what comes next, where it is glibc's; whether it does.

    Whoever has set it up in the environment is left in charge.
    """
    if platform.libc_ver()[0] != "glibc" or any(
        name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ
    ):
        return False
    mallopt = ctypes.CDLL(None).mallopt
    # Older versions refuse thresholds above 32 MB. There no block at all is mapped by itself, which also keeps those of
    # more than 2 GB.
    unmapped = mallopt(MMAP_THRESHOLD, MOST) == 1 or mallopt(MMAP_MAX, 0) == 1
    return unmapped and mallopt(TRIM_THRESHOLD, MOST) == 1
