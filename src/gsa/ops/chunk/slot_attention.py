"""Gated slot attention in chunks, in torch: two passes of gated linear attention, forward and backward.

The backward pass is written by hand. It starts from the inputs, the slot scores of the first pass, and the states that
the forward pass kept: those at the beginnings of segments (save="marks"; the others are computed again) or those before
every chunk (save="states").

Shape letters: n chunks of all lanes and heads, R queries per key/value head, C tokens in a chunk; K, V, M as always.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gsa.ops.calls import Gradients, Shape, SlotCall, Tensors
from gsa.ops.chunk.decay import Decay, Early, GateGradient, Late
from gsa.ops.chunk.grid import Grid, Segment, grid_of, plan_of
from gsa.ops.chunk.passes import Pass
from gsa.ops.chunk.scan import Memory, Scan, memory_shape
from gsa.ops.chunk.scratch import trims_scratch
from gsa.ops.gates import refuse_gates
from gsa.ops.readout import READOUTS


def saved_shapes(call: SlotCall) -> tuple[Shape, ...]:
    """Of the slot scores, and of the states that forward keeps of both passes."""
    plan, (H, K), V, M = plan_of(call), call.k.shape[2:], call.v.shape[3], call.g.shape[3]
    return call.scores_shape(), memory_shape(plan, call.save, H, K, M), memory_shape(plan, call.save, H, M, V)


@trims_scratch
def forward(call: SlotCall) -> tuple[Tensors, Tensors]:
    """Outputs [B, T, HQ, V] and both final memories; slot scores [B, T, HQ, M] and kept states of both passes."""
    if call.check:
        refuse_gates(g=call.g)
    grid, readout = grid_of(call), READOUTS[call.readout]
    o = call.q.new_empty(call.result_shapes()[0])
    scores, kept_k, kept_v = (call.q.new_empty(shape, dtype=grid.dtype) for shape in saved_shapes(call))
    keys = Memory("keys", grid, call.save, kept_k, call.initial_k)
    values = Memory("values", grid, call.save, kept_v, call.initial_v)
    for seg in grid.segments:
        write = _write(call, grid, seg)
        x = _key_pass(call, grid, seg, write)
        found = x.forward(keys.forward(seg, x))
        if call.save != "nothing":
            grid.store(scores, found, seg)
        x = _value_pass(call, grid, seg, readout.apply(found), write)
        grid.store(o, x.forward(values.forward(seg, x)), seg)
    return (o, keys.final, values.final), (scores, kept_k, kept_v)


@trims_scratch
def backward(call: SlotCall, saved: Tensors, gradients: Gradients) -> Gradients:
    """Gradients of q, k, v, g, s and both initial memories."""
    (scores, kept_k, kept_v), (do, dfinal_k, dfinal_v) = saved, gradients
    assert do is not None
    grid, readout = grid_of(call), READOUTS[call.readout]
    dq, dk, dv, dg = map(torch.empty_like, (call.q, call.k, call.v, call.g))
    ds = None if call.s is None else torch.empty_like(call.s)
    keys = Memory("keys", grid, call.save, kept_k, call.initial_k)
    values = Memory("values", grid, call.save, kept_v, call.initial_v)
    dkeys = Scan("dkeys", grid, keys.scan.shape, dfinal_k)
    dvalues = Scan("dvalues", grid, values.scan.shape, dfinal_v)
    for seg in reversed(grid.segments):
        write = _write(call, grid, seg)
        assert write.decay is not None
        gate = GateGradient(write.decay)
        found = grid.load("scores", scores, seg)
        weights = readout.apply(found)

        x = _value_pass(call, grid, seg, weights, write)
        dweights, dwrite, dv_seg = x.backward(
            None, grid.load("buffer 2", do, seg), values.replay(seg, x), seg, dvalues, key_gate=gate
        )
        grid.store(dv, dv_seg, seg)
        dscores = readout.backward(found, weights, dweights)

        x = _key_pass(call, grid, seg, write)
        dq_seg, dk_seg, dwrite_k = x.backward(found, dscores, keys.replay(seg, x), seg, dkeys, value_gate=gate)
        grid.store(dq, dq_seg, seg, call.scale)
        grid.store(dk, dk_seg, seg)

        dwrite += dwrite_k
        dgate = gate.result()
        if ds is None:
            dgate.addcmul_(dwrite, write.decay.g.exp(), value=-1)  # through write = 1 - exp(g)
        else:
            grid.store(ds, dwrite, seg)
        grid.store(dg, dgate, seg)
    return dq, dk, dv, dg, ds, dkeys.leaving, dvalues.leaving


def _write(call: SlotCall, grid: Grid, seg: Segment) -> Early:
    """What is written to the slots, values of the first pass and keys of the second, with the gate of both."""
    decay = Decay("g", grid.load("g", call.g, seg), seg.held, grid.scratch)
    if call.s is None:  # 1 - exp(g) would be nothing but rounding for a slow gate
        strength = torch.expm1(decay.g, out=grid.scratch("s", *decay.g.shape)).neg_()
    else:
        strength = grid.load("s", call.s, seg)
    return Early("s", strength, decay, grid.scratch)


# The wide tensors of the two passes take turns in four buffers, which stay in cache.
#              buffer 1   buffer 2   buffer 3   buffer 4
# first pass   q          k          dq         dk
# second pass  v          o, do      dv


def _key_pass(call: SlotCall, grid: Grid, seg: Segment, write: Early) -> Pass:
    """The first pass: queries find their slots. The gate is on the value side."""
    queries = Late("q", grid.load("buffer 1", call.q, seg, call.scale), None, grid.scratch)
    keys = Early("k", grid.load("buffer 2", call.k, seg), None, grid.scratch)
    return Pass("keys", queries, keys, write, grid.scratch, {"dq": "buffer 3", "dk": "buffer 4"})


def _value_pass(call: SlotCall, grid: Grid, seg: Segment, weights: Tensor, write: Early) -> Pass:
    """The second pass: slot weights read the values. The gate is on the key side."""
    queries = Late("weights", weights, write.decay, grid.scratch)
    values = Early("v", grid.load("buffer 1", call.v, seg), None, grid.scratch)
    return Pass("values", queries, write, values, grid.scratch, {"o": "buffer 2", "dv": "buffer 3"})
