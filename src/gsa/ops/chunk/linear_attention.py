"""Gated linear attention in chunks, in torch: forward and backward.

Segments of chunks are worked through in time order (backward: in reverse). Inside a segment everything is a batched
matmul over all chunks, but for the scan that carries the state from chunk to chunk.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gsa.ops.calls import Gradients, LinearCall, Shape, Tensors
from gsa.ops.chunk.decay import Decay, Early, GateGradient, Late
from gsa.ops.chunk.grid import Grid, Segment, grid_of, plan_of
from gsa.ops.chunk.passes import Pass
from gsa.ops.chunk.scan import Memory, Scan, memory_shape
from gsa.ops.chunk.scratch import trims_scratch
from gsa.ops.gates import refuse_gates


def saved_shapes(call: LinearCall) -> tuple[Shape, ...]:
    """Of the states that forward keeps: at the beginnings of segments or of chunks."""
    H, K = call.k.shape[2:]
    return (memory_shape(plan_of(call), call.save, H, K, call.v.shape[3]),)


@trims_scratch
def forward(call: LinearCall) -> tuple[Tensors, Tensors]:
    """Outputs [B, T, HQ, V] and final states [N, H, K, V]; kept states."""
    if call.check:
        refuse_gates(gk=call.gk, gv=call.gv)
    grid = grid_of(call)
    o = call.q.new_empty(call.result_shapes()[0])
    (shape,) = saved_shapes(call)
    kept = call.q.new_empty(shape, dtype=grid.dtype)
    memory = Memory("states", grid, call.save, kept, call.initial)
    for seg in grid.segments:
        x = _pass(call, grid, seg)
        grid.store(o, x.forward(memory.forward(seg, x)), seg)
    return (o, memory.final), (kept,)


@trims_scratch
def backward(call: LinearCall, saved: Tensors, gradients: Gradients) -> Gradients:
    """Gradients of q, k, v, gk, gv and the initial states."""
    (kept,), (do, dfinal) = saved, gradients
    assert do is not None
    grid = grid_of(call)
    dq, dk, dv = map(torch.empty_like, (call.q, call.k, call.v))
    dgk, dgv = (None if g is None else torch.empty_like(g) for g in (call.gk, call.gv))
    memory = Memory("states", grid, call.save, kept, call.initial)
    gradient = Scan("dstates", grid, memory.scan.shape, dfinal)
    for seg in reversed(grid.segments):
        x = _pass(call, grid, seg)
        S = memory.replay(seg, x)
        key_gate = None if x.k.decay is None else GateGradient(x.k.decay)
        value_gate = None if x.v.decay is None else GateGradient(x.v.decay)
        o = None if value_gate is None else x.forward(S)
        grads = x.backward(o, grid.load("do", do, seg), S, seg, gradient, key_gate, value_gate)
        for out, grad, factor in zip((dq, dk, dv), grads, (call.scale, 1.0, 1.0), strict=True):
            grid.store(out, grad, seg, factor)
        if dgk is not None and key_gate is not None:
            grid.store(dgk, key_gate.result(), seg)
        if dgv is not None and value_gate is not None:
            grid.store(dgv, value_gate.result(), seg)
    return dq, dk, dv, dgk, dgv, gradient.leaving


def _pass(call: LinearCall, grid: Grid, seg: Segment) -> Pass:
    by_key, by_value = _decay("gk", call.gk, grid, seg), _decay("gv", call.gv, grid, seg)
    return Pass(
        "gla",
        Late("q", grid.load("q", call.q, seg, call.scale), by_key, grid.scratch),
        Early("k", grid.load("k", call.k, seg), by_key, grid.scratch),
        Early("v", grid.load("v", call.v, seg), by_value, grid.scratch),
        grid.scratch,
    )


def _decay(name: str, gate: Tensor | None, grid: Grid, seg: Segment) -> Decay | None:
    return None if gate is None else Decay(name, grid.load(name, gate, seg), seg.held, grid.scratch)
