"""How many cores there are, and how many threads torch computes with."""

from __future__ import annotations

import os

from gsa.errors import GSAError

MAX_THREADS = 1024  # far more fail in the midst of things


def usable_cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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
