"""Forks: a child process computes with several threads, as its parent did.

Threads do not survive a fork. GNU's OpenMP library, whose threads torch works on, does not notice that: the first large
operation of a child would wait for ever for threads that only the parent has. So the threads of whoever forks are ended
right before it, which takes 0.2 ms; parent and child each start new ones when they need them. LLVM's and Intel's
libraries take care of forks themselves. The engine's own threads are forgotten by csrc/parallel.cpp.
"""

from __future__ import annotations

import ctypes
import os
import sys

import torch  # noqa: F401  (which loads that library)

_HARD = 2  # omp_pause_hard: give back everything


def has_gnu_openmp(process: ctypes.CDLL) -> bool:
    """Whether the OpenMP library of this process is GNU's."""
    return hasattr(process, "GOMP_parallel") and not hasattr(process, "__kmpc_fork_call")  # which the others have


def _prepare() -> None:
    """Once, when this module is imported: torch's OpenMP library has been loaded by then."""
    if sys.platform != "linux":
        return
    process = ctypes.CDLL(None)
    if not has_gnu_openmp(process) or not hasattr(process, "omp_pause_resource_all"):
        return

    def end_threads() -> None:
        # A process without other threads has none to end. If it was forked before this was registered, its library
        # believes in threads that are gone, and would wait for their end.
        if len(os.listdir("/proc/self/task")) > 1:
            process.omp_pause_resource_all(_HARD)

    os.register_at_fork(before=end_threads)


_prepare()
