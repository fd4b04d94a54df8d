"""The launch table: how large tiles, chunks and segments are, and how many warps work on a tile.

Shape letters: K, V sides of the state.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from gsa.ops.triton.launch import Target

MIN_SEGMENT = 512
"""Tokens. In shorter segments, loading and storing states costs more than working on more of them at once saves."""
NARROW = 64
"""The largest narrow side of a tile. The gated side is the narrow one, because its factors are computed and therefore
multiplied as two bf16 numbers each (see gsa.ops.triton.jit.tiles.product)."""
ENTRIES_PER_SUM = 1024
"""Entries of the result that one program of add_parts computes."""


class Tiling(NamedTuple):
    """How a kernel that owns tiles [BK, BV] of the state is launched."""

    BK: int
    BV: int
    warps: int
    stages: int

    def over_k(self, K: int) -> int:
        """Tiles of keys."""
        return -(-K // self.BK)

    def over_v(self, V: int) -> int:
        """Tiles of values."""
        return -(-V // self.BV)


class ChunkTiling(NamedTuple):
    """How a kernel for gates inside chunks is launched."""

    width: int
    """Features of a block."""
    warps: int
    stages: int


def power_of_two(n: int, least: int = 16) -> int:
    """The smallest power of two that is at least n, and at least 16, the smallest size that matrix units take."""
    return max(least, 1 << max(n - 1, 0).bit_length())


class Settings(NamedTuple):
    """How kernels are launched for a kind of GPU and a kind of dtype."""

    chunk: int
    """Tokens of a chunk."""
    tiles: dict[str, tuple[int, int, int]]
    """By kernel: the wide side of a tile of the state, warps, pipeline stages."""
    blocks: dict[str, tuple[int, int]]
    """By kernel for gates inside chunks: features of a block, warps."""


_BLOCKS = {"weigh": (32, 8), "score": (32, 8), "mix": (32, 8), "finish": (16, 8)}

# The largest tiles that do not spill registers, which `gsa kernels` checks. Hopper's matrix units read operands from
# shared memory, which leaves registers for larger tiles; a wave on AMD has twice the registers of a warp on NVIDIA.
# fp16 and fp32 need more registers than bf16, because all their factors are split.
TABLE: dict[tuple[str, str], Settings] = {
    ("hopper", "bf16"): Settings(
        chunk=64,
        tiles={"read": (128, 8, 2), "walk": (128, 8, 2), "differentiate": (64, 8, 2), "join": (64, 4, 1)},
        blocks=_BLOCKS,
    ),
    ("hopper", "fp16"): Settings(
        chunk=16,
        tiles={"read": (128, 8, 2), "walk": (128, 8, 2), "differentiate": (64, 8, 2), "join": (64, 4, 1)},
        blocks=_BLOCKS,
    ),
    ("hopper", "fp32"): Settings(
        chunk=16,
        tiles={"read": (128, 8, 2), "walk": (128, 8, 2), "differentiate": (64, 8, 1), "join": (64, 4, 1)},
        blocks=_BLOCKS,
    ),
    ("ampere", "bf16"): Settings(
        chunk=32,
        tiles={"read": (128, 8, 2), "walk": (64, 8, 2), "differentiate": (32, 8, 2), "join": (64, 4, 1)},
        blocks=_BLOCKS,
    ),
    ("ampere", "fp16"): Settings(
        chunk=16,
        tiles={"read": (128, 8, 2), "walk": (128, 8, 2), "differentiate": (32, 8, 2), "join": (64, 4, 1)},
        blocks={**_BLOCKS, "finish": (16, 4)},
    ),
    ("ampere", "fp32"): Settings(
        chunk=16,
        tiles={"read": (64, 8, 2), "walk": (128, 8, 2), "differentiate": (32, 8, 2), "join": (64, 4, 1)},
        blocks=_BLOCKS,
    ),
    ("amd", "bf16"): Settings(
        chunk=64,
        tiles={"read": (128, 4, 1), "walk": (128, 4, 1), "differentiate": (128, 4, 1), "join": (64, 4, 1)},
        blocks={"weigh": (32, 4), "score": (32, 4), "mix": (32, 4), "finish": (32, 4)},
    ),
    ("amd", "fp16"): Settings(
        chunk=32,
        tiles={"read": (128, 4, 1), "walk": (128, 4, 1), "differentiate": (64, 4, 1), "join": (64, 4, 1)},
        blocks={"weigh": (32, 4), "score": (32, 4), "mix": (32, 4), "finish": (32, 4)},
    ),
    ("amd", "fp32"): Settings(
        chunk=32,
        tiles={"read": (128, 4, 1), "walk": (128, 4, 1), "differentiate": (128, 4, 1), "join": (64, 4, 1)},
        blocks={"weigh": (32, 4), "score": (32, 4), "mix": (32, 4), "finish": (32, 4)},
    ),
}


def settings(target: Target, dtype: torch.dtype) -> Settings:
    """The launch settings of a GPU. An unknown GPU uses the smallest settings of its vendor."""
    if target.backend == "hip":
        kind = "amd"
    else:
        kind = "ampere" if target.backend == "cuda" and target.arch != 90 else "hopper"
    return TABLE[kind, {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtype, "fp32")]


def tiling(target: Target, dtype: torch.dtype, K: int, V: int, kind: str, gated: str) -> Tiling:
    """The tiles of a kernel that keeps the state in tiles: at most NARROW on one side, as wide as the table allows on
    the other.

    `gated` says which sides have gates: "neither", "keys", "values" or "both".
    """
    side, warps, stages = settings(target, dtype).tiles[kind]
    keys_narrow = gated == "keys" or (gated != "values" and K <= V)
    narrow, wide = (K, V) if keys_narrow else (V, K)
    if narrow > NARROW:
        side //= 2  # with several tiles on both sides, the offsets of a tile need registers, too
    narrow = min(power_of_two(narrow), NARROW)
    wide = min(power_of_two(wide), side)
    if keys_narrow:
        return Tiling(narrow, wide, warps, stages)
    # A tile is held in registers with values as rows. If those are the narrow side, loading ahead would spill.
    return Tiling(wide, narrow, warps, 1 if wide > narrow else stages)


def chunk_tiling(target: Target, dtype: torch.dtype, width: int, kind: str) -> ChunkTiling:
    """The blocks of features of a kernel for gates inside chunks."""
    features, warps = settings(target, dtype).blocks[kind]
    return ChunkTiling(min(power_of_two(width), features), warps, 1)


def stored_states(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the states that backward stores for the gradients of gates.

    bf16 for bf16 inputs: such a gradient sums over the entries of a state, so rounding them adds little to its error.
    """
    return {torch.bfloat16: torch.bfloat16, torch.float64: torch.float64}.get(dtype, torch.float32)


def segment_length(target: Target, tokens: int, heads: int, width: int) -> int:
    """Tokens of a segment: the longest power of two with which at least 80% of the processors have a program.

    It follows from shapes alone, because torch.compile must know it without reading values; `width` is that of the
    wider side of the state.
    """
    programs = tokens * heads * -(-width // 128)
    length = MIN_SEGMENT
    while programs >= 0.8 * target.processors * 2 * length:
        length *= 2
    return length


def precision(target: Target, dtype: torch.dtype) -> str:
    """How products are computed: see gsa.ops.triton.jit.tiles.product."""
    if dtype in (torch.float16, torch.bfloat16):
        return "emulated" if target.backend == "cpu" else "split"
    return "tf32x3" if target.backend == "cuda" and dtype == torch.float32 else "ieee"
