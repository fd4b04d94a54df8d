"""The state on its way from chunk to chunk.

Shape letters: n chunks of all lanes and heads; K, V as always.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gsa.ops.chunk.grid import Grid, Plan, Segment

if TYPE_CHECKING:
    from gsa.ops.chunk.passes import Pass


class Scan:
    """A recurrent state (in reverse: its gradient) carried from chunk to chunk; it enters and leaves with sequences.

    The states between chunks are scratch: they last until the next scan in the same direction.
    """

    def __init__(self, name: str, grid: Grid, shape: tuple[int, int], entering: Tensor | None):
        self.name, self.shape, self.entering, self.scratch = name, shape, entering, grid.scratch
        self.running: Tensor | None = None
        """The state between two segments [lanes * H, K, V]; the first segment of a sequence needs none."""
        self.leaving = grid.scratch.empty.new_zeros(grid.N, grid.H, *shape)
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

    def __init__(self, name: str, grid: Grid, save: str, kept: Tensor, initial: Tensor | None):
        self.scan = Scan(name, grid, (kept.shape[2], kept.shape[3]), initial)
        self.save, self.kept = save, kept

    @property
    def final(self) -> Tensor:
        return self.scan.leaving

    def forward(self, seg: Segment, x: Pass) -> Tensor:
        """States before the chunks of the segment [n, K, V]."""
        states = self.scan.through(seg, x.k.border, x.v.border, x.state_decay())[:-1]
        if self.save == "marks":
            self.kept[seg.index, : states.shape[1]] = states[0]
        elif self.save == "states":
            self.kept[seg.first_chunk : seg.first_chunk + seg.chunks, : states.shape[1]] = states
        return states.flatten(0, 1)

    def replay(self, seg: Segment, x: Pass) -> Tensor:
        """The same again, from what was kept; segments in any order."""
        n = x.k.raw.shape[0] // seg.chunks  # lanes * H
        if self.save == "states":
            return self.kept[seg.first_chunk : seg.first_chunk + seg.chunks, :n].flatten(0, 1)
        self.scan.running = self.kept[seg.index, :n]
        return self.scan.through(seg, x.k.border, x.v.border, x.state_decay())[:-1].flatten(0, 1)


def memory_shape(plan: Plan, save: str, H: int, K: int, V: int) -> tuple[int, int, int, int]:
    """Shape of what a Memory keeps: states at segments, at chunks, or nothing."""
    count = {"nothing": 0, "marks": plan.max_segments, "states": plan.max_chunks}[save]
    return (count, plan.lanes * H, K, V)
