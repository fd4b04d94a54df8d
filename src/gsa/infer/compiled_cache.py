"""Keys and values that attention has seen, as the native engine reads them and adds to them.

Shape letters: H key/value heads, K width of a head, S positions.
"""

from __future__ import annotations

from ctypes import c_int64, c_void_p, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from gsa.errors import GSAError
from gsa.infer.compiled_parts import PADDING, Cached, Parts, padded
from gsa.mixers.base import State
from gsa.ops.memory import address
from gsa.ops.native.structs import CACHE_BLOCK, MAX_TOKENS, GsaBlock

UNLIMITED = 1 << 62


class Cache:
    """For each place a ring of slots: the token at position p lies in slot p mod capacity.

    A ring that is full grows to twice its size; that of a window only until it holds what a token needs beside the
    tokens of one call. C++ finds the rings through tables.
    """

    def __init__(self, layer: Parts, cached: Cached, places: int, positions: Tensor):
        heads, held = layer.block.heads, cached.held
        self.H, self.K, self._cached = int(heads.heads), int(heads.key_width), cached
        self._most = UNLIMITED if held is None else _blocks(held + MAX_TOKENS) * CACHE_BLOCK
        self._positions = positions
        self._rings = [torch.empty(0, dtype=torch.float32, device="cpu")] * places
        self._where, self._capacities, self._begins = (c_void_p * places)(), (c_int64 * places)(), (c_int64 * places)()

    def bind(self, block: GsaBlock) -> None:
        """Tells a block where the tables are."""
        tables = (self._where, self._capacities, self._begins)
        block.cache.caches, block.cache.capacities, block.cache.begins = (cast(x, c_void_p).value for x in tables)

    def put(self, place: int, state: State) -> None:
        """Keys and values [1, S, H, K] of the tokens before a position, of which those in use stand last."""
        keys, values = state[self._cached.keys][0], state[self._cached.values][0]
        position = int(state["position"][0])
        if not 0 <= position < UNLIMITED:
            raise GSAError(f"state: expected a count of tokens as the position of attention, got {position}")
        count = min(position, keys.shape[0])
        self._fill(place, keys[keys.shape[0] - count :], values[values.shape[0] - count :], position, count)

    def take(self, place: int) -> State:
        """Keys and values of a place, as the mixer has them."""
        cached, (keys, values) = self._cached, self._rows(place)
        if cached.filled:
            assert cached.held is not None
            keys, values = (F.pad(x, (0, 0, 0, 0, cached.held - x.shape[0], 0)) for x in (keys, values))
        return {cached.keys: keys[None], cached.values: values[None]}

    def reserve(self, place: int, tokens: int) -> int:
        """Makes room for so many tokens, at most MAX_TOKENS at a time; how many there is room for then."""
        position, count = self._held(place)
        needed = min(count + tokens, self._most)
        if needed > self._capacities[place]:
            self._fill(place, *self._rows(place), position, needed)
        return UNLIMITED if self._capacities[place] == self._most else self._capacities[place] - count

    def _held(self, place: int) -> tuple[int, int]:
        """Tokens that a place has seen, and of how many it holds keys and values that a later token can see."""
        position = int(self._positions[place])
        count = position - self._begins[place]
        return position, count if self._cached.held is None else min(count, self._cached.held)

    def _rows(self, place: int) -> tuple[Tensor, Tensor]:
        """Copies of the keys and values [S, H, K] of a place."""
        blocks, lanes = self._slots(place, *self._held(place))
        keys, values = (x[blocks, lanes] for x in self._views(place))
        return keys, values

    def _fill(self, place: int, keys: Tensor, values: Tensor, position: int, needed: int) -> None:
        """Keys and values [S, H, K] of the last tokens before a position, in a ring of at least so many slots."""
        capacity = 0
        if needed:
            capacity = min(CACHE_BLOCK << (_blocks(needed) - 1).bit_length(), self._most)
        if capacity != self._capacities[place]:
            size = self.H * capacity * (self.K + padded(self.K))
            with torch.inference_mode(False):  # else it could not be written to outside of inference mode
                self._rings[place] = torch.empty(size, dtype=torch.float32, device="cpu")
            self._where[place], self._capacities[place] = address("cache", self._rings[place]), capacity
        count = keys.shape[0]
        self._positions[place], self._begins[place] = position, position - count
        blocks, lanes = self._slots(place, position, count)
        for ring, x in zip(self._views(place), (keys, values), strict=True):
            ring[blocks, lanes] = x

    def _slots(self, place: int, position: int, count: int) -> tuple[Tensor, Tensor]:
        """Where the last tokens before a position lie: the number of a slot by 16, and what is left."""
        slots = torch.arange(position - count, position, device="cpu") % max(self._capacities[place], 1)
        return slots // PADDING, slots % PADDING

    def _views(self, place: int) -> tuple[Tensor, Tensor]:
        """Keys and values [capacity / 16, 16, H, K] in the memory of a place; csrc/native.h has its layout."""
        H, K, ring, capacity = self.H, self.K, self._rings[place], self._capacities[place]
        keys = ring[: H * capacity * K].view(H, capacity // PADDING, K, PADDING)
        values = ring[H * capacity * K :].view(H, capacity // PADDING, PADDING, padded(K))[..., :K]
        return keys.permute(1, 3, 0, 2), values.permute(1, 2, 0, 3)


def _blocks(slots: int) -> int:
    return -(-slots // CACHE_BLOCK)
