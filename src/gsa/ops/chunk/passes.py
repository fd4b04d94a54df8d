"""One pass of gated linear attention over the chunks of a segment, forward and backward.

Shape letters: n chunks of all lanes and heads, R queries per key/value head, C tokens in a chunk; K, V as always.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gsa.ops.chunk.decay import Decay, Early, GateGradient, Late, causal_, over_queries
from gsa.ops.chunk.grid import Segment
from gsa.ops.chunk.scan import Scan
from gsa.ops.chunk.scratch import Scratch


class Pass:
    """Gated linear attention over the chunks of a segment: o_i = sum_{j<=i} (q_i . k_j) v_j, decayed on either side."""

    def __init__(self, name: str, q: Late, k: Early, v: Early, scratch: Scratch, buffers: dict[str, str] | None = None):
        """q [n, R*C, K], k [n, C, K], v [n, C, V]; the gate of the key side comes with q and k, the other with v.

        `buffers` names the scratch memory of results that share it with others.
        """
        self.name, self.q, self.k, self.v, self.scratch, self.buffers = name, q, k, v, scratch, buffers or {}

    def _product(self, name: str, a: Tensor, b: Tensor) -> Tensor:
        buffer = self.buffers.get(name, f"{self.name} {name}")
        return torch.bmm(a, b, out=self.scratch(buffer, a.shape[0], a.shape[1], b.shape[2]))

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
        A, o, decay = self.scores(), self._product("o", self.q.border, S), self.v.decay
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
        dS = scan.through(seg, q.border, dout.border, state_decay, reverse=True)[1:].flatten(0, 1)
        A, dA = self.scores(), self._scores("dscores", dout, v)

        dq = self._product("dq", dout.border, S.mT)
        dk = self._product("dk", v.border, dS.mT)
        dv = self._product("dv", k.border, dS)
        crossing = dS.mul_(S)  # dS is spent
        if state_decay is not None:
            crossing.mul_(state_decay)
        if key_gate is None:
            dq.baddbmm_(dA, k.raw)
            dk.baddbmm_(dA.mT, q.raw)
        else:
            left = (k.border * dk).sum(1, keepdim=True)
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
            left = (v.border * dv).sum(1, keepdim=True)
            dv, writes = _undecay_early(dv, A, dout, v, value_gate.decay)
            reads = do * o
            if value_gate.decay.strong is not None:
                strong = value_gate.decay.strong
                before = over_queries(torch.bmm(q.border[strong], S[strong]), value_gate.decay.halves.prefix)
                reads[strong] = do[strong] * before
                value_gate.add_strong(A[strong], do[strong], v.raw[strong])
            value_gate.add(reads, writes, crossing.sum(1, keepdim=True), left)
        return dq, dk, dv


def _undecay_late(dx: Tensor, dA: Tensor, x: Late, y: Early, decay: Decay) -> tuple[Tensor, Tensor]:
    """Gradient of x from that of x.border (dx, used up) and of scores(x, y); and x * dx, the pairs summed by reader."""
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
    """Gradient of y from that of y.border (dy, used up) and of scores(x, y); and y * dy, the pairs summed by writer."""
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
