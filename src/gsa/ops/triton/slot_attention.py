"""Gated slot attention on GPUs: the kernels put together, forward and backward.

It is two passes of gated linear attention. They share what is written to the slots; between them lie the slot scores.

Shape letters: B batch, T time, H key/value heads, K, V widths, M slots, N sequences.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from gsa.ops.calls import Gradients, Shape, SlotCall, Tensors
from gsa.ops.gates import refuse_gates
from gsa.ops.triton.backward_pass import GradientBuffers
from gsa.ops.triton.backward_pass import backward as backward_pass
from gsa.ops.triton.call import SharedArguments, dense, dense_like, early, scaled_before
from gsa.ops.triton.forward_pass import Pass
from gsa.ops.triton.jit.readout import differentiate_readout
from gsa.ops.triton.launch import launch
from gsa.ops.triton.plan import power_of_two

ENTRIES_AT_ONCE = 2048


def saved_shapes(call: SlotCall) -> tuple[Shape, ...]:
    """Of the slot scores, and of the kept states of both passes."""
    shared, K, V, M = SharedArguments(call), call.k.shape[3], call.v.shape[3], call.g.shape[3]
    return call.scores_shape(), shared.kept_shape(call.save, K, M), shared.kept_shape(call.save, M, V)


def forward(call: SlotCall) -> tuple[Tensors, Tensors]:
    """Outputs [B, T, HQ, V] and both final memories; slot scores [B, T, HQ, M] and kept states of both passes."""
    if call.check:
        refuse_gates(g=call.g)
    q, scale, _ = scaled_before(call.q, call.scale)
    shared = SharedArguments(call)
    scores = shared.late(call.g.shape[3])
    find, fetch = _passes(call, shared, q, scale, scores)
    _, final_k, kept_k = find.forward(dense(call.initial_k), call.save, scores)
    o, final_v, kept_v = fetch.forward(dense(call.initial_v), call.save, q.new_empty(call.result_shapes()[0]))
    return (o, final_k, final_v), (scores.new_empty(0) if call.save == "nothing" else scores, kept_k, kept_v)


def backward(call: SlotCall, saved: Tensors, gradients: Gradients) -> Gradients:
    """Gradients of q, k, v, g, s and both initial memories."""
    (scores, kept_k, kept_v), (do, dfinal_k, dfinal_v) = saved, gradients
    assert do is not None
    queries, scale, after = scaled_before(call.q, call.scale)
    shared = SharedArguments(call)
    find, fetch = _passes(call, shared, queries, scale, scores)
    dweights, dgate = shared.late(call.g.shape[3]), shared.empty(*call.g.shape)
    dwrite = None if call.s is None else shared.empty(*call.s.shape)
    dq, dk, dv, dg = map(dense_like, (call.q, call.k, call.v, call.g))
    ds = None if call.s is None else dense_like(call.s)
    into = GradientBuffers(dweights, dwrite, dv, dgate, None)
    dinitial_v = backward_pass(fetch, do.contiguous(), dense(dfinal_v), dense(call.initial_v), kept_v, call.save, into)

    dscores = _through_readout(shared, scores, dweights, scale, call.readout)
    find = replace(find, scale=1.0)  # dscores has it already
    into = GradientBuffers(dq, dk, ds, None, dg, dwrite, dgate)
    dinitial_k = backward_pass(find, dscores, dense(dfinal_k), dense(call.initial_k), kept_k, call.save, into)
    return dq if after == 1 else dq * after, dk, dv, dg, ds, dinitial_k, dinitial_v


def _passes(call: SlotCall, shared: SharedArguments, q: Tensor, scale: float, scores: Tensor) -> tuple[Pass, Pass]:
    """Queries find their slots, with the gate on the value side; slot weights read the values, with it on the other."""
    writes = early(shared, dense(call.s), call.g.contiguous(), call.g.shape[3])
    keys, values = (early(shared, x.contiguous(), None, x.shape[3]) for x in (call.k, call.v))
    find = Pass(shared, q.contiguous(), keys, writes, scale)
    return find, Pass(shared, scores, writes, values, 1.0, call.readout)


def _through_readout(shared: SharedArguments, scores: Tensor, dweights: Tensor, scale: float, readout: str) -> Tensor:
    """The gradients of slot scores, times the scale of queries."""
    dscores, M = torch.empty_like(scores), scores.shape[3]
    rows, BM = shared.tokens * shared.H * shared.R, power_of_two(M)
    at_once = max(1, min(16, ENTRIES_AT_ONCE // BM))
    launch(
        differentiate_readout,
        -(-rows // at_once),
        4,
        1,
        slots=scores,
        dweights=dweights,
        dslots=dscores,
        scale=scale,
        rows=rows,
        M=M,
        READOUT=readout,
        ROWS=at_once,
        BM=BM,
    )
    return dscores
