"""Mamba's selective scan in torch, on any device: a scan of two levels, forward and backward.

A segment of tokens is cut into about as many blocks as a block has tokens. All blocks step through their tokens at
once, first from empty states; what a block leaves behind is then carried from block to block; and with the states that
each begins with they step through once more. Nothing is ever divided by a decay, so every dt is exact. Segments follow
one another with the state, which bounds the working memory; the backward pass starts from the states at their
beginnings, goes through them from the last to the first, and computes all else again.

Lanes are sequences that are worked on side by side: of about the same length, since shorter ones are filled up with
dt = 0, which changes no state.

Shape letters: E channels, S states of a channel, n lanes, m blocks of all lanes, c tokens in a block. States are held
as [S, E] here: everything is a matter of long rows then.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from gsa.ops.calls import Gradients, ScanCall, Shape, Tensors, sums_dtype
from gsa.ops.chunk.scratch import Scratch, scratch_for, trims_scratch
from gsa.ops.gates import refuse_rates
from gsa.ops.sequences import max_marks, sequence_bounds
from gsa.ops.state import compute_dtype

# Numbers in the states of all tokens of a segment: enough for large operations, few enough for a cache.
SEGMENT_ELEMENTS = 1 << 21
# A segment has at least so many tokens, however wide: a state is kept for each.
MIN_SEGMENT = 16
# A step with so many numbers is not held up by its call: more blocks at once would gain nothing.
STEP_ELEMENTS = 1 << 17


def _segment_tokens(E: int, S: int) -> int:
    return max(MIN_SEGMENT, SEGMENT_ELEMENTS // (E * S))


def saved_shapes(call: ScanCall) -> tuple[Shape, ...]:
    """Of the states [S, E] that forward keeps, at the beginnings of segments."""
    E, S = call.A.shape
    return ((max_marks(call.u, call.cu_seqlens, call.save, _segment_tokens(E, S)), S, E),)


@dataclass
class _Lanes:
    """Sequences that are worked on together, longest first."""

    sequences: list[int]
    starts: Tensor
    """Their first tokens, among those of all rows [n]."""
    lengths: list[int]
    marks: Tensor
    """The first state that is kept of each [n]."""


@dataclass
class _Segment:
    """A stretch of time of the lanes that last so long."""

    lanes: slice
    shape: tuple[int, int, int]
    """c, n and the blocks of a lane."""
    tokens: Tensor
    """Where each of the [c, n, blocks] tokens is found."""
    valid: Tensor | None
    """Which of them are tokens, and not filled up; None: all."""
    marks: Tensor


def _all_lanes(u: Tensor, A: Tensor, cu_seqlens: Tensor | None) -> list[_Lanes]:
    """The sequences that are not empty, in groups of at most twice the length, as many as a segment can hold."""
    T, L = u.shape[1], _segment_tokens(*A.shape)
    marks, found = 0, []
    for n, (b, start, stop) in enumerate(sequence_bounds(u.shape[0], T, cu_seqlens)):
        found.append((stop - start, n, b * T + start, marks))
        marks += -(-(stop - start) // L)
    found = sorted((x for x in found if x[0] > 0), key=lambda x: (-x[0], x[1]))
    groups: list[_Lanes] = []
    while found:
        longest = found[0][0]
        room = max(1, SEGMENT_ELEMENTS // (min(longest, L) * A.numel()))
        count = sum(2 * x[0] > longest for x in found[:room])
        lengths, sequences, starts, first = zip(*found[:count], strict=True)
        groups.append(_Lanes(list(sequences), torch.tensor(starts), list(lengths), torch.tensor(first)))
        del found[:count]
    return groups


def _segments(group: _Lanes, A: Tensor) -> Iterator[_Segment]:
    L = _segment_tokens(*A.shape)
    lengths = torch.tensor(group.lengths)
    for index, first in enumerate(range(0, group.lengths[0], L)):
        n = sum(length > first for length in group.lengths)
        tokens = min(L, group.lengths[0] - first)
        blocks = min(math.isqrt(tokens - 1) + 1, -(-STEP_ELEMENTS // (n * A.numel())))
        c = -(-tokens // blocks)
        time = first + torch.arange(blocks * c).view(blocks, c).T[:, None, :]  # [c, 1, blocks]
        last = lengths[:n, None].clamp(max=first + tokens) - 1
        valid = time <= last
        # What is filled up repeats the last token, so that it can spoil no other sequence.
        positions = (group.starts[:n, None] + torch.minimum(time, last)).flatten().to(A.device)
        yield _Segment(
            slice(0, n),
            (c, n, blocks),
            positions,
            None if valid.all() else valid.flatten().to(A.device),
            (group.marks[:n] + index).to(A.device),
        )


class _Stretch:
    """The inputs of a segment, and its states."""

    def __init__(self, seg: _Segment, scratch: Scratch, A: Tensor, u: Tensor, dt: Tensor, B: Tensor, C: Tensor):
        self.seg, self.scratch, self.A = seg, scratch, A
        self.c, self.n, self.blocks = seg.shape
        self.u, self.B, self.C = self.load(u), self.load(B), self.load(C)
        self.dt = self.load(dt, masked=True)
        self.x = self.dt * self.u
        S, E = A.shape
        m = self.n * self.blocks
        self.decay = torch.mul(self.dt[:, :, None, :], A, out=scratch("decay", self.c, m, S, E)).exp_()

    def load(self, x: Tensor, masked: bool = False) -> Tensor:
        """The segment's part [c, m, X] of x [tokens, X]."""
        part = x.index_select(0, self.seg.tokens).to(self.A.dtype)
        if masked and self.seg.valid is not None:
            part.masked_fill_(~self.seg.valid[:, None], 0.0)
        return part.view(self.c, self.n * self.blocks, -1)

    def store(self, out: Tensor, part: Tensor) -> None:
        """The reverse."""
        tokens, part = self.seg.tokens, part.reshape(-1, out.shape[1]).to(out.dtype)
        if self.seg.valid is not None:
            tokens, part = tokens[self.seg.valid], part[self.seg.valid]
        out.index_copy_(0, tokens, part)

    def states(self, before: Tensor) -> Tensor:
        """States [c + 1, m, S, E] before the blocks' tokens and after the last, from `before` [n, S, E]."""
        h = self.scratch("states", self.c + 1, *self.decay.shape[1:])
        torch.mul(self.x[:, :, None, :], self.B[:, :, :, None], out=h[1:])
        begin = h[0].unflatten(0, (self.n, self.blocks))
        begin[:, 0] = before
        if self.blocks > 1:
            left = self.scratch("left", *h.shape[1:]).copy_(h[1])
            for i in range(1, self.c):
                torch.addcmul(h[i + 1], self.decay[i], left, out=left)
            left, whole = left.unflatten(0, (self.n, self.blocks)), self._whole()
            for k in range(self.blocks - 1):
                torch.addcmul(left[:, k], whole[:, k], begin[:, k], out=begin[:, k + 1])
        for i in range(self.c):
            h[i + 1].addcmul_(self.decay[i], h[i])
        return h

    def gradients(self, dy: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients [c, m, S, E] of the states after each token, and [n, S, E] of those before the segment."""
        d = self.scratch("gradients", *self.decay.shape)
        torch.mul(dy[:, :, None, :], self.C[:, :, :, None], out=d)
        end = self.scratch("end", *d.shape[1:]).unflatten(0, (self.n, self.blocks))
        end[:, -1] = after
        if self.blocks > 1:
            left = self.scratch("left", *d.shape[1:]).copy_(d[-1])
            for i in reversed(range(self.c - 1)):
                torch.addcmul(d[i], self.decay[i + 1], left, out=left)
            left, whole = left.mul_(self.decay[0]).unflatten(0, (self.n, self.blocks)), self._whole()
            for k in reversed(range(1, self.blocks)):
                torch.addcmul(left[:, k], whole[:, k], end[:, k], out=end[:, k - 1])
        d[-1] += end.flatten(0, 1)
        for i in reversed(range(self.c - 1)):
            d[i].addcmul_(self.decay[i + 1], d[i + 1])
        first = slice(0, None, self.blocks)  # the first block of each lane
        return d, d[0, first] * self.decay[0, first]

    def _whole(self) -> Tensor:
        """The decay of whole blocks [n, blocks, S, E]."""
        whole = self.scratch("whole", *self.decay.shape[1:])
        return torch.mul(self.dt.sum(0)[:, None, :], self.A, out=whole).exp_().unflatten(0, (self.n, self.blocks))


def _rows(weights: Tensor, matrices: Tensor) -> Tensor:
    """[c, m, E]: for each token, a row of weights [S] times a matrix [S, E]."""
    return torch.bmm(weights.flatten(0, 1).unsqueeze(1), matrices.flatten(0, 1)).view(*weights.shape[:2], -1)


def _columns(matrices: Tensor, weights: Tensor) -> Tensor:
    """[c, m, S]: for each token, a matrix [S, E] times a column of weights [E]."""
    return torch.bmm(matrices.flatten(0, 1), weights.flatten(0, 1).unsqueeze(2)).view(*weights.shape[:2], -1)


def _tokens(x: Tensor) -> Tensor:
    """x [B, T, X] with the tokens of all rows one after another."""
    return x.reshape(x.shape[0] * x.shape[1], x.shape[2])


def _one_token(u: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, initial: Tensor | None) -> tuple[Tensor, Tensor]:
    """y [B, 1, E] and the states after it: what decoding does, for which plans would take longer than the work."""
    dtype = compute_dtype(u.dtype)
    step, B, C = dt.to(dtype), B.to(dtype), C.to(dtype)
    written = (step * u.to(dtype)).mT * B  # [B, E, S]
    state = written if initial is None else written.addcmul_((step.mT * A.to(dtype)).exp_(), initial)
    return torch.bmm(C, state.mT).to(u.dtype), state


@trims_scratch
def forward(call: ScanCall) -> tuple[Tensors, Tensors]:
    """Outputs [B, T, E] and final states [N, E, S]; kept states."""
    if call.check:
        refuse_rates(call.A, call.dt)
    u, dt, A, B, C, initial, cu_seqlens, save, _ = call
    (_, final_shape), (kept_shape,), dtype = call.result_shapes(), saved_shapes(call), sums_dtype(call)
    kept = u.new_empty(kept_shape, dtype=dtype)
    if u.shape[1] == 1 and cu_seqlens is None and save == "nothing":
        return _one_token(u, dt, A, B, C, initial), (kept,)
    scratch = scratch_for(dtype, u.device)
    y = u.new_empty(u.shape)
    final = u.new_zeros(final_shape, dtype=dtype) if initial is None else initial.clone()
    rate, inputs = A.to(dtype).T.contiguous(), [_tokens(x) for x in (u, dt, B, C)]
    for group in _all_lanes(u, A, cu_seqlens):
        state = final[group.sequences].mT.contiguous()  # [n, S, E]
        for seg in _segments(group, rate):
            if save != "nothing":
                kept[seg.marks] = state[seg.lanes]
            x = _Stretch(seg, scratch, rate, *inputs)
            h = x.states(state[seg.lanes])
            x.store(_tokens(y), _rows(x.C, h[1:]))
            state[seg.lanes] = h[-1, x.blocks - 1 :: x.blocks]
        final[group.sequences] = state.mT
    return (y, final), (kept,)


@trims_scratch
def backward(call: ScanCall, saved: Tensors, gradients: Gradients) -> Gradients:
    """Gradients of u, dt, A, B, C and the initial states."""
    u, dt, A, B, C, _, cu_seqlens, *_ = call
    (kept,), (dout, dfinal), dtype = saved, gradients, sums_dtype(call)
    assert dout is not None
    scratch = scratch_for(dtype, u.device)
    du, ddt, dB, dC = (x.new_empty(x.shape) for x in (u, dt, B, C))
    dinitial = u.new_zeros(call.result_shapes()[1], dtype=dtype) if dfinal is None else dfinal.clone()
    rate, inputs, dout = A.to(dtype).T.contiguous(), [_tokens(x) for x in (u, dt, B, C)], _tokens(dout)
    drate = torch.zeros_like(rate)
    for group in _all_lanes(u, A, cu_seqlens):
        dstate = dinitial[group.sequences].mT.contiguous()
        for seg in reversed(list(_segments(group, rate))):
            x = _Stretch(seg, scratch, rate, *inputs)
            dy = x.load(dout, masked=True)
            h = x.states(kept[seg.marks])
            d, dstate[seg.lanes] = x.gradients(dy, dstate[seg.lanes])
            dx = _rows(x.B, d)
            x.store(_tokens(dB), _columns(d, x.x))
            x.store(_tokens(dC), _columns(h[1:], dy))
            x.store(_tokens(du), dx * x.dt)
            through = x.decay.mul_(h[:-1]).mul_(d)  # the gradient of dt A
            x.store(_tokens(ddt), dx * x.u + torch.mul(through, rate, out=d).sum(2))
            drate += through.mul_(x.dt[:, :, None, :]).sum((0, 1))
        dinitial[group.sequences] = dstate.mT
    return du, ddt, drate.T.to(A.dtype), dB, dC, dinitial
