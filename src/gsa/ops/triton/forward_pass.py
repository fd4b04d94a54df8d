"""One pass of gated linear attention forward, as launches of kernels.

Shape letters: B batch, T time, H key/value heads, R queries per key/value head, K, V widths of the pass, C tokens of a
chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gsa.ops.triton import plan
from gsa.ops.triton.call import Early, SharedArguments, add
from gsa.ops.triton.jit.chunk_gates import mix_chunks, score_chunks
from gsa.ops.triton.jit.segment_outputs import read_segments
from gsa.ops.triton.jit.segment_states import join_segments, walk_segments
from gsa.ops.triton.launch import launch


@dataclass
class Pass:
    """Gated linear attention of q [B, T, HQ, K], k [B, T, H, K] and v [B, T, H, V], all contiguous.

    With a readout, q are slot scores. Queries and output gradients are called late, because they read what was written
    earlier in their chunk; keys and values are called early.
    """

    call: SharedArguments
    q: Tensor
    k: Early
    v: Early
    scale: float
    readout: str = "none"
    transposed: bool = False
    """Keys and values have changed places, so states are stored as [V, K]."""

    @property
    def K(self) -> int:
        return self.k.weighted.shape[3]

    @property
    def V(self) -> int:
        return self.v.weighted.shape[3]

    @property
    def factor(self) -> float | None:
        """The scale as kernels take it: None if it is 1, so that they skip the multiplication."""
        return None if self.scale == 1 else self.scale

    def tiling(self, kind: str) -> plan.Tiling:
        if self.k.g is None:
            sides = "neither" if self.v.g is None else "values"
        else:
            sides = "keys" if self.v.g is None else "both"
        return plan.tiling(self.call.target, self.call.dtype, self.K, self.V, kind, sides)

    def launch_tiles(self, kernel: Any, tiles: plan.Tiling, count: int, **arguments: Any) -> None:
        """Launches a program for every tile of the states of `count` segments or sequences."""
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

    def join(
        self, initial: Tensor | None, begin: Tensor, final: Tensor, late: Tensor | None = None, do: Tensor | None = None
    ) -> None:
        """Fills `begin` with the states that segments begin with, and `final` with those that sequences end with.

        With `late` queries and output gradients `do`, the same for the gradients of states, backward in time.
        """
        reverse = late is not None
        self.launch_tiles(
            walk_segments,
            self.tiling("walk"),
            self.call.segments.table.shape[0],
            x=late if reverse else self.k.weighted,
            y=do if reverse else self.v.weighted,
            end=begin,
            scale=self.factor,
            R=self.call.R if reverse else 1,
            REVERSE=reverse,
            **self.call.products,
        )
        self.launch_tiles(
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

    def states(self, count: int) -> Tensor:
        return self.call.empty(count, self.call.H, self.K, self.V)

    def score(self, x: Tensor, y: Early, readout: str) -> tuple[Tensor, Tensor]:
        """Late x weighted to the beginning of its chunk, and its products with y [B, T, HQ, C]."""
        call = self.call
        pairs = call.late(call.chunk)
        weighted = x if y.g is None else call.late(x.shape[3])
        tiles = plan.chunk_tiling(call.target, call.dtype, x.shape[3], "score")
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

    def read(
        self,
        late: Tensor,
        pairs: Tensor | None,
        begin: Tensor | None,
        end: Tensor | None,
        states: Tensor | None,
        out: Tensor,
    ) -> None:
        """Fills `out`, [B, T, HQ, V] or parts of it, with what queries read from the states."""
        self.launch_tiles(
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
            scale=self.factor,
            tokens=self.call.tokens,
            R=self.call.R,
            TRANSPOSED=self.transposed,
            WHOLE=self.call.segments.whole,
            **self.call.products,
        )

    def forward(self, initial: Tensor | None, save: str, out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`out` [B, T, HQ, V] filled, the final states and the kept ones."""
        call, whole = self.call, self.call.segments.whole
        late, pairs = self.score(self.q, self.k, self.readout)
        kept = call.empty(*call.kept_shape(save, self.K, self.V))
        begin, final = initial, self.states(call.N)
        if not whole:
            begin = kept if save == "marks" else self.states(call.segments.table.shape[0])
            self.join(initial, begin, final)
        gated, count = self.v.g is not None, self.tiling("read").over_k(self.K)
        parts = call.empty(count, *out.shape) if gated else call.parts(count, out)
        states = kept if save == "states" else None
        self.read(late, None if gated else pairs, begin, final if whole else None, states, parts)
        if gated:
            self._mix(parts, pairs, out)
        else:
            add(parts, out)
        return out, final, kept

    def _mix(self, read: Tensor, pairs: Tensor, out: Tensor) -> None:
        """Adds to outputs what they read from their own chunk, where values are gated."""
        call = self.call
        tiles = plan.chunk_tiling(call.target, call.dtype, self.V, "mix")
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
            scale=self.factor,
            tokens=call.tokens,
            count=read.shape[0],
            H=call.H,
            R=call.R,
            X=self.V,
            FROM_GATE=self.v.raw is None,
            BX=tiles.width,
            **call.products,
        )
