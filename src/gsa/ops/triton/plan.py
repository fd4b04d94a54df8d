"""The launch table: how large tiles, chunks and segments are, and how many warps work on a tile.

Shape letters: K, V sides of the state.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from gsa.ops.triton.launch import Target

MIN_SEGMENT = 512
"""Tokens; shorter segments spend more on states than they win by being many."""
NARROW = 64
"""The narrow side of a tile, at most. The side with gates is the narrow one: its factors are not native."""
ADDED_AT_ONCE = 1024


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


class Inside(NamedTuple):
    """How a kernel for gates inside chunks is launched."""

    width: int
    """Features of a block."""
    warps: int
    stages: int


def power_of_two(n: int, least: int = 16) -> int:
    """The smallest one from n on; 16 is the least that matrix units take."""
    return max(least, 1 << max(n - 1, 0).bit_length())


class Settings(NamedTuple):
    """How kernels are launched for a kind of GPU and a kind of dtype."""

    chunk: int
    """Tokens of a chunk."""
    tiles: dict[str, tuple[int, int, int]]
    """Per kernel: the wide side of a tile of the state, warps, stages of loading ahead."""
    blocks: dict[str, tuple[int, int]]
    """Per kernel for gates inside chunks: features of a block, warps."""


_BLOCKS = {"weigh": (32, 8), "score": (32, 8), "mix": (32, 8), "finish": (16, 8)}

# What a tile may hold without spilling, which `gsa kernels` checks. Hopper's matrix units take operands from shared
# memory and leave registers for larger tiles; a wave of AMD has twice the registers of a warp. fp16 and fp32 take more
# of them: all their factors are split.
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
        blocks=_BLOCKS,
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
    """The entry of the table for a GPU; one that nobody has named takes the one that asks for least of its maker's."""
    if target.backend == "hip":
        kind = "amd"
    else:
        kind = "ampere" if target.backend == "cuda" and target.arch != 90 else "hopper"
    return TABLE[kind, {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtype, "fp32")]


def tiling(target: Target, dtype: torch.dtype, K: int, V: int, kind: str, gated: str) -> Tiling:
    """Of a kernel that owns tiles of the state: as much as a tile may hold, on the wider side.

    `gated` are the sides with gates: "neither", "keys", "values" or "both".
    """
    side, warps, stages = settings(target, dtype).tiles[kind]
    keys_narrow = gated == "keys" or (gated != "values" and K <= V)
    narrow, wide = (K, V) if keys_narrow else (V, K)
    if narrow > NARROW:
        side //= 2  # who works on one of several tiles of both sides has more to keep track of
    narrow = min(power_of_two(narrow), NARROW)
    wide = min(power_of_two(wide), side)
    if keys_narrow:
        return Tiling(narrow, wide, warps, stages)
    # Values are the rows of a tile in registers, and with few rows there is no room for what is loaded ahead.
    return Tiling(wide, narrow, warps, 1 if wide > narrow else stages)


def inside(target: Target, dtype: torch.dtype, width: int, kind: str) -> Inside:
    """Of a kernel for gates inside chunks."""
    features, warps = settings(target, dtype).blocks[kind]
    return Inside(min(power_of_two(width), features), warps, 1)


def stored_states(dtype: torch.dtype) -> torch.dtype:
    """Of the states that backward stores for the gradients of gates, where a rounding of them is one among many."""
    return {torch.bfloat16: torch.bfloat16, torch.float64: torch.float64}.get(dtype, torch.float32)


def segment_length(target: Target, tokens: int, heads: int, width: int) -> int:
    """Tokens of a segment: the longest power of two that leaves most processors a program.

    From shapes alone, for a compiler must know it, too; `width` is that of the wider side.
    """
    programs = tokens * heads * -(-width // 128)
    length = MIN_SEGMENT
    while programs >= 0.8 * target.processors * 2 * length:
        length *= 2
    return length


def precision(target: Target, dtype: torch.dtype) -> str:
    """How products are computed: see gsa.ops.triton.tiles.product."""
    if dtype in (torch.float16, torch.bfloat16):
        return "emulated" if target.backend == "cpu" else "split"
    return "tf32x3" if target.backend == "cuda" and dtype == torch.float32 else "ieee"
