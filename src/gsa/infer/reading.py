"""Prompts: checked, and read into a model piece by piece.

Where the runner is exact, pieces may be of any length, and a prompt goes on from any state that was kept of an earlier
one. Elsewhere pieces are counted from where a prompt starts, whatever else runs and whatever is remembered of it. So
one prompt always gives the same numbers. Shape letters: T time, V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from hashlib import sha256
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gsa.errors import GSAError
from gsa.infer.model import Model
from gsa.infer.runner import MAX_READ, Runner, Scores
from gsa.infer.sampling import Choice, described
from gsa.infer.state import State
from gsa.infer.state_cache import StateCache
from gsa.infer.tokens import TokenHash
from gsa.mixers.sequences import describe
from gsa.models.state import ModelState

Ids = Sequence[int] | Tensor | np.ndarray[Any, Any]
"""Tokens of one sequence, in any of these forms."""


class Source:
    """Ids [T] behind a state, or at the beginning: what is known of a sequence besides its state."""

    def __init__(self, model: Model, ids: Tensor, start: State | None, cache: StateCache | None, salt: str):
        self.ids, self.start, self.cache = ids, start, cache
        self.earlier = 0 if start is None else start.tokens
        """Tokens before the ids."""
        self._model, self._salt = model, salt

    @cached_property
    def scope(self) -> str:
        """Names those with whom states are shared: they have the same salt, and go on from the same numbers.

        The numbers count, not their tokens: a state that somebody brings may hold anything, and is nobody else's.
        """
        content = "" if self.start is None else self.start.content()
        return sha256(json.dumps([self._salt, content]).encode()).hexdigest() if self._salt or content else ""

    @cached_property
    def _digests(self) -> bytes:
        begun = TokenHash.EMPTY if self.start is None else bytes.fromhex(self.start.digest)
        return begun + TokenHash.each(begun, self.ids)

    def prepare(self) -> None:
        """Computes what is needed to look for states, so that no step has to wait for it."""
        if self.cache is not None:
            _ = self.scope, self._digests

    def digest(self, position: int) -> bytes:
        """The TokenHash of all tokens up to a position in the ids."""
        return self._digests[32 * position : 32 * (position + 1)]

    def snapshot(self, state: ModelState, logits: Tensor, position: int, later: Sequence[int] = ()) -> State:
        """The state after the ids up to a position and later tokens; it owns the tensors that are given."""
        digest = TokenHash.advance(self.digest(position), later)
        count = self.earlier + position + len(later)
        return State(state, logits, count, digest.hex(), self._model.fingerprint, self._model.weights)


class _At(NamedTuple):
    """How far a prompt is read. It changes as a whole: an interruption leaves no half of it."""

    position: int
    cached: int
    state: ModelState | None
    scores: Tensor | None


class Prompt:
    """A prompt [T], from the beginning or from a state, which stays as it is. It is read once, by the first request
    that needs it, and any number of answers may go on from it."""

    def __init__(
        self,
        runner: Runner,
        ids: Tensor,
        start: State | None = None,
        *,
        cache: StateCache | None = None,
        salt: str = "",
        marks: Sequence[int] = (),
        logprobs: int | None = None,
    ):
        self.source = Source(runner.model, ids, start, cache, salt)
        self._at = _At(0, 0, None, None) if start is None else _At(0, 0, start.model, start.logits)
        self._runner, self._marks, self._alternatives = runner, frozenset(marks), logprobs
        self._told: dict[int, Choice] = {}  # by position
        self._looked: int | None = None  # the version of the cache in which nothing goes further
        if logprobs is not None and start is not None:
            self._tell(start.logits[None], 0)

    def __len__(self) -> int:
        return len(self.source.ids)

    def __repr__(self) -> str:
        return f"Prompt({len(self)} tokens, {self.position} read, {self.cached_tokens} of them kept from earlier)"

    def is_of(self, runner: Runner) -> bool:
        """Whether this runner reads it."""
        return self._runner is runner

    @property
    def position(self) -> int:
        """Tokens that are read."""
        return self._at.position

    @property
    def cached_tokens(self) -> int:
        """Those of them that were not read again, because a state behind them was kept."""
        return self._at.cached

    @property
    def state(self) -> ModelState | None:
        """After what is read."""
        return self._at.state

    @property
    def scores(self) -> Tensor | None:
        """Of the next token [V]."""
        return self._at.scores

    @property
    def done(self) -> bool:
        """Whether all is read."""
        return self.position == len(self)

    @property
    def logprobs(self) -> list[float | None] | None:
        """The log-probability of every token, if asked for; none of the first without a state, and of those that are
        not read."""
        if self._alternatives is None:
            return None
        return [None if choice is None else choice.logprob for choice in self._choices()]

    @property
    def top(self) -> list[list[tuple[int, float]] | None] | None:
        """The likeliest tokens in the place of each, if asked for."""
        if self._alternatives is None:
            return None
        return [None if choice is None else choice.top for choice in self._choices()]

    def _choices(self) -> list[Choice | None]:
        return [self._told.get(position) for position in range(len(self))]

    def piece(self, most: int) -> int:
        """How many tokens are read next: at most so many, unless the runner needs whole pieces."""
        end = min(self.position // MAX_READ * MAX_READ + MAX_READ, len(self))
        if self._runner.exact:
            end = min([end, self.position + most, *(mark for mark in self._marks if mark > self.position)])
        return end - self.position

    def advance(self, most: int = MAX_READ) -> int:
        """Reads one piece, or skips what an earlier prompt had in common; how many tokens had to be read."""
        if self._skipped():
            return 0
        begin, count = self.position, self.piece(most)
        scores = None if self._alternatives is None else self._collect(begin + 1)
        piece = self.source.ids[begin : begin + count]
        logits, state = self._runner.read(piece, self.state, scores)
        self._at = _At(begin + count, self.cached_tokens, state, logits)
        cache = self.source.cache
        if cache is not None and self._is_kept(self.position):
            cache.put(self.source.scope, self.source.snapshot(state, logits, self.position))
        return count

    def _is_kept(self, position: int) -> bool:
        """Whether other prompts may go on from a position: they must be cut there too."""
        if self._runner.exact and position in self._marks:
            return True
        return position == len(self) or _is_round(position)

    def _skipped(self) -> bool:
        """Whether a state was found that goes further; it goes on from there."""
        cache = self.source.cache
        if cache is None or self._alternatives is not None or self._looked == cache.version:
            return False
        first, self._looked = self._looked is None, cache.version
        found = self._found(cache)
        if found is None:
            if first:
                cache.missed()
            return False
        position = found.tokens - self.source.earlier
        new = position - self.position
        cache.reused(new)
        self._at = _At(position, self.cached_tokens + new, found.model, found.logits)
        return True

    def _found(self, cache: StateCache) -> State | None:
        """The state that was kept furthest on in this prompt, beyond what is read."""
        begin, end, earlier = self.position, len(self), self.source.earlier
        for tokens in cache.lengths():
            position = tokens - earlier
            if begin < position <= end and (self._runner.exact or self._is_kept(position)):
                state = cache.get(self.source.scope, self.source.digest(position), tokens)
                if state is not None:
                    return state
        return None

    def _collect(self, begin: int) -> Scores:
        """Takes scores of the tokens from a position on, as they come."""
        position = begin

        def take(scores: Tensor) -> None:
            nonlocal position
            self._tell(scores, position)
            position += len(scores)

        return take

    def _tell(self, scores: Tensor, position: int) -> None:
        """Notes how likely tokens from a position on are by these scores [n, V]; the last may be of none."""
        targets = self.source.ids[position : position + len(scores)].tolist()
        for i, (token, own) in enumerate(zip(targets, scores, strict=False)):
            self._told[position + i] = described(token, own.cpu(), self._alternatives)


def _is_round(position: int) -> bool:
    """Whether states are kept at a position of any prompt: after each of the first 31 pieces, then every other one, and
    so on with every doubling. So a long prompt does not drive all else out of the cache, and of what it shares with
    another one, at most a sixteenth is read again."""
    pieces, rest = divmod(position, MAX_READ)
    return rest == 0 and pieces // (pieces & -pieces) < 32


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
