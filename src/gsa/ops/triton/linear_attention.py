"""Gated linear attention on GPUs: the kernels put together, forward and backward.

Shape letters: B batch, T time, H key/value heads, K, V widths, N sequences.
"""

from __future__ import annotations

from torch import Tensor

from gsa.ops.calls import Gradients, LinearCall, Shape, Tensors
from gsa.ops.gates import refuse_gates
from gsa.ops.triton.backward_pass import GradientBuffers
from gsa.ops.triton.backward_pass import backward as backward_pass
from gsa.ops.triton.call import SharedArguments, dense, dense_like, early, scaled_before
from gsa.ops.triton.forward_pass import Pass


def saved_shapes(call: LinearCall) -> tuple[Shape, ...]:
    """Of the kept states."""
    return (SharedArguments(call).kept_shape(call.save, call.k.shape[3], call.v.shape[3]),)


def forward(call: LinearCall) -> tuple[Tensors, Tensors]:
    """Outputs [B, T, HQ, V] and final states [N, H, K, V]; kept states."""
    if call.check:
        refuse_gates(gk=call.gk, gv=call.gv)
    q, scale, _ = scaled_before(call.q, call.scale)
    o = q.new_empty(call.result_shapes()[0])
    o, final, kept = _pass(call, q, scale).forward(dense(call.initial), call.save, o)
    return (o, final), (kept,)


def backward(call: LinearCall, saved: Tensors, gradients: Gradients) -> Gradients:
    """Gradients of q, k, v, gk, gv and the initial states."""
    (kept,), (do, dfinal) = saved, gradients
    assert do is not None
    queries, scale, after = scaled_before(call.q, call.scale)
    dq, dk, dv = map(dense_like, (call.q, call.k, call.v))
    dgk, dgv = (None if g is None else dense_like(g) for g in (call.gk, call.gv))
    x, into = _pass(call, queries, scale), GradientBuffers(dq, dk, dv, dgk, dgv)
    dinitial = backward_pass(x, do.contiguous(), dense(dfinal), dense(call.initial), kept, call.save, into)
    return dq if after == 1 else dq * after, dk, dv, dgk, dgv, dinitial


def _pass(call: LinearCall, q: Tensor, scale: float) -> Pass:
    shared = SharedArguments(call)
    keys = early(shared, call.k.contiguous(), dense(call.gk), call.k.shape[3])
    values = early(shared, call.v.contiguous(), dense(call.gv), call.v.shape[3])
    return Pass(shared, q.contiguous(), keys, values, scale)
