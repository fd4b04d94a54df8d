"""ModelState: what a model remembers of its sequences, one state per layer, each tensor with the sequences first."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from gsa.errors import GSAError
from gsa.mixers.base import State

_KEY = re.compile(r"layers\.(0|[1-9]\d{0,5})\.(\w+)")


class ModelState:
    """The states of all layers. It is never changed by a model: every call returns a new one."""

    def __init__(self, layers: Sequence[State]):
        self.layers = tuple(layers)

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> ModelState:
        """The state of which `tensors` gave these; the order does not matter."""
        layers: dict[int, State] = {}
        for key, x in tensors.items():
            found = _KEY.fullmatch(key)
            if found is None:
                raise GSAError(f"ModelState: expected tensors named layers.0.k and the like, got {key!r}")
            layers.setdefault(int(found[1]), {})[found[2]] = x
        if not layers or sorted(layers) != list(range(len(layers))):
            raise GSAError(f"ModelState: expected tensors of layers 0, 1, ..., got layers {sorted(layers)}")
        return cls([layers[i] for i in range(len(layers))])

    def tensors(self) -> dict[str, Tensor]:
        """All tensors by name, "layers.0.k" and so on: what safetensors and `torch.save` write.

        torch.save(state.tensors(), "state.pt")
        state = ModelState.from_tensors(torch.load("state.pt", weights_only=True))
        """
        return {f"layers.{i}.{name}": x for i, layer in enumerate(self.layers) for name, x in layer.items()}

    @classmethod
    def cat(cls, states: Sequence[ModelState]) -> ModelState:
        """The sequences of all these states, in their order; shorter caches are filled up on the left."""
        layers = zip(*(state.layers for state in states), strict=True)
        return cls([{name: _cat([part[name] for part in parts]) for name in parts[0]} for parts in layers])

    def split(self) -> list[ModelState]:
        """The states of the sequences one by one, as copies."""
        return [self.map(partial(_row, index=i)) for i in range(self.batch_size)]

    def map(self, function: Callable[[Tensor], Tensor]) -> ModelState:
        """The state with a function applied to every tensor."""
        return ModelState([{name: function(x) for name, x in layer.items()} for layer in self.layers])

    @property
    def batch_size(self) -> int:
        """Number of sequences."""
        return next(iter(self.layers[0].values())).shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, convolutions and counters among them."""
        return sum(x.nbytes for layer in self.layers for x in layer.values())

    def select(self, indices: Tensor) -> ModelState:
        """The sequences with these indices, in that order; an index may come more than once."""
        return self.map(lambda x: x.index_select(0, indices.to(x.device)))

    def repeat(self, count: int) -> ModelState:
        """Every sequence so many times, copies next to each other."""
        return self.map(lambda x: x.repeat_interleave(count, 0))

    def clone(self) -> ModelState:
        """A copy that shares no memory."""
        return self.map(torch.clone)

    def detach(self) -> ModelState:
        """The same numbers without history, so that no gradient flows further back."""
        return self.map(torch.detach)

    def to(self, device: torch.device | str) -> ModelState:
        """The state on a device."""
        return self.map(lambda x: x.to(device))

    def __repr__(self) -> str:
        return f"ModelState({self.batch_size} sequences, {len(self.layers)} layers, {self.nbytes} bytes)"


def _cat(parts: list[Tensor]) -> Tensor:
    """States of one kind, end to end; caches [N, S, ...] may differ in S, the newest is always last."""
    if len({part.shape[1:] for part in parts}) > 1:
        longest = max(part.shape[1] for part in parts)
        parts = [torch.cat([x.new_zeros(x.shape[0], longest - x.shape[1], *x.shape[2:]), x], 1) for x in parts]
    return torch.cat(parts)


def _row(x: Tensor, index: int) -> Tensor:
    return x[index : index + 1].clone()


# A state has tensors and nothing that runs, so torch.load(weights_only=True) may read one that torch.save wrote.
torch.serialization.add_safe_globals([ModelState])
