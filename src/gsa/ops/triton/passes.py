"""One pass of gated linear attention as launches of kernels.

Shape letters: B batch, T time, H key/value heads, R queries per key/value head, K, V widths of the pass, C tokens of a
chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gsa.ops.layout import sequence_count
from gsa.ops.operators import Shape
from gsa.ops.state import compute_dtype
from gsa.ops.triton import plan
from gsa.ops.triton.gradient import differentiate_segments
from gsa.ops.triton.inside import finish_chunks, mix_chunks, score_chunks, weigh_chunks
from gsa.ops.triton.launch import launch, target_of
from gsa.ops.triton.parts import add_parts
from gsa.ops.triton.read import read_segments
from gsa.ops.triton.segments import Segments, counts, segments
from gsa.ops.triton.states import join_segments, walk_segments


class Call:
    """What all kernels of one call share: how it is cut, and how products are computed."""

    def __init__(self, q: Tensor, v: Tensor, cu_seqlens: Tensor | None, H: int):
        self.B, self.T, self.cu_seqlens, self.device = q.shape[0], q.shape[1], cu_seqlens, q.device
        self.H, self.R, self.N = H, q.shape[2] // H, sequence_count(q, cu_seqlens)
        self.tokens = self.B * self.T
        self.dtype, self.sums = q.dtype, compute_dtype(q.dtype)
        self.target = target_of(q.device)
        self.segment = plan.segment_length(self.target, self.tokens, H, max(q.shape[3], v.shape[3]))

    def kept_shape(self, keep: str, rows: int, columns: int) -> Shape:
        """Of the states kept for backward: before segments, if there are several, or before chunks."""
        packed = None if self.cu_seqlens is None else self.N
        size, chunks = counts(self.B, self.T, packed, self.segment, plan.CHUNK)
        count = {"nothing": 0, "marks": 0 if self.segment >= self.T else size, "states": chunks}[keep]
        return (count, self.H, rows, columns)

    @cached_property
    def segments(self) -> Segments:
        return segments(self.B, self.T, self.cu_seqlens, self.device, self.segment, plan.CHUNK)

    @property
    def products(self) -> dict[str, Any]:
        """Arguments of kernels that multiply."""
        return {"P": plan.precision(self.target, self.dtype), **self.sizes}

    @property
    def sizes(self) -> dict[str, Any]:
        """Arguments of all kernels."""
        import triton.language as tl

        return {"C": plan.CHUNK, "F": tl.float64 if self.sums == torch.float64 else tl.float32}

    def empty(self, *shape: int) -> Tensor:
        """In the dtype of sums."""
        return torch.empty(shape, dtype=self.sums, device=self.device)

    def late(self, width: int) -> Tensor:
        return self.empty(self.B, self.T, self.H * self.R, width)

    def parts(self, count: int, out: Tensor) -> Tensor:
        """Where tiles leave their parts of a result: in place, if there is but one."""
        return out if count == 1 else self.empty(count, *out.shape)


class Early(NamedTuple):
    """Keys or values on the way to the end of their chunk."""

    raw: Tensor | None
    """[B, T, H, X]; None for 1 - exp(g)."""
    g: Tensor | None
    """Log gates [B, T, H, X] or [B, T, H, 1]; None for none."""
    weighted: Tensor
    """[B, T, H, X]: decayed until the end of the chunk."""
    decay: Tensor | None
    """Sums of the gates of chunks [chunks, H, X]."""


def early(call: Call, raw: Tensor | None, g: Tensor | None, width: int) -> Early:
    """Keys or values, gated or not."""
    if g is None:
        assert raw is not None
        return Early(raw, g, raw, None)
    weighted = call.empty(call.B, call.T, call.H, width)
    chunks = call.segments.chunks
    decay = call.empty(chunks.shape[0], call.H, width)
    tiles = plan.inside(call.target, call.dtype, width, "weigh")
    launch(
        weigh_chunks,
        chunks.shape[0] * call.H * -(-width // tiles.width),
        tiles.warps,
        tiles.stages,
        y=raw,
        g=g,
        weighted=weighted,
        decay=decay,
        chunks=chunks,
        H=call.H,
        X=width,
        GX=g.shape[3],
        FROM_GATE=raw is None,
        BX=tiles.width,
        **call.sizes,
    )
    return Early(raw, g, weighted, decay)


@dataclass
class Pass:
    """Gated linear attention with late q [B, T, HQ, K], early k [B, T, H, K] and v [B, T, H, V], all dense.

    With a readout, q are slot scores. Slots are never split into tiles.
    """

    call: Call
    q: Tensor
    k: Early
    v: Early
    scale: float
    readout: str = "none"
    slots: str = "neither"
    """The side of the state that slots are on: "keys", "values" or "neither"."""
    turned: bool = False
    """States lie as [V, K]."""

    @property
    def K(self) -> int:
        return self.k.weighted.shape[3]

    @property
    def V(self) -> int:
        return self.v.weighted.shape[3]

    def tiling(self, kind: str) -> plan.Tiling:
        return plan.tiling(self.call.target, self.call.dtype, self.K, self.V, kind, self.slots)

    def _launch(self, kernel: Any, tiles: plan.Tiling, count: int, **arguments: Any) -> None:
        """With a program for every tile of `count` segments or sequences."""
        launch(
            kernel,
            count * self.call.H * tiles.over_k(self.K) * tiles.over_v(self.V),
            tiles.warps,
            tiles.stages,
            decay_k=self.k.decay,
            decay_v=self.v.decay,
            segments=self.call.segments.table,
            H=self.call.H,
            K=self.K,
            V=self.V,
            BK=tiles.BK,
            BV=tiles.BV,
            **arguments,
        )

    def _join(
        self, initial: Tensor | None, begin: Tensor, final: Tensor, late: Tensor | None = None, do: Tensor | None = None
    ) -> None:
        """Fills `begin` with the states that segments begin with, and `final`.

        With `late` queries and output gradients `do`, backward in time, with the gradients of states.
        """
        reverse = late is not None
        self._launch(
            walk_segments,
            self.tiling("walk"),
            self.call.segments.table.shape[0],
            x=late if reverse else self.k.weighted,
            y=do if reverse else self.v.weighted,
            end=begin,
            scale=self.scale,
            R=self.call.R if reverse else 1,
            REVERSE=reverse,
            **self.call.products,
        )
        self._launch(
            join_segments,
            self.tiling("join"),
            self.call.N,
            states=begin,
            begin=initial,
            end=final,
            firsts=self.call.segments.firsts,
            REVERSE=reverse,
            **self.call.sizes,
        )

    def _states(self, count: int) -> Tensor:
        return self.call.empty(count, self.call.H, self.K, self.V)

    def _score(self, x: Tensor, y: Early, readout: str) -> tuple[Tensor, Tensor]:
        """Late x weighted to the beginning of its chunk, and its products with y [B, T, HQ, C]."""
        call = self.call
        pairs = call.late(plan.CHUNK)
        weighted = x if y.g is None else call.late(x.shape[3])
        tiles = plan.inside(call.target, call.dtype, x.shape[3], "score")
        launch(
            score_chunks,
            call.segments.chunks.shape[0] * call.H * call.R,
            tiles.warps,
            tiles.stages,
            x=x,
            y=y.raw,
            g=y.g,
            weighted=None if y.g is None else weighted,
            pairs=pairs,
            chunks=call.segments.chunks,
            H=call.H,
            R=call.R,
            X=x.shape[3],
            GX=0 if y.g is None else y.g.shape[3],
            FROM_GATE=y.raw is None,
            READOUT=readout,
            BX=tiles.width,
            **call.products,
        )
        return weighted, pairs

    def _read(
        self,
        late: Tensor,
        pairs: Tensor | None,
        begin: Tensor | None,
        end: Tensor | None,
        states: Tensor | None,
        out: Tensor,
    ) -> None:
        """Fills `out`, [B, T, HQ, V] or parts of it, with what is read of values."""
        self._launch(
            read_segments,
            self.tiling("read"),
            self.call.segments.table.shape[0],
            q=late,
            k=self.k.weighted,
            v=self.v.weighted,
            pairs=pairs,
            o=out,
            begin=begin,
            end=end,
            states=states,
            scale=self.scale,
            tokens=self.call.tokens,
            R=self.call.R,
            TURNED=self.turned,
            WHOLE=self.call.segments.whole,
            **self.call.products,
        )

    def forward(self, initial: Tensor | None, keep: str, out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`out` [B, T, HQ, V] filled, the final states and the kept ones."""
        call, whole = self.call, self.call.segments.whole
        late, pairs = self._score(self.q, self.k, self.readout)
        kept = call.empty(*call.kept_shape(keep, self.K, self.V))
        begin, final = initial, self._states(call.N)
        if not whole:
            begin = kept if keep == "marks" else self._states(call.segments.table.shape[0])
            self._join(initial, begin, final)
        gated, count = self.v.g is not None, self.tiling("read").over_k(self.K)
        parts = call.empty(count, *out.shape) if gated else call.parts(count, out)
        states = kept if keep == "states" else None
        self._read(late, None if gated else pairs, begin, final if whole else None, states, parts)
        if gated:
            self._mix(parts, pairs, out)
        else:
            add(parts, out)
        return out, final, kept

    def _mix(self, read: Tensor, pairs: Tensor, out: Tensor) -> None:
        """Finishes outputs where values are gated."""
        call = self.call
        tiles = plan.inside(call.target, call.dtype, self.V, "mix")
        launch(
            mix_chunks,
            call.segments.chunks.shape[0] * call.H * call.R * -(-self.V // tiles.width),
            tiles.warps,
            tiles.stages,
            read=read,
            pairs=pairs,
            y=self.v.raw,
            g=self.v.g,
            out=out,
            chunks=call.segments.chunks,
            scale=self.scale,
            tokens=call.tokens,
            count=read.shape[0],
            H=call.H,
            R=call.R,
            X=self.V,
            FROM_GATE=self.v.raw is None,
            BX=tiles.width,
            **call.products,
        )

    def backward(
        self, do: Tensor, dfinal: Tensor | None, initial: Tensor | None, kept: Tensor, keep: str, grads: Gradients
    ) -> Tensor:
        """The gradient of the initial states; the others go where `grads` says."""
        call, whole, by_key, by_value = self.call, self.call.segments.whole, self.k.g is not None, self.v.g is not None
        late, pairs = self._score(self.q, self.k, self.readout)
        d_late, dpairs = self._score(do, self.v, "none")

        # Gradients of queries are read of the state as outputs are, with keys and values the other way around.
        back = Pass(call, d_late, self.v, self.k, self.scale, slots=plan.OPPOSITE[self.slots], turned=True)
        begin = kept if keep == "marks" else None
        if whole:
            begin = initial
        elif begin is None:
            begin = self._states(call.segments.table.shape[0])
            self._join(initial, begin, self._states(call.N))
        states: Tensor | None = kept if keep == "states" else None
        if states is None and (by_key or by_value):
            count = call.kept_shape("states", self.K, self.V)[0]
            states = do.new_empty((count, call.H, self.K, self.V), dtype=plan.stored_states(call.dtype))
        count = back.tiling("read").over_k(self.V)
        dq = call.empty(count, *self.q.shape) if by_key else call.parts(count, grads.q)
        back._read(d_late, None if by_key else dpairs, begin, None, None if keep == "states" else states, dq)

        begin, dinitial = dfinal, self._states(call.N)
        if not whole:
            begin = self._states(call.segments.table.shape[0])
            self._join(dfinal, begin, dinitial, late, d_late)
        tiles = self.tiling("differentiate")
        over_k, over_v, chunks = tiles.over_k(self.K), tiles.over_v(self.V), call.segments.chunks.shape[0]
        dk = call.empty(over_v, *self.k.weighted.shape) if by_key else call.parts(over_v, grads.k)
        dv = call.empty(over_k, *self.v.weighted.shape) if by_value else call.parts(over_k, grads.v)
        read = call.empty(over_k, *do.shape) if by_value else None
        crossing_k = call.empty(over_v, chunks, call.H, self.K) if by_key else None
        crossing_v = call.empty(over_k, chunks, call.H, self.V) if by_value else None
        self._launch(
            differentiate_segments,
            tiles,
            call.segments.table.shape[0],
            do=d_late,
            q=late,
            k=self.k.weighted,
            v=self.v.weighted,
            pairs=pairs,
            dpairs=dpairs,
            dk=dk,
            dv=dv,
            o=read,
            crossing_k=crossing_k,
            crossing_v=crossing_v,
            states=states,
            begin=begin,
            end=dinitial if whole else None,
            scale=self.scale,
            tokens=call.tokens,
            chunks=chunks,
            R=call.R,
            WHOLE=whole,
            **call.products,
        )
        if by_key:
            self._finish(self.q, self.k, dpairs, dq, dk, crossing_k, self.readout, grads.q, grads.k, grads.gk, grads)
        else:
            add(dq, grads.q)
            add(dk, grads.k)
        if by_value:
            self._finish(do, self.v, pairs, read, dv, crossing_v, "none", None, grads.v, grads.gv, grads)
        else:
            add(dv, grads.v)
        return dinitial

    def _finish(
        self,
        x: Tensor,
        y: Early,
        pairs: Tensor,
        dx_read: Tensor,
        dy_read: Tensor,
        crossing: Tensor,
        readout: str,
        dx: Tensor | None,
        dy: Tensor | None,
        dg: Tensor,
        grads: Gradients,
    ) -> None:
        """Gradients of a gated side, from what the walk has left of it."""
        call, width = self.call, x.shape[3]
        tiles = plan.inside(call.target, call.dtype, width, "finish")
        blocks = -(-width // tiles.width)
        parts = dg if y.g.shape[3] == width else call.parts(blocks, dg)
        launch(
            finish_chunks,
            call.segments.chunks.shape[0] * call.H * blocks,
            tiles.warps,
            tiles.stages,
            x=x,
            y=y.raw,
            g=y.g,
            pairs=pairs,
            dx_read=dx_read,
            dy_read=dy_read,
            crossing=crossing,
            before_dy=grads.before_early,
            before_dg=grads.before_gate,
            dx=dx,
            dy=dy,
            dg=parts,
            chunks=call.segments.chunks,
            scale=self.scale,
            tokens=call.tokens,
            all_chunks=crossing.shape[1],
            dx_count=dx_read.shape[0],
            dy_count=dy_read.shape[0],
            H=call.H,
            R=call.R,
            X=width,
            GX=y.g.shape[3],
            FROM_GATE=y.raw is None,
            READOUT=readout,
            BX=tiles.width,
            **call.products,
        )
        add(parts, dg)


@dataclass
class Gradients:
    """Where a pass leaves its gradients; None for what has none, and for 1 - exp(g), which goes to the gate."""

    q: Tensor
    k: Tensor | None
    v: Tensor | None
    gk: Tensor | None
    gv: Tensor | None
    before_early: Tensor | None = None
    """What another pass has found for the same write strengths, to be added."""
    before_gate: Tensor | None = None
    """And for the same gates."""


def add(parts: Tensor, out: Tensor) -> None:
    """Adds the parts up to `out`, unless it is the only part."""
    if parts is not out:
        launch(
            add_parts,
            -(-out.numel() // plan.ADDED_AT_ONCE),
            4,
            1,
            parts=parts,
            out=out,
            entries=out.numel(),
            count=parts.shape[0],
            BLOCK=plan.ADDED_AT_ONCE,
        )
