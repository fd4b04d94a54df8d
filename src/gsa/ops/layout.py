"""How sequences lie on a grid of chunks: ragged ends, packing and the order of work, handled once for the engines.

A batch is cut into chunks of C tokens that never cross a sequence, and the chunks into segments that are worked through
one after another, so that scratch memory does not grow with T. Inside a segment a tensor [B, T, H * R, X] becomes
[n, R * C, X], where n counts (chunk, lane, head) with chunks outermost: then the states before and after all chunks
are two shifted views of one buffer. A lane is a row of the batch; a packed batch has a single lane, with the sequences
one after another on it.

Shape letters: B batch, T time, H key/value heads, R queries per key/value head, C tokens in a chunk, N sequences.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from gsa.errors import GSAError
from gsa.ops.state import compute_dtype

MAX_CHUNK = 64
# Elements of one operand of a segment: large enough to feed batched matmuls, small enough to stay in cache.
SEGMENT_ELEMENTS = 1 << 19


def sequence_bounds(B: int, T: int, cu_seqlens: Tensor | None) -> list[tuple[int, int, int]]:
    """(row, start, stop) of every sequence; checks the values of cu_seqlens."""
    if cu_seqlens is None:
        return [(b, 0, T) for b in range(B)]
    bounds = cu_seqlens.tolist()
    if bounds[0] != 0 or bounds[-1] != T:
        raise GSAError(f"cu_seqlens must run from 0 to T = {T}, but runs from {bounds[0]} to {bounds[-1]}")
    for n, (start, stop) in enumerate(pairwise(bounds)):
        if stop < start:
            raise GSAError(f"cu_seqlens must not decrease, but entry {n + 1} is {stop} after {start}")
    return [(0, start, stop) for start, stop in pairwise(bounds)]


@dataclass
class Segment:
    """A run of consecutive chunks."""

    index: int
    first_chunk: int
    chunks: int
    tokens: slice
    """The part of time it covers."""
    places: Tensor | None
    """Where on the grid each of the tokens stands; None if they fill it, otherwise the rest is padding."""
    starts: dict[int, slice] = field(default_factory=dict)
    """Chunk of this segment -> the sequences that begin with it."""
    ends: dict[int, slice] = field(default_factory=dict)
    """Chunk of this segment -> the sequences that end with it."""


@dataclass(frozen=True)
class Plan:
    """Sizes that follow from shapes alone, so that a compiler can know them without reading cu_seqlens."""

    lanes: int
    chunk: int
    """C, a power of two."""
    segment_chunks: int
    max_chunks: int

    @property
    def max_segments(self) -> int:
        return -(-self.max_chunks // self.segment_chunks)


def plan(B: int, T: int, heads: int, width: int, sequences: int | None) -> Plan:
    """The plan for B rows of T tokens with so many heads of (at most) this width; `sequences` if they are packed."""
    longest_mean = T if sequences is None else T // max(sequences, 1)
    C = 1
    while min(longest_mean, MAX_CHUNK) > C:
        C *= 2
    chunks = -(-T // C) if sequences is None else T // C + sequences
    per_chunk = max(B * heads * C * width, 1)
    return Plan(B, C, max(1, min(chunks, SEGMENT_ELEMENTS // per_chunk)), chunks)


class Scratch:
    """Working memory by name: one segment after another, and one call after another, use the same.

    Fresh memory has to be faulted in page by page, which can cost as much as the matmuls that fill it.
    """

    KEPT_BYTES = 64 << 20
    """What a thread may hold on to between calls, for each dtype and device."""

    def __init__(self, dtype: torch.dtype, device: torch.device):
        with torch.inference_mode(False):
            self.empty = torch.empty(0, dtype=dtype, device=device)
        self.buffers: dict[str, Tensor] = {}
        self.views: dict[tuple[str, tuple[int, ...]], Tensor] = {}

    def __call__(self, name: str, *shape: int) -> Tensor:
        """Uninitialised [*shape]; the same memory whenever the name is the same."""
        view = self.views.get((name, shape))
        if view is None:
            size = math.prod(shape)
            buffer = self.buffers.get(name)
            if buffer is None or buffer.numel() < size:
                with torch.inference_mode(False):  # or a later call outside of it could not write here
                    buffer = self.buffers[name] = self.empty.new_empty(size)
            view = self.views[name, shape] = buffer[:size].view(shape)
        return view

    def trim(self) -> None:
        """Ends a call: the memory stays for the next one, unless it is more than may be kept."""
        self.views.clear()
        if sum(x.numel() for x in self.buffers.values()) * self.empty.element_size() > self.KEPT_BYTES:
            self.buffers.clear()


class _Scratches(threading.local):
    def __init__(self) -> None:
        self.held: dict[tuple[torch.dtype, torch.device], Scratch] = {}


_scratches = _Scratches()


def scratch_for(dtype: torch.dtype, device: torch.device) -> Scratch:
    """This thread's working memory."""
    held = _scratches.held
    if (dtype, device) not in held:
        held[dtype, device] = Scratch(dtype, device)
    return held[dtype, device]


