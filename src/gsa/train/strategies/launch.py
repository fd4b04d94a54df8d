"""What a launcher says to the processes it starts: how many they are, and which of them this is."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from gsa.devices import best_device, use_device
from gsa.errors import GSAError

SAID_BY_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
# How long processes wait for each other: to connect at all, and later, when one of them may be writing a checkpoint.
CONNECT_TIMEOUT = timedelta(minutes=5)
COLLECTIVE_TIMEOUT = timedelta(minutes=30)


@dataclass(frozen=True)
class Place:
    """Which of how many processes this is, and on which device."""

    rank: int
    world_size: int
    device: torch.device
    opened: bool
    """Whether the process group was opened here, and so is closed here."""


def launched_processes() -> int:
    """How many processes a launcher started; 1 without a launcher."""
    return _number("WORLD_SIZE", 1) if "WORLD_SIZE" in os.environ else 1


def connect(engine: str, device: torch.device | None) -> Place:
    """Connects to the other processes, or takes the connection that there is.

    Processes talk through gloo on CPUs and through nccl on GPUs.
    """
    opened = not dist.is_initialized()
    if opened:
        missing = [name for name in SAID_BY_LAUNCHER if name not in os.environ]
        if missing:
            raise GSAError(
                f"engine {engine}: no launcher started this process ({', '.join(missing)} not set); start it with "
                f"`torchrun --nproc-per-node N -m gsa train ... --engine {engine}`, or choose --engine single"
            )
    device = _own_device(device)
    if opened:
        _open(engine, device)
    return Place(dist.get_rank(), dist.get_world_size(), device, opened)


def _own_device(device: torch.device | None) -> torch.device:
    """The device that was asked for; of several GPUs, that with this process's number."""
    kind = (device or best_device()).type
    if kind == "cuda":
        index = device.index if device is not None and device.index is not None else _number("LOCAL_RANK", 0)
        if index >= torch.cuda.device_count():
            raise GSAError(f"engine: there is no GPU {index} for this process, there are {torch.cuda.device_count()}")
        own = torch.device("cuda", index)
        use_device(own)
        return own
    return torch.device(kind)


def _open(engine: str, device: torch.device) -> None:
    """Opens the process group; processes that do not come are named after a while."""
    rank, world_size = _number("RANK", 0), _number("WORLD_SIZE", 1)
    where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    if rank >= world_size:
        raise GSAError(f"engine {engine}: RANK is {rank}, expected less than WORLD_SIZE {world_size}")
    try:
        store, _, _ = next(rendezvous("env://", rank, world_size, timeout=CONNECT_TIMEOUT))
        store = PrefixStore("gsa", store)
        # A process group would wait for the others as long as for a checkpoint.
        store.set(f"here/{rank}", "")
        store.wait([f"here/{other}" for other in range(world_size)], CONNECT_TIMEOUT)
        dist.init_process_group(
            backend="nccl" if device.type == "cuda" else "gloo",
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=COLLECTIVE_TIMEOUT,
        )
    except dist.DistError as error:
        raise GSAError(
            f"engine {engine}: process {rank} of {world_size} could not connect to the others at {where} within "
            f"{CONNECT_TIMEOUT.total_seconds():.0f} s; are all of them started, and is the address reachable? "
            f"({str(error).splitlines()[0]})"
        ) from None


def _number(variable: str, least: int) -> int:
    value = os.environ.get(variable, "")
    if not value.isdecimal() or int(value) < least:
        raise GSAError(f"engine: {variable} is {value!r} in the environment, expected a whole number from {least}")
    return int(value)
