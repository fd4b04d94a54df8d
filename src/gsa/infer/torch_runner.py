"""TorchRunner: every mixer on every device, by the model's own forward."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gsa.infer.model import Model
from gsa.infer.runner import Runner
from gsa.models.state import ModelState


class _Row(NamedTuple):
    """The state of a place: a row of a batch that other places may have rows of."""

    batch: ModelState
    number: int

    def view(self) -> ModelState:
        return self.batch.map(lambda x: x[self.number : self.number + 1])


class TorchRunner(Runner):
    """Sequences whose states have the same shapes go through the model together.

    What comes of a step stays one batch, so that the same sequences go on in the next without a copy of their states.
    """

    def __init__(self, model: Model, batch_size: int):
        super().__init__(model, batch_size)
        self._rows: list[_Row | None] = [None] * batch_size

    def put(self, place: int, state: ModelState) -> None:
        self._rows[place] = _Row(state.clone(), 0)

    def take(self, place: int) -> ModelState:
        return self._row(place).view().clone()

    def clear(self, place: int) -> None:
        self._rows[place] = None

    def _row(self, place: int) -> _Row:
        row = self._rows[place]
        assert row is not None, f"place {place} is empty"
        return row

    def _step(self, ids: Sequence[int], places: Sequence[int]) -> Tensor:
        lm, device = self.model.lm, self.model.device
        logits = torch.empty(len(ids), self.model.vocab_size, dtype=torch.float32, device=device)
        groups: dict[object, list[int]] = defaultdict(list)
        for i, place in enumerate(places):
            groups[_shapes(self._row(place).batch)].append(i)
        for group in groups.values():
            before = _batch([self._row(places[i]) for i in group])
            x, after = lm.model(torch.tensor([[ids[i]] for i in group], device=device), before)
            assert after is not None
            logits[group] = lm.lm_head(x[:, 0])
            for number, i in enumerate(group):
                self._rows[places[i]] = _Row(after, number)
        return logits


def _batch(rows: list[_Row]) -> ModelState:
    """The states of some places as one batch: that of the last step, if these are its rows, all and in order."""
    batch = rows[0].batch
    if all(row.batch is batch for row in rows) and [row.number for row in rows] == list(range(batch.batch_size)):
        return batch
    return ModelState.cat([row.view() for row in rows])


def _shapes(state: ModelState) -> object:
    return tuple(x.shape[1:] for layer in state.layers for x in layer.values())
