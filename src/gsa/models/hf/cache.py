"""GSACache: the state of a model as transformers' `generate` wants it. It cannot go back to earlier tokens."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils._pytree import GetAttrKey, register_pytree_node
from transformers import Cache

from gsa.errors import GSAError
from gsa.models.state import ModelState


class GSACache(Cache):
    """Holds a ModelState and counts the tokens that led to it, pads of a batch among them.

    A model's call puts a new state into the cache it was given; the tensors of the old state stay as they are, so a
    cache can be forked with `copy.copy`.
    """

    def __init__(self, state: ModelState | None = None, seen: int = 0):
        super().__init__(layers=[])
        self.state, self.seen = state, seen

    def __repr__(self) -> str:
        return f"GSACache({self.seen} tokens, {self.state})"

    def __len__(self) -> int:
        return 0 if self.state is None else len(self.state.layers)

    def advance(self, state: ModelState, tokens: int) -> None:
        """Takes the state after so many tokens more."""
        self.state, self.seen = state, self.seen + tokens

    def _change(self, change: Any) -> None:
        if self.state is not None:
            self.state = change(self.state)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens so far."""
        return self.seen

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.seen

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """No limit."""
        return -1

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.seen + query_length, 0

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return self.state is not None

    def reset(self) -> None:
        """Forgets everything."""
        self.state, self.seen = None, 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """The sequences in the order of these indices, for beam search."""
        self._change(lambda state: state.select(beam_idx))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Only the sequences with these indices (or where a mask is true)."""
        indices = torch.as_tensor(indices)
        if indices.dtype == torch.bool:
            indices = indices.nonzero()[:, 0]
        self._change(lambda state: state.select(indices))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every sequence so many times."""
        self._change(lambda state: state.repeat(repeats))

    def to(self, device: torch.device | str) -> GSACache:
        """Moves the state to a device."""
        self._change(lambda state: state.to(device))
        return self

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove:
            self._no_way_back()

    def activate_past_recording(self) -> None:
        self._no_way_back()

    def _no_way_back(self) -> NoReturn:
        raise GSAError(
            "GSACache: a recurrent state cannot go back to earlier tokens, so assisted decoding and other strategies "
            "that take tokens back are not possible; copy the cache beforehand instead"
        )

    @property
    def batch_size(self) -> int:
        return -1 if self.state is None else self.state.batch_size

    @property
    def nbytes(self) -> int:
        """Bytes of the state."""
        return 0 if self.state is None else self.state.nbytes

    @property
    def is_compileable(self) -> bool:
        return False

    @property
    def is_initialized(self) -> bool:
        return self.state is not None

    @property
    def is_croppable(self) -> bool:
        return False


def _flatten(cache: GSACache) -> tuple[list[Any], None]:
    return [None if cache.state is None else list(cache.state.layers), cache.seen], None


def _flatten_with_keys(cache: GSACache) -> tuple[list[tuple[Any, Any]], None]:
    children, context = _flatten(cache)
    return [(GetAttrKey(name), child) for name, child in zip(("state", "seen"), children, strict=True)], context


def _unflatten(children: Iterable[Any], context: None) -> GSACache:
    layers, seen = children
    return GSACache(None if layers is None else ModelState(layers), seen)


# With this, torch.export and others see the tensors of a cache.
register_pytree_node(
    GSACache,
    _flatten,
    _unflatten,
    serialized_type_name=f"{GSACache.__module__}.{GSACache.__name__}",
    flatten_with_keys_fn=_flatten_with_keys,
)
