"""Matrix products over many tokens in the native engine: arguments have been checked, pointers are passed."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gsa.errors import GSAError
from gsa.ops.memory import address
from gsa.ops.native.library import check_memory, declare
from gsa.ops.native.structs import COMPUTE_CODES, INPUT_CODES, int32

if TYPE_CHECKING:
    from gsa.ops.weights import PackedWeight


@lru_cache(None)
def _functions() -> tuple[Any, Any, Any]:
    integer, pointer, size = ctypes.c_int, ctypes.c_void_p, ctypes.c_int64
    arguments = [pointer, size, integer, pointer, pointer, ctypes.c_float, size, integer, pointer, pointer, integer]
    exercise = declare("gsa_exercise", integer, size, integer)
    exercise.restype = size
    return declare("gsa_has_unit", integer), declare("gsa_matmul", *arguments), exercise


def has_unit(compute: str) -> bool:
    """Whether the processor has a unit for products in "bf16" or "int8", and the instruction set in use has it too."""
    return bool(_functions()[0](COMPUTE_CODES[compute]))


def matmul(
    weights: Sequence[PackedWeight],
    x: Tensor,
    count: int,
    compute: str,
    norm: tuple[Tensor, float] | None,
    swiglu: bool,
    residual: Tensor | None,
    y: Tensor,
) -> None:
    """Fills y [..., N] with the products of all weights."""
    kind, norm_weight, epsilon = "swiglu" if swiglu else "plain", None, 0.0
    if norm is not None:
        kind, norm_weight, epsilon = "rms_norm", address("matmul: the weight of norm", norm[0]), norm[1]
    matrices = [weight.matrix() for weight in weights]  # held until the call is over: others may replace them
    code = _functions()[1](
        (ctypes.c_void_p * len(matrices))(*(matrix.address for matrix in matrices)),
        len(matrices),
        INPUT_CODES[kind],
        address("matmul: x", x),
        norm_weight,
        epsilon,
        int32("columns", count),
        COMPUTE_CODES[compute],
        None if residual is None else address("matmul: residual", residual),
        address("matmul: out", y),
        torch.get_num_threads(),
    )
    check_memory(code, "matmul")


def unit_rate(compute: str, seconds: float) -> float:
    """Operations a second, each half a multiplication and addition, that the unit for "bf16" or "int8" does at most."""
    if not has_unit(compute):
        raise GSAError(f"unit_rate: there is no unit for {compute} here")
    rounds, best, end = 1 << 18, 0.0, time.perf_counter() + seconds
    while best == 0 or time.perf_counter() < end:
        begun = time.perf_counter()
        done = _functions()[2](COMPUTE_CODES[compute], rounds, torch.get_num_threads())
        best = max(best, 2 * done / (time.perf_counter() - begun))
    return best
