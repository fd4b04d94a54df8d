"""Softmax attention in a sliding window by the compiled kernels."""

from __future__ import annotations

from ctypes import POINTER, c_int, c_int64
from functools import lru_cache
from typing import Any

from gsa.ops.calls import Gradients, Shape, Tensors, WindowCall, sums_dtype
from gsa.ops.gates import refuse_positions
from gsa.ops.native.arguments import Arguments
from gsa.ops.native.library import declare
from gsa.ops.native.results import empty, empty_like
from gsa.ops.native.structs import GsaWindowAttention, int32
from gsa.ops.sequences import sequence_bounds


def saved_shapes(call: WindowCall) -> tuple[Shape, ...]:
    """Of the log-sum-exps."""
    return ((0,) if call.save == "nothing" else tuple(call.q.shape[:3]),)


def forward(call: WindowCall) -> tuple[Tensors, Tensors]:
    """Outputs [B, T, HQ, V] and log-sum-exps [B, T, HQ]; these once more, for backward."""
    if call.check:
        refuse_positions(call.position)
    (o_shape, lse_shape), dtype = call.result_shapes(), sums_dtype(call)
    o, lse = empty(o_shape, call.q.dtype), empty(lse_shape, dtype)
    arguments = _arguments(call)
    arguments.tensors(o=o, lse=lse[..., None])
    arguments.run(_compiled(), 0)
    return (o, lse), (lse.new_empty(0) if call.save == "nothing" else lse.clone(),)


def backward(call: WindowCall, saved: Tensors, gradients: Gradients) -> Gradients:
    """Gradients of q, k and v, and of the queries, keys and values of sinks."""
    (lse,), (do, dlse), dtype = saved, gradients, sums_dtype(call)
    dq, dk, dv = map(empty_like, (call.q, call.k, call.v))
    if call.past > 0:  # then some may be seen by nobody
        dk.zero_()
        dv.zero_()
    sinks = (call.sink_q, call.sink_k, call.sink_v)
    dsink_q, dsink_k, dsink_v = (None if x is None else empty_like(x).zero_() for x in sinks)
    arguments = _arguments(call)
    arguments.tensors(
        lse=lse[..., None],
        d_o=do,
        d_lse=None if dlse is None else dlse.to(dtype)[..., None],
        dq=dq,
        dk=dk,
        dv=dv,
        dsink_q=dsink_q,
        dsink_k=dsink_k,
        dsink_v=dsink_v,
    )
    arguments.run(_compiled(), 1)
    return dq, dk, dv, dsink_q, dsink_k, dsink_v


def _arguments(call: WindowCall) -> Arguments:
    """The inputs, as C++ takes them."""
    arguments = Arguments(GsaWindowAttention(window=call.window))
    arguments.shape(call.q, call.k.shape[2], call.cu_seqlens, call.scale)
    arguments.tensors(q=call.q, k=call.k, v=call.v, sink_q=call.sink_q, sink_k=call.sink_k, sink_v=call.sink_v)
    if call.sink_k is not None:
        arguments.struct.sinks = int32("sinks", call.sink_k.shape[1])
    bounds = sequence_bounds(call.q.shape[0], call.q.shape[1], call.cu_seqlens)
    N, P = len(bounds), call.past
    befores = [P] * N if call.position is None else [max(x, 0) for x in call.position.tolist()]
    shifts = [P if call.cu_seqlens is None else (n + 1) * P for n in range(N)]
    # Of the P places before a sequence's own keys, the last so many are used.
    firsts = [start + shift - min(x, P) for (_, start, _), shift, x in zip(bounds, shifts, befores, strict=True)]
    numbers = (c_int64 * N)(*shifts), (c_int64 * N)(*firsts), (c_int64 * N)(*befores)
    arguments.struct.shifts, arguments.struct.firsts, arguments.struct.befores = numbers
    return arguments


@lru_cache(None)
def _compiled() -> Any:
    return declare("gsa_window_attention", POINTER(GsaWindowAttention), c_int)
