"""StateCache: states that prompts and answers have left, for prompts that begin the same way."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

from gsa.infer.state import State

Key = tuple[str, str]
"""A scope, within which states are shared, and the TokenHash of the tokens, in hexadecimal."""


@dataclass(frozen=True)
class CacheReport:
    """What a cache holds, and what came of it so far."""

    hits: int
    """Times that a prompt went on from a state that was kept."""
    misses: int
    """Prompts of which nothing was known at first."""
    tokens_reused: int
    """Tokens that were not read again."""
    states: int
    nbytes: int
    """Bytes of the states in memory."""
    evictions: int
    """States that made room for others."""


class _Held(NamedTuple):
    state: State
    nbytes: int


class StateCache:
    """States of so many bytes in all; the least recently used ones make room. Whoever goes on from one must not change
    it. One thread at a time may use it, and any number may ask for a report."""

    def __init__(self, limit: int):
        self.limit = limit
        self.version = 0
        """Grows with every state that is put."""
        self._held: OrderedDict[Key, _Held] = OrderedDict()
        self._hits = self._misses = self._reused = self._evictions = 0

    def __len__(self) -> int:
        return len(self._held)

    @property
    def nbytes(self) -> int:
        """Bytes of all states in memory."""
        return sum(held.nbytes for held in list(self._held.values()))

    def lengths(self) -> list[int]:
        """How many tokens the states have read, the most first."""
        return sorted({held.state.tokens for held in self._held.values()}, reverse=True)

    def get(self, scope: str, digest: bytes) -> State | None:
        """The state after the tokens with this TokenHash, if it is known."""
        held = self._held.get((scope, digest.hex()))
        if held is None:
            return None
        self._held.move_to_end((scope, digest.hex()))
        return held.state

    def put(self, scope: str, state: State) -> None:
        """Keeps a state, unless it alone is larger than the limit."""
        key, nbytes = (scope, state.digest), state.nbytes
        if nbytes > self.limit:
            return
        self._held[key] = _Held(state, nbytes)
        self._held.move_to_end(key)
        self.version += 1
        excess = self.nbytes - self.limit
        while excess > 0:
            excess -= self._held.popitem(last=False)[1].nbytes
            self._evictions += 1

    def reused(self, tokens: int) -> None:
        """Counts a prompt that went on from a state, and how many tokens that saved."""
        self._hits += 1
        self._reused += tokens

    def missed(self) -> None:
        """Counts a prompt of which nothing was known."""
        self._misses += 1

    def report(self) -> CacheReport:
        return CacheReport(self._hits, self._misses, self._reused, len(self), self.nbytes, self._evictions)
