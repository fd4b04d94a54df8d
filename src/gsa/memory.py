"""How much memory a device has."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def memory_of(device: torch.device) -> int | None:
    """Bytes of a GPU, or of this machine or container, without its swap; None where that is not known."""
    if device.type == "cuda":
        import torch

        return torch.cuda.get_device_properties(device).total_memory
    if device.type != "cpu" or not hasattr(os, "sysconf"):
        return None
    try:
        page, pages = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError):
        return None
    if page <= 0 or pages <= 0:  # the system does not know either
        return None
    machine = page * pages
    limit = _text(Path("/sys/fs/cgroup/memory.max")).strip()
    if limit.isdigit():
        machine = min(machine, int(limit))
    return machine


def swap() -> int:
    """Bytes on disk that stand in for the machine's memory, slowly; 0 where that is not known."""
    for line in _text(Path("/proc/meminfo")).splitlines():
        if line.startswith("SwapTotal:"):
            return int(line.split()[1]) * 1024
    return 0


def _text(path: Path) -> str:
    """A file of the system's, or nothing where there is none, or it may not be read."""
    try:
        return path.read_text()
    except OSError:
        return ""
