"""The launch table: how large tiles, chunks and segments are, and how many warps work on a tile.

Shape letters: K, V sides of the state.
"""

from __future__ import annotations

import os
from typing import NamedTuple

import torch

from gsa.ops.triton.launch import Target

CHUNK = 64
"""Tokens of a chunk."""
MIN_SEGMENT = 512
"""Tokens; shorter segments spend more on states than they win by being many."""
WIDE_TILE = 128
"""Features of a tile on the side that is split."""
ADDED_AT_ONCE = 1024
OPPOSITE = {"keys": "values", "values": "keys", "neither": "neither"}


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


def tiling(target: Target, dtype: torch.dtype, K: int, V: int, kind: str, slots: str) -> Tiling:
    """Of a kernel ("read", "walk", "differentiate" or "join")."""
    side, narrow = int(os.environ.get("SIDE", 128)), 64
    BK = power_of_two(K) if slots == "keys" else min(power_of_two(K), side if slots == "values" else narrow)
    BV = power_of_two(V) if slots == "values" else min(power_of_two(V), side)
    return Tiling(BK, BV, int(os.environ.get("W", 4)), int(os.environ.get("ST", 2)))


def inside(target: Target, dtype: torch.dtype, width: int, kind: str) -> Inside:
    """Of a kernel ("weigh", "score", "mix" or "finish")."""
    return Inside(min(power_of_two(width), int(os.environ.get('BX',64))), int(os.environ.get("IW", 4)), 1)


def stored_states(dtype: torch.dtype) -> torch.dtype:
    """Of the states that backward stores for the gradients of gates, where a rounding of them is one among many."""
    return {torch.bfloat16: torch.bfloat16, torch.float64: torch.float64}.get(dtype, torch.float32)


def segment_length(target: Target, tokens: int, heads: int, width: int) -> int:
    """Tokens of a segment: a power of two that leaves two programs for every processor, if there is the work.

    From shapes alone, for a compiler must know it, too; `width` is that of the wider side.
    """
    programs = tokens * heads * -(-width // WIDE_TILE)
    length = MIN_SEGMENT
    while 2 * target.processors * length < programs:
        length *= 2
    return length


def precision(target: Target, dtype: torch.dtype) -> str:
    """How products are computed: see gsa.ops.triton.tiles.product."""
    if dtype in (torch.float16, torch.bfloat16):
        return "split"
    return "tf32x3" if target.backend == "cuda" and dtype == torch.float32 else "ieee"
