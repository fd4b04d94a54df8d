"""The precision of a run: what `auto` takes on a device, and what bf16 costs where nothing computes in it.

CPUs with units for it multiply in bf16 two to three times as fast as in fp32; on others torch needs a hundred times as
long. So the CPU is asked, and never a clock: the choice is the same from run to run.
"""

from __future__ import annotations

import platform

import torch

from gsa.errors import GSAError
from gsa.ops.matmul import UNITS as PRODUCT_UNITS

AUTO = "auto"
UNITS = (PRODUCT_UNITS["bf16"], "AMX BF16")
"""The units of CPUs that torch uses for products in bf16: the one of our own products, and one that only torch uses."""
X86 = ("x86_64", "AMD64", "i686")


def bf16_unit(device: torch.device) -> str | None:
    """What multiplies in bf16 on a device; None if nothing does."""
    if device.type == "cuda":
        return "the GPU" if torch.cuda.is_bf16_supported(including_emulation=False) else None
    if device.type != "cpu":
        return None
    has = (torch.cpu._is_avx512_bf16_supported(), torch.cpu._is_amx_tile_supported())
    return next((name for name, there in zip(UNITS, has, strict=True) if there), None)


def automatic(device: torch.device) -> str:
    """What `auto` takes on a device."""
    return "fp32" if bf16_unit(device) is None else "bf16"


def refuse_missing_unit(precision: str, device: torch.device) -> None:
    """Raises if a run is to begin in bf16 where nothing computes in it, as far as known: on x86 CPUs and GPUs."""
    if precision != "bf16" or bf16_unit(device) is not None:
        return
    if device.type == "cuda" or platform.machine() in X86:
        raise GSAError(f"train: {_without_unit(device)}; choose {'fp16' if device.type == 'cuda' else 'auto'} or fp32")


def _without_unit(device: torch.device) -> str:
    if device.type == "cuda":
        return "precision bf16: this GPU has no unit for it"
    return (
        f"precision bf16: this {device.type.upper()} has no unit for it ({', '.join(UNITS)}), and products take about "
        "a hundred times as long as in fp32"
    )


def told(precision: str, device: torch.device, *, asked: str, goes_on: bool) -> str | None:
    """A line about the precision of a run, where `asked` was in its settings; None if there is nothing to say."""
    unit = bf16_unit(device)
    if precision == "bf16" and unit is None:
        return _without_unit(device)  # of a run that goes on: another began elsewhere
    if asked != AUTO:
        return None
    if goes_on:
        return f"precision {precision}, as the run began"
    if precision != automatic(device):
        return f"precision {precision}: chosen by auto, as not every process has a unit for bf16"
    why = f"{unit} is there" if unit is not None else f"this {device.type.upper()} has no unit for bf16"
    return f"precision {precision}: chosen by auto, {why}"
