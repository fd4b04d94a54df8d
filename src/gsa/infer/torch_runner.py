"""TorchRunner: every mixer on every device, by the model's own forward."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from gsa.infer.model import Model
from gsa.infer.runner import Runner
from gsa.models.state import ModelState


class TorchRunner(Runner):
    """Sequences whose states have the same shapes go through the model together."""

    def __init__(self, model: Model, batch_size: int):
        super().__init__(model, batch_size)
        self._states: list[ModelState | None] = [None] * batch_size

    def put(self, place: int, state: ModelState) -> None:
        self._states[place] = state.clone()

    def take(self, place: int) -> ModelState:
        return self._state(place).clone()

    def clear(self, place: int) -> None:
        self._states[place] = None

    def _state(self, place: int) -> ModelState:
        state = self._states[place]
        assert state is not None, f"place {place} is empty"
        return state

    def _step(self, ids: Sequence[int], places: Sequence[int]) -> Tensor:
        lm, device = self.model.lm, self.model.device
        logits = torch.empty(len(ids), self.model.vocab_size, dtype=torch.float32, device=device)
        groups: dict[object, list[int]] = defaultdict(list)
        for i, place in enumerate(places):
            groups[_shapes(self._state(place))].append(i)
        for group in groups.values():
            before = ModelState.cat([self._state(places[i]) for i in group])
            x, after = lm.model(torch.tensor([[ids[i]] for i in group], device=device), before)
            assert after is not None
            logits[group] = lm.lm_head(x[:, 0])
            for i, state in zip(group, after.split(), strict=True):
                self._states[places[i]] = state
        return logits


def _shapes(state: ModelState) -> object:
    return tuple(x.shape for layer in state.layers for x in layer.values())
