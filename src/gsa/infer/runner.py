"""Runner: what carries out a model's computation for the engine. `gsa.infer.runners` chooses one of the two there are.

Shape letters: T time, V vocabulary, N sequences.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gsa.errors import GSAError
from gsa.infer.model import Model
from gsa.models.state import ModelState
from gsa.ops.linear import MAX_COLUMNS

MAX_READ = 512
"""Tokens that one `read` takes at most. Long texts are read in pieces of so many, so that the memory for activations
does not depend on their length."""
Scores = Callable[[Tensor], None]
"""Called with the scores [n, V] of the tokens that may follow n tokens of a text; the next call goes on behind them."""


class Runner(ABC):
    """Reads texts, and makes the next tokens of up to `batch_size` sequences together, each going its own way.

    The state of each of these sequences lies in a place of the runner, numbered from 0. Several threads may `read` at
    once; the methods that use places are for one thread at a time.
    """

    def __init__(self, model: Model, batch_size: int, reading: str = "fast"):
        self.model, self.batch_size, self.exact = model, batch_size, reading == "exact"

    columns = MAX_COLUMNS
    """Sequences that `_step` takes at most."""
    exact: bool
    """Whether a state is a function of the tokens it has seen, to the bit: reading them in pieces of any length, and
    writing them one by one, comes to the same. Otherwise that depends on the pieces."""

    @torch.inference_mode()
    def read(self, ids: Tensor, state: ModelState | None, scores: Scores | None = None) -> tuple[Tensor, ModelState]:
        """Reads 1 to MAX_READ tokens [T] of one sequence: scores of the next token [V], and the state after them.

        It goes on from `state`, which is not changed, or from the beginning if that is None. No place is used. Scores
        after each of the tokens are told to `scores`, a few at a time.
        """
        if ids.dim() != 1 or not 1 <= ids.shape[0] <= MAX_READ:
            raise GSAError(f"read: expected 1 to {MAX_READ} ids, got {list(ids.shape)}")
        return self._read(ids, state, scores)

    def _read(self, ids: Tensor, state: ModelState | None, scores: Scores | None) -> tuple[Tensor, ModelState]:
        """By the model's own forward."""
        lm = self.model.lm
        x, after = lm.model(ids[None].to(self.model.device), state)
        assert after is not None
        if scores is not None:
            for some in x[0].split(MAX_COLUMNS):
                scores(lm.lm_head(some))
        return lm.lm_head(x[0, -1:])[0], after

    @abstractmethod
    def put(self, place: int, state: ModelState) -> None:
        """Copies the state of one sequence to a place."""

    @abstractmethod
    def take(self, place: int) -> ModelState:
        """A copy of the state in a place."""

    @abstractmethod
    def clear(self, place: int) -> None:
        """Wipes a place."""

    @torch.inference_mode()
    def step(self, ids: Sequence[int], places: Sequence[int]) -> Tensor:
        """Token ids[i] for the sequence in places[i]: scores of the next tokens [N, V]. No place comes twice."""
        assert len(ids) == len(places) == len(set(places)) > 0
        if len(ids) <= self.columns:
            return self._step(ids, places)
        groups = [slice(i, i + self.columns) for i in range(0, len(ids), self.columns)]
        return torch.cat([self._step(ids[group], places[group]) for group in groups])

    @abstractmethod
    def _step(self, ids: Sequence[int], places: Sequence[int]) -> Tensor:
        """`step` for at most `columns` sequences."""
