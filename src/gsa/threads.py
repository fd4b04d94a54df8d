"""How many threads torch computes with, and how they wait for each other."""

from __future__ import annotations

import os
import sys

from gsa.errors import GSAError

MAX_THREADS = 1024  # far more fail in the midst of things
SPIN = {"GOMP_SPINCOUNT": "500", "KMP_BLOCKTIME": "0"}
"""What OpenMP libraries read when they are loaded: GNU's looks so often for work before it sleeps (its own choice is
300,000 times, some milliseconds), LLVM's and Intel's for so many milliseconds (200)."""
SET_BY_USER = (*SPIN, "OMP_WAIT_POLICY")


def let_threads_sleep() -> None:
    """Has torch's threads sleep soon when they wait for each other, instead of keeping their cores busy.

    Beside other busy processes a thread that keeps its core while it waits is in the way of the one it waits for, and
    training may take ten times as long. It must be called before torch is imported, since OpenMP looks only once, and
    changes nothing where the environment has a wish already. The command `gsa` does it by itself.

    >>> import gsa.threads
    >>> gsa.threads.let_threads_sleep()  # doctest: +SKIP
    >>> import torch
    """
    if "torch" in sys.modules:
        raise GSAError("let_threads_sleep: torch has been imported already, and its threads wait as they do; call it before")
    if not any(name in os.environ for name in SET_BY_USER):
        os.environ.update(SPIN)


def use_threads(threads: int | None) -> None:
    """Has torch use so many threads; None leaves it its own choice."""
    if threads is None:
        return
    if threads < 1:
        raise GSAError(f"threads must be at least 1, got {threads}")
    if threads > MAX_THREADS:
        raise GSAError(f"threads must be at most {MAX_THREADS}, got {threads}")
    import torch

    torch.set_num_threads(threads)
