"""Calls of the compiled selective scan: tensors to pointers. The names and their order mirror csrc/native.h.

Shape letters: B batch, T time, E channels, S states of a channel, N sequences.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER
from functools import lru_cache

from torch import Tensor

from gsa.ops.layout import sequence_count
from gsa.ops.native.kernels import Call
from gsa.ops.native.library import library
from gsa.ops.native.results import empty, empty_like
from gsa.ops.native.structs import SCAN_CHUNK, SCAN_PADDING, GsaSelectiveScan
from gsa.ops.operators import laid_out_like
from gsa.ops.state import compute_dtype


@lru_cache(None)
def _compiled() -> ctypes.CDLL:
    lib = library()
    lib.gsa_selective_scan.argtypes = [POINTER(GsaSelectiveScan), ctypes.c_int]
    return lib


def kept_shape(u: Tensor, A: Tensor, cu_seqlens: Tensor | None, keep: str) -> tuple[int, ...]:
    """Of the states [S, E] that forward keeps, from shapes alone."""
    if keep == "nothing":
        count = 0
    elif cu_seqlens is None:
        count = u.shape[0] * -(-u.shape[1] // SCAN_CHUNK)
    else:
        count = u.shape[1] // SCAN_CHUNK + cu_seqlens.shape[0] - 1
    return (count, A.shape[1], -(-A.shape[0] // SCAN_PADDING) * SCAN_PADDING)


def _call(cu_seqlens: Tensor | None, **tensors: Tensor) -> Call:
    """The call with these tensors in it, [B, T, width] as those of one head and A [E, S] as a token of E heads."""
    call = Call(GsaSelectiveScan())
    heads = {name: x[None, None] if x.dim() == 2 else x.unsqueeze(2) for name, x in tensors.items()}
    call.tensors(**heads)
    call.shape(heads["u"], heads["u"], cu_seqlens, 1.0, "nothing")
    return call


def forward(
    u: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    initial: Tensor | None,
    cu_seqlens: Tensor | None,
    keep: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """y [B, T, E], final states [N, E, S], kept states."""
    dtype = compute_dtype(u.dtype)
    y = empty(tuple(u.shape), u.dtype)
    final = empty((sequence_count(u, cu_seqlens), *A.shape), dtype)
    kept = empty(kept_shape(u, A, cu_seqlens, keep), dtype)
    call = _call(cu_seqlens, u=u, dt=dt, A=A, B=B, C=C, y=y)
    call.states(dtype, initial=initial, final=final, kept=None if keep == "nothing" else kept)
    call.run(_compiled().gsa_selective_scan, 0)
    return y, final, kept


def backward(
    dy: Tensor,
    dfinal: Tensor | None,
    u: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    initial: Tensor | None,
    cu_seqlens: Tensor | None,
    kept: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of u, dt, A, B, C and the initial states."""
    du, ddt, dA, dB, dC = map(empty_like, (u, dt, A, B, C))
    dinitial = empty((sequence_count(u, cu_seqlens), *A.shape), kept.dtype)
    call = _call(cu_seqlens, u=u, dt=dt, A=A, B=B, C=C, d_y=dy, du=du, d_dt=ddt, dA=dA, dB=dB, dC=dC)
    call.states(kept.dtype, kept=kept, dfinal=dfinal, dinitial=dinitial)
    call.run(_compiled().gsa_selective_scan, 1)
    du, ddt, dA, dB, dC = map(laid_out_like, (u, dt, A, B, C), (du, ddt, dA, dB, dC))
    return du, ddt, dA, dB, dC, dinitial
