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
    nbytes: int


class PrefixCache:
    """Prefixes by the TokenHash of their tokens, of so many bytes in all; the least recently used ones make room."""

    def __init__(self, limit: int):
        self.limit = limit
        self._prefixes: OrderedDict[bytes, Prefix] = OrderedDict()

    def __len__(self) -> int:
        return len(self._prefixes)

    @property
    def nbytes(self) -> int:
        """Bytes of all prefixes."""
        return sum(prefix.nbytes for prefix in self._prefixes.values())

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

    def put(self, digest: bytes, tokens: int, state: ModelState, logits: Tensor) -> None:
        """Keeps what is known after so many tokens, unless it alone is larger than the limit."""
        nbytes = state.nbytes + logits.nbytes
        if nbytes > self.limit:
            return
        self._prefixes[digest] = Prefix(tokens, state, logits, nbytes)
        self._prefixes.move_to_end(digest)
        while self.nbytes > self.limit:
            self._prefixes.popitem(last=False)
