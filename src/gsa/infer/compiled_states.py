"""The states of several sequences, which the native engine changes where they are: by layer, in numbered places."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import cast

import torch

from gsa.infer.compiled_cache import Cache
from gsa.infer.compiled_layers import Layer
from gsa.mixers.base import State
from gsa.models.state import ModelState
from gsa.ops.memory import address
from gsa.ops.native.structs import GsaBlock


class States:
    """The states of `places` sequences in all layers, each `empty` at first.

    They come and go in the form that mixers have. What is kept differs from it in padding, in order, and in the
    precision of ABC's normaliser.
    """

    def __init__(self, layers: Sequence[Layer], places: int, empty: ModelState):
        with torch.inference_mode(False):  # tensors made in inference mode could not be written to outside of it
            self._layers = [LayerStates(layer, places) for layer in layers]
        self.empty = empty
        """What no token has changed yet."""
        self._caches = [layer.cache for layer in self._layers if layer.cache is not None]
        self._room = [0] * places  # tokens for which the caches of a place have room
        for place in range(places):
            self.clear(place)

    @property
    def grows(self) -> bool:
        """Whether a place takes more memory, the more it has read."""
        return bool(self._caches)

    def blocks(self) -> list[GsaBlock]:
        """The layers as the native engine takes them, over these states, which must outlive them."""
        return [layer.block for layer in self._layers]

    def follow(self, layers: Sequence[Layer]) -> None:
        """The same states below other weights."""
        for mine, layer in zip(self._layers, layers, strict=True):
            mine.lie_below(layer)

    def put(self, place: int, state: ModelState) -> None:
        """Copies the state of one sequence to a place."""
        self._room[place] = 0  # first: whatever fails below, the next step looks at the caches again
        for mine, other in zip(self._layers, state.layers, strict=True):
            mine.put(place, other)

    def take(self, place: int) -> ModelState:
        """A copy of the state in a place."""
        return ModelState([layer.take(place) for layer in self._layers])

    def clear(self, place: int) -> None:
        """The place as it was at first."""
        self.put(place, self.empty)

    def reserve(self, place: int, tokens: int) -> None:
        """Makes room for so many tokens, which come next, in one call."""
        if not self._caches:
            return
        if self._room[place] < tokens:
            self._room[place] = min(cache.reserve(place, tokens) for cache in self._caches)
        self._room[place] -= tokens


class LayerStates:
    """The states of one layer."""

    def __init__(self, layer: Layer, places: int):
        self._kept = {
            name: torch.zeros((places, *kept.shape), dtype=kept.dtype, device="cpu")
            for name, kept in layer.kept.items()
        }
        self.cache = None
        if layer.cached is not None:
            self.cache = Cache(layer, layer.cached, places, self._kept["position"])
        self.lie_below(layer)

    def lie_below(self, layer: Layer) -> None:
        """Makes `block` anew: this layer, over these states."""
        self._layer, self._products = layer, layer.products()
        self.block = GsaBlock.from_buffer_copy(layer.block)
        self.block.products = cast(self._products, type(self.block.products))
        self.block.product_count = len(self._products)
        for name, kept in layer.kept.items():
            kept.bind(self.block, self._products, address(f"state.{name}", self._kept[name]))
        if self.cache is not None:
            self.cache.bind(self.block)

    def put(self, place: int, state: State) -> None:
        """Copies a state [1, ...] of the mixer to a place."""
        if self.cache is not None:
            self.cache.put(place, state)
        for name, kept in self._layer.kept.items():
            kept.put(self._kept[name][place], state[name][0])

    def take(self, place: int) -> State:
        """A copy of the state in a place, as the mixer has it."""
        found = {} if self.cache is None else self.cache.take(place)
        for name, kept in self._layer.kept.items():
            found[name] = kept.take(self._kept[name][place])[None]
        return {name: found[name] for name in self._layer.state_names}
