"""Whether the GPU engine can run, without importing Triton unless it is there to be used."""

from __future__ import annotations

import os

import torch

from gsa.extras import installed, lacks


def unavailable(device: torch.device | None) -> str | None:
    """Why this engine cannot run on a device (None: any), or None if it can."""
    if not installed("triton"):
        return lacks("triton")
    if interpreted():
        if device is not None and device.type != "cpu":
            return f"TRITON_INTERPRET=1 runs kernels on the CPU, and the tensors are on {device.type}"
        return None
    if device is not None and device.type == "cuda":
        return _too_old(device)
    if device is not None:
        return f"it runs on NVIDIA and AMD GPUs, not on {device.type} (TRITON_INTERPRET=1 runs it slowly on a CPU)"
    return None if torch.cuda.is_available() else "no NVIDIA or AMD GPU was found (TRITON_INTERPRET=1 runs it on a CPU)"


def _too_old(device: torch.device) -> str | None:
    if torch.version.hip is not None or not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability(device)
    return None if major >= 8 else f"it needs matrix units of compute capability 8.0, and {device} has {major}.{minor}"


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter. Triton reads this where a kernel is defined, so set it first."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on", "y")
