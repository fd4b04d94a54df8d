"""Gated linear attention by the compiled kernels."""

from __future__ import annotations

from ctypes import POINTER, c_int
from functools import lru_cache
from typing import Any

from gsa.ops.calls import Gradients, LinearCall, Shape, Tensors, sums_dtype
from gsa.ops.gates import refuse_gates
from gsa.ops.native.arguments import Arguments, kept_states
from gsa.ops.native.library import declare
from gsa.ops.native.results import empty, empty_like
from gsa.ops.native.structs import GsaLinearAttention


def saved_shapes(call: LinearCall) -> tuple[Shape, ...]:
    """Of the kept states [K, V]."""
    (H, K), V = call.k.shape[2:], call.v.shape[3]
    return ((kept_states(call) * H * K * V,),)


def forward(call: LinearCall) -> tuple[Tensors, Tensors]:
    """Outputs [B, T, HQ, V] and final states [N, H, K, V]; kept states."""
    dtype, (o_shape, final_shape), (kept_shape,) = sums_dtype(call), call.result_shapes(), saved_shapes(call)
    o, final, kept = empty(o_shape, call.q.dtype), empty(final_shape, dtype), empty(kept_shape, dtype)
    arguments = _arguments(call)
    arguments.tensors(o=o)
    arguments.states(dtype, initial=call.initial)
    arguments.results(final=final, kept=kept)
    if not arguments.run(_compiled(), 0) and call.check:
        refuse_gates(gk=call.gk, gv=call.gv)
    return (o, final), (kept,)


def backward(call: LinearCall, saved: Tensors, gradients: Gradients) -> Gradients:
    """Gradients of q, k, v, gk, gv and the initial states."""
    (kept,), (do, dfinal), dtype = saved, gradients, sums_dtype(call)
    dq, dk, dv = map(empty_like, (call.q, call.k, call.v))
    dgk, dgv = (None if x is None else empty_like(x) for x in (call.gk, call.gv))
    dinitial = empty(call.result_shapes()[1], dtype)
    arguments = _arguments(call)
    arguments.tensors(d_o=do, dq=dq, dk=dk, dv=dv, dgk=dgk, dgv=dgv)
    arguments.states(dtype, kept=kept, dfinal=dfinal)
    arguments.results(dinitial=dinitial)
    arguments.run(_compiled(), 1)
    return dq, dk, dv, dgk, dgv, dinitial


def _arguments(call: LinearCall) -> Arguments:
    """The inputs, as C++ takes them."""
    arguments = Arguments(GsaLinearAttention())
    arguments.shape(call.q, call.k.shape[2], call.cu_seqlens, call.scale, call.save)
    arguments.tensors(q=call.q, k=call.k, v=call.v, gk=call.gk, gv=call.gv)
    return arguments


@lru_cache(None)
def _compiled() -> Any:
    return declare("gsa_linear_attention", POINTER(GsaLinearAttention), c_int)
