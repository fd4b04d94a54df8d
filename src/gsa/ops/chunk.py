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

from gsa.ops.decay import Decay, Early, GateGradient, Late, causal_, over_queries
from gsa.ops.layout import Layout, Plan, Segment, plan
from gsa.ops.readout import READOUTS
from gsa.ops.scratch import Scratch


class Pass:
    """Gated linear attention over the chunks of a segment: o_i = sum_{j<=i} (q_i . k_j) v_j, decayed on either side."""

    def __init__(self, name: str, q: Late, k: Early, v: Early, scratch: Scratch, places: dict[str, str] | None = None):
        """q [n, R*C, K], k [n, C, K], v [n, C, V]; the gate of the key side comes with q and k, the other with v.

        `places` says where in scratch memory a result goes, for those that share their place with others.
        """
        self.name, self.q, self.k, self.v, self.scratch, self.places = name, q, k, v, scratch, places or {}

    def _product(self, name: str, a: Tensor, b: Tensor) -> Tensor:
        place = self.places.get(name, f"{self.name} {name}")
        return torch.bmm(a, b, out=self.scratch(place, a.shape[0], a.shape[1], b.shape[2]))

    def state_decay(self) -> Tensor | None:
        """What a chunk leaves of the state it found; broadcasts against [n, K, V]."""
        by_key = None if self.k.decay is None else self.k.decay.total[:, :, None]
        by_value = None if self.v.decay is None else self.v.decay.total[:, None, :]
        if by_key is None or by_value is None:
            return by_value if by_key is None else by_key
        return by_key * by_value

    def scores(self) -> Tensor:
        """Lower triangular [n, R*C, C]: q_i . k_j, decayed on the key side."""
        return self._scores("scores", self.q, self.k)

    def _scores(self, name: str, x: Late, y: Early) -> Tensor:
        A = causal_(self._product(name, x.inside, y.inside.mT))
        if y.decay is not None and y.decay.strong is not None:
            strong = y.decay.strong
            A[strong] = y.decay.halves.scores(x.raw[strong], y.raw[strong])
        return A

    def forward(self, S: Tensor) -> Tensor:
        """Outputs [n, R*C, V] from the states before the chunks, S [n, K, V]."""
        A, o, decay = self.scores(), self._product("o", self.q.start, S), self.v.decay
        if decay is None:
            return o.baddbmm_(A, self.v.raw)
        strong = decay.strong
        if strong is not None:
            exact = over_queries(o[strong], decay.halves.prefix)
            exact += decay.halves.mix(A[strong], self.v.raw[strong])
        o.mul_(decay.half).baddbmm_(A, self.v.inside)
        o = over_queries(o, decay.up, out=o)
        if strong is not None:
            o[strong] = exact
        return o

    def backward(
        self,
        o: Tensor | None,
        do: Tensor,
        S: Tensor,
        seg: Segment,
        scan: Scan,
        key_gate: GateGradient | None = None,
        value_gate: GateGradient | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv; the gradients of the gates are added to theirs, that of the state goes on in `scan`.

        S are the states before the chunks; the outputs o are needed if the value side is gated.
        """
        q, k, v = self.q, self.k, self.v
        dout = Late(f"{self.name} do", do, v.decay, self.scratch)
        state_decay = self.state_decay()
        dS = scan.through(seg, q.start, dout.start, state_decay, reverse=True)[1:].flatten(0, 1)
        A, dA = self.scores(), self._scores("dscores", dout, v)

        dq = self._product("dq", dout.start, S.mT)
        dk = self._product("dk", v.end, dS.mT)
        dv = self._product("dv", k.end, dS)
        crossing = dS.mul_(S)  # dS is spent
        if state_decay is not None:
            crossing.mul_(state_decay)
        if key_gate is None:
            dq.baddbmm_(dA, k.raw)
            dk.baddbmm_(dA.mT, q.raw)
        else:
            left = (k.end * dk).sum(1, keepdim=True)
            dq, reads = _undecay_late(dq, dA, q, k, key_gate.decay)
            dk, writes = _undecay_early(dk, dA, q, k, key_gate.decay)
            key_gate.add(reads, writes, crossing.sum(2)[:, None], left)
            if key_gate.decay.strong is not None:
                strong = key_gate.decay.strong
                key_gate.add_strong(dA[strong], q.raw[strong], k.raw[strong])
        if value_gate is None:
            dv.baddbmm_(A.mT, do)
        else:
            assert o is not None
            left = (v.end * dv).sum(1, keepdim=True)
            dv, writes = _undecay_early(dv, A, dout, v, value_gate.decay)
            reads = do * o
            if value_gate.decay.strong is not None:
                strong = value_gate.decay.strong
                before = over_queries(torch.bmm(q.start[strong], S[strong]), value_gate.decay.halves.prefix)
                reads[strong] = do[strong] * before
                value_gate.add_strong(A[strong], do[strong], v.raw[strong])
            value_gate.add(reads, writes, crossing.sum(1, keepdim=True), left)
        return dq, dk, dv


def _undecay_late(dx: Tensor, dA: Tensor, x: Late, y: Early, decay: Decay) -> tuple[Tensor, Tensor]:
    """Gradient of x from that of x.start (dx, used up) and of scores(x, y); and x * dx, the pairs summed by reader."""
    strong = decay.strong
    if strong is not None:
        across = over_queries(dx[strong], decay.halves.prefix)
        exact = across + decay.halves.mix(dA[strong], y.raw[strong])
    dx.mul_(decay.half).baddbmm_(dA, y.inside)
    over_queries(dx, decay.up, out=dx)
    pairs = x.raw * dx
    if strong is not None:
        pairs[strong] = x.raw[strong] * across
        dx[strong] = exact
    return dx, pairs


def _undecay_early(dy: Tensor, dA: Tensor, x: Late, y: Early, decay: Decay) -> tuple[Tensor, Tensor]:
    """Gradient of y from that of y.end (dy, used up) and of scores(x, y); and y * dy, the pairs summed by writer."""
    strong = decay.strong
    if strong is not None:
        across = dy[strong] * decay.halves.suffix
        exact = across + decay.halves.mix_back(dA[strong], x.raw[strong])
    dy.mul_(decay.half).baddbmm_(dA.mT, x.inside).mul_(decay.down)
    pairs = y.raw * dy
    if strong is not None:
        pairs[strong] = y.raw[strong] * across
        dy[strong] = exact
    return dy, pairs


class Scan:
    """A recurrent state (in reverse: its gradient) carried from chunk to chunk; it enters and leaves with sequences.

    The states between chunks are scratch: they last until the next scan in the same direction.
    """

    def __init__(self, name: str, layout: Layout, shape: tuple[int, int], entering: Tensor | None):
        self.name, self.shape, self.entering, self.scratch = name, shape, entering, layout.scratch
        self.running: Tensor | None = None
        """The state between two segments [lanes * H, K, V]; the first segment of a sequence needs none."""
        self.leaving = layout.scratch.empty.new_zeros(layout.N, layout.H, *shape)
        """The state each sequence ends with; an empty one ends as it began."""
        if entering is not None:
            self.leaving.copy_(entering)

    def through(self, seg: Segment, a: Tensor, b: Tensor, decay: Tensor | None, reverse: bool = False) -> Tensor:
        """States between chunks [chunks + 1, lanes * H, K, V], where each chunk decays the state and adds a^T b."""
        n, (K, V) = a.shape[0] // seg.chunks, self.shape
        # Stored with the longer side last, which matmul fills faster.
        stored = self.scratch("dstates" if reverse else "states", seg.chunks + 1, n, min(K, V), max(K, V))
        states = stored.mT if K > V else stored
        torch.bmm(*((b.mT, a) if K > V else (a.mT, b)), out=(stored[:-1] if reverse else stored[1:]).flatten(0, 1))
        enters, leaves = (seg.ends, seg.starts) if reverse else (seg.starts, seg.ends)
        order = range(seg.chunks)[::-1] if reverse else range(seg.chunks)
        if order[0] not in enters:
            assert self.running is not None
            states[-1 if reverse else 0] = self.running
        if decay is not None:
            decay = decay.unflatten(0, (seg.chunks, -1))
        between, decays = states.unbind(), () if decay is None else decay.unbind()
        for c in order:
            source, target = (between[c + 1], between[c]) if reverse else (between[c], between[c + 1])
            if c in enters:
                if self.entering is None:
                    source.zero_()
                else:
                    source.copy_(self.entering[enters[c]].flatten(0, 1))
            if decays:
                target.addcmul_(source, decays[c])
            else:
                target.add_(source)
            if c in leaves:
                self.leaving[leaves[c]] = target.unflatten(0, (-1, self.leaving.shape[1]))
        self.running = self.scratch(f"running {self.name}", n, K, V).copy_(states[0 if reverse else -1])
        return states


class Memory:
    """The state of one pass over the whole call: moves forward, keeps what backward will want, then replays it."""

    def __init__(self, name: str, layout: Layout, keep: str, kept: Tensor, initial: Tensor | None):
        self.scan = Scan(name, layout, (kept.shape[2], kept.shape[3]), initial)
        self.keep, self.kept = keep, kept

    @property
    def final(self) -> Tensor:
        return self.scan.leaving

    def forward(self, seg: Segment, x: Pass) -> Tensor:
        """States before the chunks of the segment [n, K, V]."""
        states = self.scan.through(seg, x.k.end, x.v.end, x.state_decay())[:-1]
        if self.keep == "marks":
            self.kept[seg.index, : states.shape[1]] = states[0]
        elif self.keep == "states":
            self.kept[seg.first_chunk : seg.first_chunk + seg.chunks, : states.shape[1]] = states
        return states.flatten(0, 1)

    def replay(self, seg: Segment, x: Pass) -> Tensor:
        """The same again, from what was kept; segments in any order."""
        n = x.k.raw.shape[0] // seg.chunks  # lanes * H
        if self.keep == "states":
            return self.kept[seg.first_chunk : seg.first_chunk + seg.chunks, :n].flatten(0, 1)
        self.scan.running = self.kept[seg.index, :n]
        return self.scan.through(seg, x.k.end, x.v.end, x.state_decay())[:-1].flatten(0, 1)


def kept_shape(plan: Plan, keep: str, H: int, K: int, V: int) -> tuple[int, int, int, int]:
    """Shape of what a Memory keeps: states at segments, at chunks, or nothing."""
    count = {"nothing": 0, "marks": plan.max_segments, "states": plan.max_chunks}[keep]
    return (count, plan.lanes * H, K, V)


def plan_for(q: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> Plan:
    sequences = None if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return plan(q.shape[0], q.shape[1], q.shape[2], max(q.shape[3], v.shape[3]), sequences)


def _layout(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> Layout:
    return Layout(plan_for(q, v, cu_seqlens), q, k.shape[2], cu_seqlens)


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
    kept = q.new_empty(kept_shape(at.plan, keep, at.H, k.shape[3], v.shape[3]), dtype=at.dtype)
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
    kept_k = q.new_empty(kept_shape(at.plan, keep, at.H, k.shape[3], M), dtype=at.dtype)
    kept_v = q.new_empty(kept_shape(at.plan, keep, at.H, M, v.shape[3]), dtype=at.dtype)
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
