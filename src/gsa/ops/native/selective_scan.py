"""Mamba's selective scan by the compiled kernels.

Shape letters: B batch, T time, E channels, S states of a channel, N sequences.
"""

from __future__ import annotations

from ctypes import POINTER, c_int
from functools import lru_cache
from typing import Any

from torch import Tensor

from gsa.ops.calls import Gradients, ScanCall, Shape, Tensors, sums_dtype
from gsa.ops.gates import refuse_rates
from gsa.ops.memory import require_memory
from gsa.ops.native.arguments import Arguments
from gsa.ops.native.library import declare
from gsa.ops.native.results import empty, empty_like
from gsa.ops.native.structs import SCAN_CHUNK, SCAN_PADDING, GsaSelectiveScan
from gsa.ops.sequences import max_marks


def saved_shapes(call: ScanCall) -> tuple[Shape, ...]:
    """Of the kept states [S, E], with E padded."""
    E, S = call.A.shape
    count, padded = max_marks(call.u, call.cu_seqlens, call.save, SCAN_CHUNK), -(-E // SCAN_PADDING) * SCAN_PADDING
    return ((count * S * padded,),)


def forward(call: ScanCall) -> tuple[Tensors, Tensors]:
    """Outputs [B, T, E] and final states [N, E, S]; kept states."""
    dtype, (y_shape, final_shape), (kept_shape,) = sums_dtype(call), call.result_shapes(), saved_shapes(call)
    y, final, kept = empty(y_shape, call.u.dtype), empty(final_shape, dtype), empty(kept_shape, dtype)
    arguments = _arguments(call, y=y)
    arguments.states(dtype, initial=call.initial)
    arguments.results(final=final)
    if call.save != "nothing":
        arguments.results(kept=kept)
    if not arguments.run(_compiled(), 0) and call.check:
        refuse_rates(call.A, call.dt)
    return (y, final), (kept,)


def backward(call: ScanCall, saved: Tensors, gradients: Gradients) -> Gradients:
    """Gradients of u, dt, A, B, C and the initial states."""
    (kept,), (dy, dfinal), dtype = saved, gradients, sums_dtype(call)
    du, ddt, dA, dB, dC = map(empty_like, (call.u, call.dt, call.A, call.B, call.C))
    dinitial = empty(call.result_shapes()[1], dtype)
    arguments = _arguments(call, d_y=dy, du=du, d_dt=ddt, dA=dA, dB=dB, dC=dC)
    arguments.states(dtype, kept=kept, dfinal=dfinal)
    arguments.results(dinitial=dinitial)
    arguments.run(_compiled(), 1)
    return du, ddt, dA, dB, dC, dinitial


def _arguments(call: ScanCall, **results: Tensor | None) -> Arguments:
    """The inputs and where results go: [B, T, width] as those of one head, and A [E, S] as a token of E heads."""
    tensors = {"u": call.u, "dt": call.dt, "A": call.A, "B": call.B, "C": call.C, **results}
    require_memory(tensors)  # which views of them would ask for, too
    arguments = Arguments(GsaSelectiveScan())
    arguments.tensors(
        **{name: x[None, None] if x.dim() == 2 else x.unsqueeze(2) for name, x in tensors.items() if x is not None}
    )
    arguments.shape(call.u.unsqueeze(2), 1, call.cu_seqlens)
    return arguments


@lru_cache(None)
def _compiled() -> Any:
    return declare("gsa_selective_scan", POINTER(GsaSelectiveScan), c_int)
