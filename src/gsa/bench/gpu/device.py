"""The GPU that benchmarks run on, and who else computes gated slot attention there."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from gsa.errors import GSAError

if TYPE_CHECKING:
    import torch


def find_gpu(name: str) -> torch.device:
    """The GPU called `name` ("cuda", "cuda:1"), or a sentence about why it is not there."""
    import torch

    try:
        device = torch.device(name)
    except RuntimeError:
        raise GSAError(f"bench: --device must be cpu, cuda or cuda:N, got {name!r}") from None
    if device.type != "cuda":
        raise GSAError(f"bench: --device must be cpu, cuda or cuda:N, got {name!r}")
    if not torch.cuda.is_available():
        raise GSAError(f"bench: --device {name}: no NVIDIA or AMD GPU was found (torch {torch.__version__})")
    index = torch.cuda.current_device() if device.index is None else device.index
    if index >= torch.cuda.device_count():
        raise GSAError(f"bench: --device {name}: there are {torch.cuda.device_count()} GPUs, counted from 0")
    return torch.device("cuda", index)


def describe_gpu(device: torch.device) -> dict[str, Any]:
    """What a reader of the figures has to know: the GPU and the versions of everything that has a part in them."""
    import torch

    properties = torch.cuda.get_device_properties(device)
    return {
        "gpu": properties.name,
        "memory_gib": properties.total_memory / 2**30,
        "processors": properties.multi_processor_count,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "triton": installed("triton"),
        "fla": installed("fla-core"),
    }


def installed(package: str) -> str | None:
    """Its version, if it is installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def fla_functions() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """flash-linear-attention's gated slot attention, by chunks and by single tokens, if it is installed."""
    if installed("fla-core") is None:
        return None
    from fla.ops.gsa import chunk_gsa, fused_recurrent_gsa

    return chunk_gsa, fused_recurrent_gsa
