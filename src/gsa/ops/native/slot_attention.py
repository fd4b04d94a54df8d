"""Gated slot attention by the compiled kernels."""

from __future__ import annotations

from ctypes import POINTER, c_int
from functools import lru_cache
from typing import Any

from gsa.ops.calls import Gradients, Shape, SlotCall, Tensors, sums_dtype
from gsa.ops.gates import refuse_gates
from gsa.ops.native.arguments import Arguments, kept_states
from gsa.ops.native.library import declare
from gsa.ops.native.results import empty, empty_like
from gsa.ops.native.structs import READOUT_CODES, GsaSlotAttention


def saved_shapes(call: SlotCall) -> tuple[Shape, ...]:
    """Of the slot scores, and of the kept states [K, M] and [M, V] of every head, of both passes."""
    count, (H, K), V, M = kept_states(call), call.k.shape[2:], call.v.shape[3], call.g.shape[3]
    return call.scores_shape(), (count * H * K * M,), (count * H * M * V,)


def forward(call: SlotCall) -> tuple[Tensors, Tensors]:
    """Outputs [B, T, HQ, V] and both final memories; slot scores [B, T, HQ, M] and kept states of both passes."""
    dtype, (o_shape, *final_shapes) = sums_dtype(call), call.result_shapes()
    o = empty(o_shape, call.q.dtype)
    final_k, final_v = (empty(shape, dtype) for shape in final_shapes)
    scores, kept_k, kept_v = (empty(shape, dtype) for shape in saved_shapes(call))
    arguments = _arguments(call)
    arguments.tensors(o=o, slots=None if call.save == "nothing" else scores)
    arguments.states(dtype, initial_k=call.initial_k, initial_v=call.initial_v)
    arguments.results(final_k=final_k, final_v=final_v, kept_k=kept_k, kept_v=kept_v)
    if not arguments.run(_compiled(), 0) and call.check:
        refuse_gates(g=call.g)
    return (o, final_k, final_v), (scores, kept_k, kept_v)


def backward(call: SlotCall, saved: Tensors, gradients: Gradients) -> Gradients:
    """Gradients of q, k, v, g, s and both initial memories."""
    (scores, kept_k, kept_v), (do, dfinal_k, dfinal_v), dtype = saved, gradients, sums_dtype(call)
    dq, dk, dv, dg = map(empty_like, (call.q, call.k, call.v, call.g))
    ds = None if call.s is None else empty_like(call.s)
    dinitial_k, dinitial_v = (empty(shape, dtype) for shape in call.result_shapes()[1:])
    arguments = _arguments(call)
    arguments.tensors(slots=scores, d_o=do, dq=dq, dk=dk, dv=dv, dg=dg, ds=ds)
    arguments.states(dtype, kept_k=kept_k, kept_v=kept_v, dfinal_k=dfinal_k, dfinal_v=dfinal_v)
    arguments.results(dinitial_k=dinitial_k, dinitial_v=dinitial_v)
    arguments.run(_compiled(), 1)
    return dq, dk, dv, dg, ds, dinitial_k, dinitial_v


def _arguments(call: SlotCall) -> Arguments:
    """The inputs, as C++ takes them."""
    arguments = Arguments(GsaSlotAttention(readout=READOUT_CODES[call.readout]))
    arguments.shape(call.q, call.k.shape[2], call.cu_seqlens, call.scale, call.save)
    arguments.tensors(q=call.q, k=call.k, v=call.v, g=call.g, s=call.s)
    return arguments


@lru_cache(None)
def _compiled() -> Any:
    return declare("gsa_slot_attention", POINTER(GsaSlotAttention), c_int)
