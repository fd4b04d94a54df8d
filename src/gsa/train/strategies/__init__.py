"""Strategies: one training loop on one process or many, by plain torch, DDP, FSDP2 or DeepSpeed (`--engine`)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from gsa.devices import find_device
from gsa.errors import GSAError
from gsa.mixers.registry import suggestion
from gsa.train.precision import AUTO
from gsa.train.strategies.base import PRECISIONS, Strategy
from gsa.train.strategies.launch import launched_processes

__all__ = ["PRECISIONS", "STRATEGIES", "Strategy", "strategy"]

ZERO_STAGES = (1, 2, 3)


def _single(precision: str, device: torch.device | None, zero_stage: int) -> Strategy:
    from gsa.train.strategies.single import Single

    return Single(precision, device)


def _ddp(precision: str, device: torch.device | None, zero_stage: int) -> Strategy:
    from gsa.train.strategies.ddp import DDP

    return DDP(precision, device)


def _fsdp(precision: str, device: torch.device | None, zero_stage: int) -> Strategy:
    from gsa.train.strategies.fsdp import FSDP

    return FSDP(precision, device)


def _deepspeed(precision: str, device: torch.device | None, zero_stage: int) -> Strategy:
    from gsa.train.strategies.deepspeed import DeepSpeed

    return DeepSpeed(precision, device, zero_stage)


STRATEGIES: dict[str, Callable[[str, torch.device | None, int], Strategy]] = {
    "single": _single,
    "ddp": _ddp,
    "fsdp": _fsdp,
    "deepspeed": _deepspeed,
}


def strategy(
    name: str, *, precision: str = "fp32", device: str | torch.device | None = None, zero_stage: int = 2
) -> Strategy:
    """The strategy of this name, connected to the other processes, if there are any.

    `auto` is ddp when a launcher (torchrun, accelerate launch) started several processes, otherwise single. Without a
    device, each process takes the GPU of its number, or the CPU if there is none. Precision `auto` is settled by
    `start`, alike on all processes. `zero_stage` is DeepSpeed's alone.
    """
    if precision not in (AUTO, *PRECISIONS):
        raise GSAError(f"engine: precision is {precision!r}, expected one of {AUTO}, {', '.join(PRECISIONS)}")
    if zero_stage not in ZERO_STAGES:
        raise GSAError(f"engine: zero_stage is {zero_stage!r}, expected 1, 2 or 3")
    processes = launched_processes()
    if name == "auto":
        name = "ddp" if processes > 1 else "single"
    if name not in STRATEGIES:
        raise GSAError(
            f"engine: unknown engine {name!r}{suggestion(name, STRATEGIES)}, expected auto, {', '.join(STRATEGIES)}"
        )
    if name == "single" and processes > 1:
        raise GSAError(
            f"engine single: a launcher started {processes} processes, which would train {processes} times the same; "
            "choose ddp, fsdp or deepspeed, or start one process"
        )
    return STRATEGIES[name](precision, None if device is None else find_device(str(device), "engine"), zero_stage)
