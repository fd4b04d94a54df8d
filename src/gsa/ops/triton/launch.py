"""Launching kernels: run on the device, or only recorded.

Everything that is launched passes through `launch`. Inside `recording`, nothing runs: what would be launched on a named
target is listed, with meta tensors for arguments. So the ahead-of-time compiler and the figures of the documentation
are made from exactly the kernels, settings and grids that a GPU would run.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch


@dataclass(frozen=True)
class Target:
    """A kind of GPU, as far as launching is concerned."""

    name: str
    backend: str
    """Triton's name of the vendor: cuda or hip."""
    arch: int | str
    """Triton's name of the architecture: 80, 90, "gfx942"."""
    warp_size: int
    processors: int
    """Streaming multiprocessors, or compute units."""
    shared_bytes: int
    """Shared memory that one program may use."""


TARGETS: dict[str, Target] = {
    "sm_80": Target("sm_80", "cuda", 80, 32, 108, 163 << 10),
    "sm_90": Target("sm_90", "cuda", 90, 32, 132, 227 << 10),
    "gfx942": Target("gfx942", "hip", "gfx942", 64, 304, 64 << 10),
}
# Triton's interpreter on a CPU, which runs programs one after another.
INTERPRETER = Target("interpreter", "cpu", "cpu", 1, 1, 227 << 10)


@dataclass(frozen=True)
class Launch:
    """One kernel about to run."""

    kernel: Any
    """The function decorated with triton.jit."""
    programs: int
    """The size of the grid. It has one dimension, because the other two end at 65535."""
    arguments: dict[str, Any]
    """By name of the parameter: tensors, numbers, None, and values of constexpr parameters."""
    warps: int
    stages: int


class _Overrides(threading.local):
    def __init__(self) -> None:
        self.target: Target | None = None
        self.launches: list[Launch] | None = None


_overrides = _Overrides()


@contextmanager
def pretending(target: Target) -> Iterator[None]:
    """Inside, launches are planned as for the target, wherever they run."""
    previous, _overrides.target = _overrides.target, target
    try:
        yield
    finally:
        _overrides.target = previous


@contextmanager
def recording(target: Target) -> Iterator[list[Launch]]:
    """Inside, kernels are not run but listed, as they would be launched on the target; arguments are meta tensors."""
    previous, _overrides.launches = _overrides.launches, []
    try:
        with pretending(target):
            yield _overrides.launches
    finally:
        _overrides.launches = previous


def target_of(device: torch.device) -> Target:
    """What kernels for tensors on this device will run on."""
    if _overrides.target is not None:
        return _overrides.target
    if device.type == "cpu":
        return INTERPRETER
    return _device_target(torch.cuda.current_device() if device.index is None else device.index)


@lru_cache
def _device_target(index: int) -> Target:
    found = torch.cuda.get_device_properties(index)
    if torch.version.hip is not None:
        name = found.gcnArchName.split(":")[0]
        return Target(name, "hip", name, found.warp_size, found.multi_processor_count, 64 << 10)
    arch = found.major * 10 + found.minor
    shared = getattr(found, "shared_memory_per_block_optin", found.shared_memory_per_block)
    return Target(f"sm_{arch}", "cuda", arch, 32, found.multi_processor_count, shared)


def launch(kernel: Any, programs: int, warps: int, stages: int, **arguments: Any) -> None:
    """Runs the kernel on the device of its tensors, or records it; with an empty grid, does neither."""
    if programs == 0:
        return
    if _overrides.launches is not None:
        _overrides.launches.append(Launch(kernel, programs, arguments, warps, stages))
        return
    # Triton 3.7 has no product of fp64 for AMD's matrix units, and fails unless this option turns them off.
    double = str(arguments.get("F")) == "fp64" and torch.version.hip is not None
    options = {"matrix_instr_nonkdim": 4} if double else {}
    tensor = next(x for x in arguments.values() if isinstance(x, torch.Tensor))
    with torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext():
        kernel[(programs,)](**arguments, num_warps=warps, num_stages=stages, **options)
