"""Places: a fixed number of sequences whose next tokens are computed together, each going its own way."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from gsa.infer.model import Model
from gsa.models.state import ModelState
from gsa.ops.linear import MOST


class Places(ABC):
    """Holds a state in each of `size` places."""

    def __init__(self, model: Model, size: int):
        self.model, self.size = model, size

    @abstractmethod
    def put(self, place: int, state: ModelState) -> None:
        """Copies a state of one sequence to a place."""

    @abstractmethod
    def take(self, place: int) -> ModelState:
        """A copy of the state in a place."""

    @abstractmethod
    def clear(self, place: int) -> None:
        """Wipes a place."""

    @abstractmethod
    def _step(self, ids: Sequence[int], at: Sequence[int]) -> Tensor:
        """`step` for at most 16 places."""

    @torch.inference_mode()
    def step(self, ids: Sequence[int], at: Sequence[int]) -> Tensor:
        """Token ids[i] for the sequence in place at[i]: scores of the next tokens [n, vocab]. No place comes twice."""
        assert len(ids) == len(at) == len(set(at)) > 0
        if len(ids) <= MOST:
            return self._step(ids, at)
        groups = [slice(i, i + MOST) for i in range(0, len(ids), MOST)]
        return torch.cat([self._step(ids[group], at[group]) for group in groups])


class TorchPlaces(Places):
    """For every mixer and device: the model's own forward, over sequences whose states have the same shapes."""

    def __init__(self, model: Model, size: int):
        super().__init__(model, size)
        self._states: list[ModelState | None] = [None] * size

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

    def _step(self, ids: Sequence[int], at: Sequence[int]) -> Tensor:
        lm, device = self.model.lm, self.model.device
        logits = torch.empty(len(ids), self.model.vocab_size, dtype=torch.float32, device=device)
        groups: dict[object, list[int]] = defaultdict(list)
        for i, place in enumerate(at):
            groups[_shapes(self._state(place))].append(i)
        for group in groups.values():
            before = ModelState.cat([self._state(at[i]) for i in group])
            x, after = lm.model(torch.tensor([[ids[i]] for i in group], device=device), before)
            assert after is not None
            logits[group] = lm.lm_head(x[:, 0])
            for i, state in zip(group, after.split(), strict=True):
                self._states[at[i]] = state
        return logits


def _shapes(state: ModelState) -> object:
    return tuple(x.shape for layer in state.layers for x in layer.values())


def places(model: Model, size: int) -> Places:
    """So many places: the native engine's if it can step this model, else torch's."""
    from gsa.infer.compiled import CompiledPlaces, obstacle

    return CompiledPlaces(model, size) if obstacle(model) is None else TorchPlaces(model, size)
