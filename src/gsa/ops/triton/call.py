"""What all kernels of one call share: how it is cut, how products are computed, and what is gated.

Shape letters: B batch, T time, H key/value heads, R queries per key/value head, C tokens of a chunk, X features.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gsa.ops.calls import LinearCall, Shape, SlotCall
from gsa.ops.sequences import sequence_count
from gsa.ops.state import compute_dtype
from gsa.ops.triton import plan
from gsa.ops.triton.jit.add_parts import add_parts
from gsa.ops.triton.jit.chunk_gates import weigh_chunks
from gsa.ops.triton.launch import launch, target_of
from gsa.ops.triton.segments import Segments, counts, segments


class SharedArguments:
    """What all kernels of one call share: how it is cut, and how products are computed."""

    def __init__(self, call: LinearCall | SlotCall):
        q, v, self.cu_seqlens, self.device = call.q, call.v, call.cu_seqlens, call.q.device
        self.B, self.T, H = q.shape[0], q.shape[1], call.k.shape[2]
        self.H, self.R, self.N = H, q.shape[2] // H, sequence_count(q, call.cu_seqlens)
        self.tokens = self.B * self.T
        self.dtype, self.sums = q.dtype, compute_dtype(q.dtype)
        self.target = target_of(q.device)
        self.chunk = plan.settings(self.target, q.dtype).chunk
        self.segment = plan.segment_length(self.target, self.tokens, H, max(q.shape[3], v.shape[3]))

    def kept_shape(self, save: str, rows: int, columns: int) -> Shape:
        """The shape of the states kept for backward: before segments, if there are several, or before chunks."""
        packed = None if self.cu_seqlens is None else self.N
        size, chunks = counts(self.B, self.T, packed, self.segment, self.chunk)
        count = {"nothing": 0, "marks": 0 if self.segment >= self.T else size, "states": chunks}[save]
        return (count, self.H, rows, columns)

    @cached_property
    def segments(self) -> Segments:
        return segments(self.B, self.T, self.cu_seqlens, self.device, self.segment, self.chunk)

    @property
    def products(self) -> dict[str, Any]:
        """Arguments of all kernels that compute matrix products."""
        return {"P": plan.precision(self.target, self.dtype), **self.sizes}

    @property
    def sizes(self) -> dict[str, Any]:
        """Arguments of all kernels."""
        import triton.language as tl

        return {"C": self.chunk, "F": tl.float64 if self.sums == torch.float64 else tl.float32}

    def empty(self, *shape: int) -> Tensor:
        """An empty tensor in the dtype of sums."""
        return torch.empty(shape, dtype=self.sums, device=self.device)

    def late(self, width: int) -> Tensor:
        """An empty tensor with a row for every query [B, T, HQ, width]."""
        return self.empty(self.B, self.T, self.H * self.R, width)

    def parts(self, count: int, out: Tensor) -> Tensor:
        """Where `count` tiles write their parts of a result: `out` itself if there is one tile, else to be added up."""
        return out if count == 1 else self.empty(count, *out.shape)


class Early(NamedTuple):
    """Keys or values, what a token writes: as they are, and decayed until the end of their chunk."""

    raw: Tensor | None
    """[B, T, H, X]; None for 1 - exp(g)."""
    g: Tensor | None
    """Log gates [B, T, H, X] or [B, T, H, 1]; None for none."""
    weighted: Tensor
    """[B, T, H, X]: decayed until the end of the chunk."""
    decay: Tensor | None
    """Sums of the gates of chunks [chunks, H, X]."""


def early(call: SharedArguments, raw: Tensor | None, g: Tensor | None, width: int) -> Early:
    """Keys or values, with their decay if they are gated."""
    if g is None:
        assert raw is not None
        return Early(raw, g, raw, None)
    weighted = call.empty(call.B, call.T, call.H, width)
    chunks = call.segments.chunks
    decay = call.empty(chunks.shape[0], call.H, width)
    tiles = plan.chunk_tiling(call.target, call.dtype, width, "weigh")
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


def add(parts: Tensor, out: Tensor) -> None:
    """Sums the parts into `out`, unless `out` itself is the only part."""
    if parts is not out:
        launch(
            add_parts,
            -(-out.numel() // plan.ENTRIES_PER_SUM),
            4,
            1,
            parts=parts,
            out=out,
            entries=out.numel(),
            count=parts.shape[0],
            BLOCK=plan.ENTRIES_PER_SUM,
        )


def scaled_before(q: Tensor, scale: float) -> tuple[Tensor, float, float]:
    """Queries, the scale for the kernels to apply, and the factor that the gradient of q is still to be multiplied by.

    Triton passes numbers to kernels in fp32. In fp64 the queries are therefore scaled here, and the kernels get 1.
    """
    return (q * scale, 1.0, scale) if q.dtype == torch.float64 else (q, scale, 1.0)


def dense(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def dense_like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)
