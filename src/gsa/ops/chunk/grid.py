"""How sequences lie on a grid of chunks: ragged ends, packing and the order of work, handled once for both attentions.

A batch is cut into chunks of C tokens that never cross a sequence, and the chunks into segments that are worked through
one after another, so that scratch memory grows neither with T nor with B. A segment covers a few lanes: rows of the
batch, or the single row of a packed batch with its sequences one after another. In it a tensor [B, T, H * R, X] becomes
[n, R * C, X], where n counts (chunk, lane, head) with chunks outermost: then the states before and after all chunks
are two shifted views of one buffer.

Shape letters: B batch, T time, H key/value heads, R queries per key/value head, C tokens in a chunk, N sequences.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from gsa.ops.calls import LinearCall, SlotCall
from gsa.ops.chunk.scratch import scratch_for
from gsa.ops.sequences import sequence_bounds
from gsa.ops.state import compute_dtype

MAX_CHUNK = 64
# For packed sequences, however short on average: the average may be of one long sequence and many empty ones.
MIN_CHUNK = 16
# Elements of one operand of a segment: large enough to feed batched matmuls, small enough to stay in cache.
SEGMENT_ELEMENTS = 1 << 19
# A segment takes more lanes only if it still has so many chunks: states are kept for the backward pass per segment.
CHUNKS_BEFORE_LANES = 8


@dataclass
class Segment:
    """A run of consecutive chunks."""

    index: int
    """Among the segments of the call."""
    first_chunk: int
    """Among the chunks of the call."""
    chunks: int
    lanes: slice
    """The rows of the batch it covers."""
    tokens: slice
    """The part of time it covers."""
    positions: Tensor | None
    """Where on the grid each of the tokens stands; None if they fill it, otherwise the rest is padding."""
    held: Tensor | int
    """Tokens in each chunk, for every lane and head of it [n, 1, 1]; or C, if they fill it."""
    starts: dict[int, slice] = field(default_factory=dict)
    """Chunk of this segment -> the sequences that begin with it."""
    ends: dict[int, slice] = field(default_factory=dict)
    """Chunk of this segment -> the sequences that end with it."""


@dataclass(frozen=True)
class Plan:
    """Sizes that follow from shapes alone, so that a compiler can know them without reading cu_seqlens."""

    lanes: int
    """Rows of the batch in one segment, at most."""
    chunk: int
    """C, a power of two."""
    segment_chunks: int
    max_chunks: int
    """Of all groups of lanes together."""
    max_segments: int


def plan(B: int, T: int, heads: int, width: int, sequences: int | None) -> Plan:
    """The plan for B rows of T tokens with so many heads of (at most) this width; `sequences` if they are packed."""
    longest_mean = T if sequences is None else T // max(sequences, 1)
    C = 1
    while min(max(longest_mean, MIN_CHUNK), T, MAX_CHUNK) > C:
        C *= 2
    chunks = -(-T // C) if sequences is None else T // C + sequences
    per_chunk = max(heads * C * width, 1)
    lanes = max(1, min(B, SEGMENT_ELEMENTS // (per_chunk * max(1, min(chunks, CHUNKS_BEFORE_LANES)))))
    segment_chunks = max(1, min(chunks, SEGMENT_ELEMENTS // (per_chunk * lanes)))
    groups = -(-B // lanes)
    return Plan(lanes, C, segment_chunks, groups * chunks, groups * -(-chunks // segment_chunks))


class Grid:
    """The chunk grid of one call, and the way of tensors onto it and back."""

    def __init__(self, plan: Plan, q: Tensor, H: int, cu_seqlens: Tensor | None):
        B, T = q.shape[0], q.shape[1]
        self.plan, self.C, self.H = plan, plan.chunk, H
        self.dtype = compute_dtype(q.dtype)
        self.scratch = scratch_for(self.dtype, q.device)
        bounds = sequence_bounds(B, T, cu_seqlens)
        self.N = len(bounds)
        self.segments: list[Segment] = []
        if cu_seqlens is None:
            for b in range(0, B, plan.lanes):
                rows = slice(b, min(b + plan.lanes, B))
                self._cut(rows, [(rows, 0, T)], q.device)
        else:
            runs = [(slice(n, n + 1), start, stop) for n, (_, start, stop) in enumerate(bounds)]
            self._cut(slice(0, 1), runs, q.device)

    def _cut(self, lanes: slice, runs: list[tuple[slice, int, int]], device: torch.device) -> None:
        """Appends the segments of some lanes, on which the runs (sequences, start, stop) follow one another."""
        C = self.C
        starts: dict[int, slice] = {}
        ends: dict[int, slice] = {}
        first: list[int] = []  # token of each chunk
        length: list[int] = []
        for who, start, stop in runs:
            if start == stop:
                continue
            starts[len(first)] = who
            first += range(start, stop, C)
            length += [min(C, stop - t) for t in range(start, stop, C)]
            ends[len(first) - 1] = who
        before = self.segments[-1].first_chunk + self.segments[-1].chunks if self.segments else 0
        for c in range(0, len(first), self.plan.segment_chunks):
            here = range(c, min(c + self.plan.segment_chunks, len(first)))
            positions: Tensor | None = None
            held: Tensor | int = C
            if any(length[i] < C for i in here):
                lengths = torch.tensor([length[i] for i in here])
                positions = (torch.arange(C) < lengths[:, None]).flatten().nonzero().squeeze(1).to(device)
                held = lengths.repeat_interleave((lanes.stop - lanes.start) * self.H)[:, None, None].to(device)
            self.segments.append(
                Segment(
                    len(self.segments),
                    before + c,
                    len(here),
                    lanes,
                    slice(first[here[0]], first[here[-1]] + length[here[-1]]),
                    positions,
                    held,
                    {i - c: starts[i] for i in here if i in starts},
                    {i - c: ends[i] for i in here if i in ends},
                )
            )

    def load(self, name: str, x: Tensor, seg: Segment, scale: float = 1.0) -> Tensor:
        """The segment's part of x [B, T, H * R, X] as [n, R * C, X], times `scale`, with padding zero."""
        C, X = self.C, x.shape[3]
        part = x[seg.lanes, seg.tokens]
        if seg.positions is not None:
            part = part.new_zeros(part.shape[0], seg.chunks * C, *x.shape[2:]).index_copy_(1, seg.positions, part)
        grid = part.view(part.shape[0], seg.chunks, C, self.H, -1, X).permute(1, 0, 3, 4, 2, 5)
        out = self.scratch(name, *grid.shape)
        if scale != 1.0 and grid.dtype == out.dtype:
            torch.mul(grid, scale, out=out)
        else:
            out.copy_(grid)
            if scale != 1.0:
                out.mul_(scale)
        return out.view(-1, grid.shape[3] * C, X)

    def store(self, out: Tensor, y: Tensor, seg: Segment, scale: float = 1.0) -> None:
        """The reverse: writes y [n, R * C, X], which it uses up, to the segment's part of out [B, T, H * R, X]."""
        part = out[seg.lanes, seg.tokens]
        lanes, C = part.shape[0], self.C
        grid = y.view(seg.chunks, lanes, self.H, -1, C, y.shape[2]).permute(1, 0, 4, 2, 3, 5)
        if scale != 1.0:
            grid = grid.mul_(scale)
        if seg.positions is None:
            part.view(grid.shape).copy_(grid)
        else:
            part.copy_(grid.reshape(lanes, seg.chunks * C, *out.shape[2:]).index_select(1, seg.positions))


def plan_of(call: LinearCall | SlotCall) -> Plan:
    """The plan of a call, from shapes alone."""
    B, T, heads, K = call.q.shape
    sequences = None if call.cu_seqlens is None else call.cu_seqlens.shape[0] - 1
    return plan(B, T, heads, max(K, call.v.shape[3]), sequences)


def grid_of(call: LinearCall | SlotCall) -> Grid:
    return Grid(plan_of(call), call.q, call.k.shape[2], call.cu_seqlens)
