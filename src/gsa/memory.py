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
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.exists() and (text := limit.read_text().strip()).isdigit():
        machine = min(machine, int(text))
    return machine


def swap() -> int:
    """Bytes on disk that stand in for the machine's memory, slowly; 0 where that is not known."""
    known = Path("/proc/meminfo")
    for line in known.read_text().splitlines() if known.exists() else ():
        if line.startswith("SwapTotal:"):
            return int(line.split()[1]) * 1024
    return 0
