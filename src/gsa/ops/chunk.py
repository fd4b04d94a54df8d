"""The chunkwise form in torch, on any device: gated linear attention and gated slot attention, forward and backward.

Segments of chunks are worked through in time order (backward: in reverse). Inside a segment everything is a batched
matmul over all chunks, but for the scan that carries the state from chunk to chunk. The backward pass is written by
hand and starts from the inputs, the slot scores of the first pass, and the states that the forward kept: those at the
beginnings of segments (keep="marks", the rest is recomputed) or those before every chunk (keep="states").

Shape letters: n chunks of all lanes and heads, R queries per key/value head, C tokens in a chunk; K, V, M as always.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gsa.ops.decay import Decay, Early, GateGradient, Late
from gsa.ops.layout import Layout, Plan, Segment, plan
from gsa.ops.passes import Pass
from gsa.ops.readout import READOUTS
from gsa.ops.scan import Memory, Scan, memory_shape
from gsa.ops.scratch import trims_scratch


def _plan(q: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> Plan:
    sequences = None if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return plan(q.shape[0], q.shape[1], q.shape[2], max(q.shape[3], v.shape[3]), sequences)


def kept_shape(
    q: Tensor, v: Tensor, cu_seqlens: Tensor | None, keep: str, heads: int, rows: int, columns: int
) -> tuple[int, ...]:
    """Of the states [rows, columns] that forward keeps."""
    return memory_shape(_plan(q, v, cu_seqlens), keep, heads, rows, columns)


def _layout(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> Layout:
    return Layout(_plan(q, v, cu_seqlens), q, k.shape[2], cu_seqlens)


@trims_scratch
def gla_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gk: Tensor | None,
    gv: Tensor | None,
    initial: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    keep: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """o [B, T, HQ, V], final states [N, H, K, V], kept states."""
    at = _layout(q, k, v, cu_seqlens)
    o = q.new_empty(*q.shape[:3], v.shape[3])
    kept = q.new_empty(memory_shape(at.plan, keep, at.H, k.shape[3], v.shape[3]), dtype=at.dtype)
    memory = Memory("states", at, keep, kept, initial)
    for seg in at.segments:
        x = _gla_pass(at, seg, q, k, v, gk, gv, scale)
        at.store(o, x.forward(memory.forward(seg, x)), seg)
    return o, memory.final, kept


def _gla_pass(
    at: Layout,
    seg: Segment,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gk: Tensor | None,
    gv: Tensor | None,
    scale: float,
) -> Pass:
    by_key = None if gk is None else Decay("gk", at.load("gk", gk, seg), seg.held, at.scratch)
    by_value = None if gv is None else Decay("gv", at.load("gv", gv, seg), seg.held, at.scratch)
    return Pass(
        "gla",
        Late("q", at.load("q", q, seg, scale), by_key, at.scratch),
        Early("k", at.load("k", k, seg), by_key, at.scratch),
        Early("v", at.load("v", v, seg), by_value, at.scratch),
        at.scratch,
    )


@trims_scratch
def gla_backward(
    do: Tensor,
    dfinal: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gk: Tensor | None,
    gv: Tensor | None,
    initial: Tensor | None,
    cu_seqlens: Tensor | None,
    kept: Tensor,
    scale: float,
    keep: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor]:
    """Gradients of q, k, v, gk, gv and the initial states."""
    at = _layout(q, k, v, cu_seqlens)
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    dgk = None if gk is None else torch.empty_like(gk)
    dgv = None if gv is None else torch.empty_like(gv)
    memory = Memory("states", at, keep, kept, initial)
    gradient = Scan("dstates", at, memory.scan.shape, dfinal)
    for seg in reversed(at.segments):
        x = _gla_pass(at, seg, q, k, v, gk, gv, scale)
        S = memory.replay(seg, x)
        key_gate = None if x.k.decay is None else GateGradient(x.k.decay)
        value_gate = None if x.v.decay is None else GateGradient(x.v.decay)
        o = None if value_gate is None else x.forward(S)
        grads = x.backward(o, at.load("do", do, seg), S, seg, gradient, key_gate, value_gate)
        for out, grad, factor in zip((dq, dk, dv), grads, (scale, 1.0, 1.0), strict=True):
            at.store(out, grad, seg, factor)
        if dgk is not None and key_gate is not None:
            at.store(dgk, key_gate.result(), seg)
        if dgv is not None and value_gate is not None:
            at.store(dgv, value_gate.result(), seg)
    return dq, dk, dv, dgk, dgv, gradient.leaving


@trims_scratch
def gsa_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    s: Tensor | None,
    initial_k: Tensor | None,
    initial_v: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    readout: str,
    keep: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """o [B, T, HQ, V], both final memories, slot scores [B, T, HQ, M] and kept states of both passes."""
    at, M = _layout(q, k, v, cu_seqlens), g.shape[3]
    o = q.new_empty(*q.shape[:3], v.shape[3])
    slots = q.new_empty((*q.shape[:3], M) if keep != "nothing" else (0,), dtype=at.dtype)
    kept_k = q.new_empty(memory_shape(at.plan, keep, at.H, k.shape[3], M), dtype=at.dtype)
    kept_v = q.new_empty(memory_shape(at.plan, keep, at.H, M, v.shape[3]), dtype=at.dtype)
    keys, values = Memory("keys", at, keep, kept_k, initial_k), Memory("values", at, keep, kept_v, initial_v)
    for seg in at.segments:
        write = _write(at, seg, g, s)
        x = _key_pass(at, seg, q, k, write, scale)
        scores = x.forward(keys.forward(seg, x))
        if keep != "nothing":
            at.store(slots, scores, seg)
        x = _value_pass(at, seg, READOUTS[readout].apply(scores), write, v)
        at.store(o, x.forward(values.forward(seg, x)), seg)
    return o, keys.final, values.final, slots, kept_k, kept_v


def _write(at: Layout, seg: Segment, g: Tensor, s: Tensor | None) -> Early:
    """What is written to the slots, values of the first pass and keys of the second, with the gate of both."""
    decay = Decay("g", at.load("g", g, seg), seg.held, at.scratch)
    if s is None:  # 1 - exp(g) would be nothing but rounding for a slow gate
        strength = torch.expm1(decay.g, out=at.scratch("s", *decay.g.shape)).neg_()
    else:
        strength = at.load("s", s, seg)
    return Early("s", strength, decay, at.scratch)


# The wide tensors of the two passes take turns in four places, which stay in cache.
#              place 1   place 2   place 3   place 4
# first pass   q         k         dq        dk
# second pass  v         o, do     dv


def _key_pass(at: Layout, seg: Segment, q: Tensor, k: Tensor, write: Early, scale: float) -> Pass:
    """The first pass: queries find their slots. The gate is on the value side."""
    queries = Late("q", at.load("place 1", q, seg, scale), None, at.scratch)
    keys = Early("k", at.load("place 2", k, seg), None, at.scratch)
    return Pass("keys", queries, keys, write, at.scratch, {"dq": "place 3", "dk": "place 4"})


def _value_pass(at: Layout, seg: Segment, weights: Tensor, write: Early, v: Tensor) -> Pass:
    """The second pass: slot weights read the values. The gate is on the key side."""
    queries = Late("weights", weights, write.decay, at.scratch)
    values = Early("v", at.load("place 1", v, seg), None, at.scratch)
    return Pass("values", queries, write, values, at.scratch, {"o": "place 2", "dv": "place 3"})


@trims_scratch
def gsa_backward(
    do: Tensor,
    dfinal_k: Tensor | None,
    dfinal_v: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    s: Tensor | None,
    initial_k: Tensor | None,
    initial_v: Tensor | None,
    cu_seqlens: Tensor | None,
    slots: Tensor,
    kept_k: Tensor,
    kept_v: Tensor,
    scale: float,
    readout: str,
    keep: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor, Tensor]:
    """Gradients of q, k, v, g, s and both initial memories."""
    at = _layout(q, k, v, cu_seqlens)
    dq, dk, dv, dg = (torch.empty_like(x) for x in (q, k, v, g))
    ds = None if s is None else torch.empty_like(s)
    keys, values = Memory("keys", at, keep, kept_k, initial_k), Memory("values", at, keep, kept_v, initial_v)
    dkeys, dvalues = Scan("dkeys", at, keys.scan.shape, dfinal_k), Scan("dvalues", at, values.scan.shape, dfinal_v)
    for seg in reversed(at.segments):
        write = _write(at, seg, g, s)
        assert write.decay is not None
        gate = GateGradient(write.decay)
        scores = at.load("slots", slots, seg)
        weights = READOUTS[readout].apply(scores)

        x = _value_pass(at, seg, weights, write, v)
        dweights, dwrite, dv_seg = x.backward(
            None, at.load("place 2", do, seg), values.replay(seg, x), seg, dvalues, key_gate=gate
        )
        at.store(dv, dv_seg, seg)
        dscores = READOUTS[readout].backward(scores, weights, dweights)

        x = _key_pass(at, seg, q, k, write, scale)
        dq_seg, dk_seg, dwrite_k = x.backward(scores, dscores, keys.replay(seg, x), seg, dkeys, value_gate=gate)
        at.store(dq, dq_seg, seg, scale)
        at.store(dk, dk_seg, seg)

        dwrite += dwrite_k
        dgate = gate.result()
        if ds is None:
            dgate.addcmul_(dwrite, write.decay.g.exp(), value=-1)  # through write = 1 - exp(g)
        else:
            at.store(ds, dwrite, seg)
        at.store(dg, dgate, seg)
    return dq, dk, dv, dg, ds, dkeys.leaving, dvalues.leaving
