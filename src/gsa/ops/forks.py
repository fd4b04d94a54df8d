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
import threading

import torch  # noqa: F401  (which loads that library)

_HARD = 2  # omp_pause_hard: give back everything


def has_gnu_openmp(process: ctypes.CDLL) -> bool:
    """Whether the OpenMP library of this process is GNU's."""
    return hasattr(process, "GOMP_parallel") and not hasattr(process, "__kmpc_fork_call")  # which the others have


def _has_foreign_threads() -> bool:
    """Whether this process has threads that Python has not started."""
    try:
        threads = {int(name) for name in os.listdir("/proc/self/task")}
    except OSError:
        return True  # not known; where /proc is missing, children of children are not thought of
    return bool(threads - {os.getpid()} - {thread.native_id for thread in threading.enumerate()})


def _prepare() -> None:
    """Once, when this module is imported: torch's OpenMP library has been loaded by then."""
    if sys.platform != "linux":
        return
    process = ctypes.CDLL(None)
    if not has_gnu_openmp(process) or not hasattr(process, "omp_pause_resource_all"):
        return

    def end_threads() -> None:
        # If this process was itself forked before this was registered, the library believes in threads that are gone,
        # and would wait for their end: then there are only Python's own.
        if _has_foreign_threads():
            process.omp_pause_resource_all(_HARD)

    os.register_at_fork(before=end_threads)


_prepare()
