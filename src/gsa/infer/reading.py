"""Prompts: checked, and read into a model piece by piece.

Pieces are counted from where a prompt starts, whatever else runs and whatever is remembered of it, so that one prompt
always gives the same numbers. Shape letters: T time, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gsa.errors import GSAError
from gsa.infer.prefix import PrefixCache
from gsa.infer.runner import MAX_READ, Runner
from gsa.infer.state import State
from gsa.infer.tokens import TokenHash
from gsa.mixers.sequences import describe
from gsa.models.state import ModelState

Ids = Sequence[int] | Tensor | np.ndarray[Any, Any]
"""Tokens of one sequence, in any of these forms."""


class Reading:
    """A prompt [T] that is being read, from the beginning or from a state, which stays as it is."""

    def __init__(self, runner: Runner, ids: Tensor, start: State | None = None, prefixes: PrefixCache | None = None):
        self.ids, self.position, self.cached = ids, 0, 0
        self.state: ModelState | None = None if start is None else start.model
        self.logits: Tensor | None = None if start is None else start.logits
        self._runner, self._start = runner, start
        self._prefixes = prefixes if start is None else None
        self._digests: list[bytes] = []  # after every whole piece, as far as they were needed

    @property
    def done(self) -> bool:
        """Whether all is read."""
        return self.position == len(self.ids)

    @property
    def piece(self) -> Tensor:
        """The ids that are read next."""
        return self.ids[self.position : self.position + MAX_READ]

    def advance(self) -> int:
        """Reads one piece, or skips what an earlier prompt had in common; how many tokens had to be read."""
        if self._skipped():
            return 0
        piece = self.piece
        self.logits, self.state = self._runner.read(piece, self.state)
        self.position += len(piece)
        if self._prefixes is not None and len(piece) == MAX_READ:
            digest = self._digests_up_to(self.position)[-1]
            self._prefixes.put(digest, self.position, self.state, self.logits)
        return len(piece)

    def _skipped(self) -> bool:
        """Whether a prefix was found that goes further; it goes on from there."""
        if self._prefixes is None:
            return False
        known = self._digests_up_to(min(len(self.ids), self._prefixes.longest))
        prefix = self._prefixes.find(known[self.position // MAX_READ :])
        if prefix is None:
            return False
        self.cached += prefix.tokens - self.position
        self.position, self.state, self.logits = prefix.tokens, prefix.state, prefix.logits
        return True

    def _digests_up_to(self, position: int) -> list[bytes]:
        """The digests after whole pieces, up to a position."""
        digest = self._digests[-1] if self._digests else TokenHash.EMPTY
        for end in range((len(self._digests) + 1) * MAX_READ, position + 1, MAX_READ):
            digest = TokenHash.advance(digest, self.ids[end - MAX_READ : end])
            self._digests.append(digest)
        return self._digests[: position // MAX_READ]

    @cached_property
    def digest(self) -> bytes:
        """The TokenHash of the whole prompt and what it goes on from."""
        begun = TokenHash.EMPTY if self._start is None else bytes.fromhex(self._start.digest)
        whole = len(self._digests) * MAX_READ
        return TokenHash.advance(self._digests[-1] if whole else begun, self.ids[whole:])

    def snapshot(self, state: ModelState, logits: Tensor, later: Sequence[int] = ()) -> State:
        """The state of a sequence that is this prompt and later tokens; it owns the tensors that are given."""
        earlier = 0 if self._start is None else self._start.tokens
        count, digest = earlier + len(self.ids) + len(later), TokenHash.advance(self.digest, later)
        model = self._runner.model
        return State(state, logits, count, digest.hex(), model.fingerprint, model.weights)


def checked_ids(ids: object, vocab_size: int, what: str) -> Tensor:
    """Ids of tokens as an int64 tensor [T] of their own; raises unless all are in the vocabulary."""
    numbers = _array(ids, what)
    if len(numbers):
        low, high = int(numbers.min()), int(numbers.max())
        if low < 0 or high >= vocab_size:
            raise GSAError(f"{what}: ids must be in 0..{vocab_size - 1} (the vocabulary), got {low}..{high}")
    return torch.from_numpy(numbers.astype(np.int64))


def _array(ids: object, what: str) -> np.ndarray[Any, Any]:
    """Whole numbers [T] of any type."""
    expected = f"{what}: ids must be whole numbers [T]"
    kinds = set(map(type, ids)) if isinstance(ids, list | tuple) else {type(ids)}
    if any(issubclass(kind, str) for kind in kinds):
        raise GSAError(f"{what}: Engine takes token ids, got text; gsa.load(...) takes text")
    if isinstance(ids, list | tuple):
        odd = [kind for kind in kinds if kind is not int and not issubclass(kind, np.integer)]
        if odd:
            raise GSAError(f"{expected}, got a {type(ids).__name__} with {odd[0].__name__}")
        try:
            return np.array(ids, np.int64)
        except OverflowError:
            raise GSAError(f"{expected}, got one beyond 64 bits") from None
    if isinstance(ids, Tensor):
        plain = ids.layout == torch.strided and ids.device.type != "meta" and ids.dtype in _WHOLE
        if ids.dim() != 1 or not plain:
            raise GSAError(f"{expected}, got {describe(ids)}")
        return ids.cpu().numpy()
    if not isinstance(ids, np.ndarray):
        raise GSAError(f"{expected} as a list, tuple, array or tensor, got {type(ids).__name__}")
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise GSAError(f"{expected}, got {ids.dtype} {list(ids.shape)}")
    return ids


_WHOLE = {getattr(torch, f"{sign}int{bits}") for sign in ("u", "") for bits in (8, 16, 32, 64)}