def trim_scratch() -> None:
    """To be called when a call is done: see Scratch.trim."""
    for scratch in _scratches.held.values():
        scratch.trim()


class Layout:
    """The chunk grid of one call, and the way of tensors onto it and back."""

    def __init__(self, plan: Plan, q: Tensor, H: int, cu_seqlens: Tensor | None):
        B, T, device = q.shape[0], q.shape[1], q.device
        self.plan, self.C, self.lanes, self.H = plan, plan.chunk, plan.lanes, H
        self.dtype = compute_dtype(q.dtype)
        self.scratch = scratch_for(self.dtype, device)
        bounds = sequence_bounds(B, T, cu_seqlens)
        self.N = len(bounds)
        if cu_seqlens is None:
            runs = [(slice(0, B), 0, T)] if B else []
        else:
            runs = [(slice(n, n + 1), start, stop) for n, (_, start, stop) in enumerate(bounds)]
        self.segments = self._cut(runs, device)

    def _cut(self, runs: list[tuple[slice, int, int]], device: torch.device) -> list[Segment]:
        """Segments of the chunks of all runs (sequences, start, stop), where a run is one after another in time."""
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
        segments = []
        for index, c in enumerate(range(0, len(first), self.plan.segment_chunks)):
            here = range(c, min(c + self.plan.segment_chunks, len(first)))
            places = None
            if any(length[i] < C for i in here):
                held = torch.arange(C) < torch.tensor([length[i] for i in here])[:, None]
                places = held.flatten().nonzero().squeeze(1).to(device)
            segments.append(
                Segment(
                    index,
                    c,
                    len(here),
                    slice(first[here[0]], first[here[-1]] + length[here[-1]]),
                    places,
                    {i - c: starts[i] for i in here if i in starts},
                    {i - c: ends[i] for i in here if i in ends},
                )
            )
        return segments

    def load(self, name: str, x: Tensor, seg: Segment, scale: float = 1.0) -> Tensor:
        """The segment's part of x [B, T, H * R, X] as [n, R * C, X], times `scale`, with padding zero."""
        C, X = self.C, x.shape[3]
        part = x[:, seg.tokens]
        if seg.places is not None:
            part = part.new_zeros(self.lanes, seg.chunks * C, *x.shape[2:]).index_copy_(1, seg.places, part)
        grid = part.view(self.lanes, seg.chunks, C, self.H, -1, X).permute(1, 0, 3, 4, 2, 5)
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
        C = self.C
        grid = y.view(seg.chunks, self.lanes, self.H, -1, C, y.shape[2]).permute(1, 0, 4, 2, 3, 5)
        if scale != 1.0:
            grid = grid.mul_(scale)  # y is spent
        part = out[:, seg.tokens]
        if seg.places is None:
            part.view(grid.shape).copy_(grid)
        else:
            part.copy_(grid.reshape(self.lanes, seg.chunks * C, *out.shape[2:]).index_select(1, seg.places))
