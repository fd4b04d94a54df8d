"""PrefixCache: states after the first tokens of earlier prompts, for prompts that begin the same way."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from gsa.models.state import ModelState


class Prefix(NamedTuple):
    """What a model knows after the first tokens of a prompt. Whoever goes on from here must not change it."""

    tokens: int
    state: ModelState
    logits: Tensor

    @property
    def nbytes(self) -> int:
        return self.state.nbytes + self.logits.nbytes


class PrefixCache:
    """Prefixes by the TokenHash of their tokens, of so many bytes in all; the least recently used ones make room."""

    def __init__(self, limit: int):
        self.limit, self.nbytes = limit, 0
        self._prefixes: OrderedDict[bytes, Prefix] = OrderedDict()

    def __len__(self) -> int:
        return len(self._prefixes)

    @property
    def longest(self) -> int:
        """Tokens of the longest prefix there is."""
        return max((prefix.tokens for prefix in self._prefixes.values()), default=0)

    def find(self, digests: Sequence[bytes]) -> Prefix | None:
        """The prefix with the last of these digests that is known."""
        for digest in reversed(digests):
            if digest in self._prefixes:
                self._prefixes.move_to_end(digest)
                return self._prefixes[digest]
        return None

    def put(self, digest: bytes, prefix: Prefix) -> None:
        """Keeps a prefix, unless it alone is larger than the limit."""
        if prefix.nbytes > self.limit:
            return
        if digest in self._prefixes:
            self.nbytes -= self._prefixes.pop(digest).nbytes
        self._prefixes[digest] = prefix
        self.nbytes += prefix.nbytes
        while self.nbytes > self.limit:
            self.nbytes -= self._prefixes.popitem(last=False)[1].nbytes
