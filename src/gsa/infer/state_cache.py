"""StateCache: states that prompts and answers have left, for prompts that begin the same way; in memory, and in a
folder if wanted."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from gsa.infer.model import Model
from gsa.infer.state import State
from gsa.infer.state_dir import DirReport, Key, StateDir


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
    """States that made room for others; they may still be on disk."""
    disk: DirReport
    """The same of the folder."""


class _Held(NamedTuple):
    state: State
    nbytes: int


class _Sums(NamedTuple):
    """Of all states in memory, which may be thousands: too many to add up for every prompt."""

    nbytes: int
    lengths: Counter[int]
    """How many states have read so many tokens."""

    def changed(self, held: _Held, by: int) -> _Sums:
        """With a state more (1) or less (-1)."""
        tokens = held.state.tokens
        self.lengths[tokens] += by
        if not self.lengths[tokens]:
            del self.lengths[tokens]
        return _Sums(self.nbytes + by * held.nbytes, self.lengths)


class StateCache:
    """States of so many bytes in all; the least recently used ones make room. Whoever goes on from one must not change
    it. One thread at a time may use it, and any number may ask for a report.

    With a folder, all are written there too, and found there when they have left memory, or when all begins anew.
    """

    def __init__(self, limit: int):
        self.limit = limit
        self.version = 0
        """Grows with every state that is put."""
        self._held: OrderedDict[Key, _Held] = OrderedDict()
        self._sums: _Sums | None = None  # while states change, so that an interruption leaves no wrong ones
        self._hits = self._misses = self._reused = self._evictions = 0
        self._disk: StateDir | None = None

    def use_folder(self, folder: Path, limit: int, model: Model, computed: str, say: Callable[[str], None]) -> None:
        """Keeps states in a folder too; what the arguments mean, `StateDir` tells."""
        self._disk = StateDir(folder, limit, model, computed, self._peek, say)

    def close(self, *, write: bool = True) -> None:
        """Writes what is still to be written to the folder, unless it is to be dropped, and leaves the folder to
        others; memory stays as it is."""
        if self._disk is not None:
            self._disk.close(write=write)

    def __len__(self) -> int:
        return len(self._held)

    @property
    def nbytes(self) -> int:
        """Bytes of all states in memory."""
        sums = self._sums
        return sums.nbytes if sums is not None else self._added_up().nbytes

    def lengths(self) -> list[int]:
        """How many tokens the states have read, the most first."""
        on_disk = set() if self._disk is None else self._disk.lengths()
        sums = self._sums or self._added_up()
        return sorted(sums.lengths.keys() | on_disk, reverse=True)

    def _added_up(self) -> _Sums:
        held = list(self._held.values())  # at once: another thread may change it
        return _Sums(sum(each.nbytes for each in held), Counter(each.state.tokens for each in held))

    def get(self, scope: str, digest: bytes, tokens: int) -> State | None:
        """The state after so many tokens with this TokenHash, if it is known."""
        key = scope, digest.hex()
        state = self._peek(key)
        if state is not None:
            self._held.move_to_end(key)
        elif self._disk is not None:
            state = self._disk.get(key, tokens)
            if state is not None:
                self._hold(key, state)
        return state

    def _peek(self, key: Key) -> State | None:
        held = self._held.get(key)
        return None if held is None else held.state

    def put(self, scope: str, state: State) -> None:
        """Keeps a state, unless it alone is larger than the limit."""
        key = scope, state.digest
        self._hold(key, state)
        self.version += 1
        if self._disk is not None:
            self._disk.put(key)

    def _hold(self, key: Key, state: State) -> None:
        new = _Held(state, state.nbytes)
        if new.nbytes > self.limit:
            return
        sums, self._sums = self._sums or self._added_up(), None
        old = self._held.pop(key, None)
        if old is not None:
            sums = sums.changed(old, -1)
        self._held[key] = new
        sums = sums.changed(new, 1)
        while sums.nbytes > self.limit:
            sums = sums.changed(self._held.popitem(last=False)[1], -1)
            self._evictions += 1
        self._sums = sums

    def reused(self, tokens: int) -> None:
        """Counts a prompt that went on from a state, and how many tokens that saved."""
        self._hits += 1
        self._reused += tokens

    def missed(self) -> None:
        """Counts a prompt of which nothing was known."""
        self._misses += 1

    def report(self) -> CacheReport:
        """What it holds now, and what came of it so far."""
        disk = DirReport() if self._disk is None else self._disk.report()
        return CacheReport(self._hits, self._misses, self._reused, len(self), self.nbytes, self._evictions, disk)
