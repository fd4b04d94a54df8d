"""CompiledRunner: every mixer on the CPU. One call of the native engine takes a token through all layers.

Long texts are read by the model's own forward.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from threading import Lock
from typing import NamedTuple

import torch
from torch import Tensor

from gsa.errors import GSAError
from gsa.infer.compiled_layers import Layer, described
from gsa.infer.compiled_parts import packed_weight
from gsa.infer.compiled_states import States
from gsa.infer.layers import InferenceEmbedding, InferenceLinear
from gsa.infer.model import Model
from gsa.infer.runner import Runner, Scores
from gsa.models.state import ModelState
from gsa.ops.memory import address
from gsa.ops.native import decode, library
from gsa.ops.native.structs import MAX_TOKENS
from gsa.ops.weights import DENSE

SHORT_READ = 64
"""Texts of up to so many tokens are read by the native engine, in one call, for which it reads the weights once.
That is faster than the model's forward for so few. It computes what it computes for one token after the other, to the
bit; a reading that is to be exact is always done so."""

SPARE = 2
"""So many of them are kept for texts to come: to make one anew takes as long as a few tokens of a small model."""


def obstacle(model: Model, reading: str = "fast") -> str | None:
    """Why the native engine cannot run a model, reading it in this way, or None if it can."""
    reason = library.unavailable(model.device)
    if reason is not None:
        return reason
    try:
        layers = described(model.lm.model)
    except GSAError as error:
        return str(error)
    rounded = [name for layer in layers for name, kept in layer.kept.items() if kept.dtype == torch.float64]
    if reading == "exact" and rounded:
        return f"a copy of its state rounds {rounded[0]}, which is summed up in double precision"
    return None


class _Alone(NamedTuple):
    """Memory for one sequence."""

    layers: Sequence[Layer]
    states: States
    decoder: decode.Decoder


class CompiledRunner(Runner):
    """The states of all places lie together, by layer, and the native engine changes them where they are."""

    columns = MAX_TOKENS

    def __init__(self, model: Model, batch_size: int, reading: str = "fast"):
        super().__init__(model, batch_size, reading)
        self._weights, self._lock = _tensors_of(model), Lock()
        self._addresses, self._layers = self._look(), described(model.lm.model)
        self._states = States(self._layers, batch_size, model.init_state())
        self._decoder = self._decoder_of(self._states)
        self._spare: deque[_Alone] = deque(maxlen=SPARE)  # memory of texts that were read, for the next ones

    def put(self, place: int, state: ModelState) -> None:
        self._follow_weights()
        self._states.put(place, state)

    def take(self, place: int) -> ModelState:
        return self._states.take(place)

    def clear(self, place: int) -> None:
        self._states.clear(place)

    def _step(self, ids: Sequence[int], places: Sequence[int]) -> Tensor:
        self._check_ids(ids)
        assert all(0 <= place < self.batch_size for place in places)
        for place in places:
            self._states.reserve(place, 1)
        return self._decoder.step(ids, places)

    def _read(self, ids: Tensor, state: ModelState | None, scores: Scores | None) -> tuple[Tensor, ModelState]:
        if ids.shape[0] > SHORT_READ and not self.exact:
            return super()._read(ids, state, scores)
        return self._read_short(ids.tolist(), state, scores)

    def _read_short(self, ids: list[int], state: ModelState | None, scores: Scores | None) -> tuple[Tensor, ModelState]:
        """By the native engine, on a state of its own, so that nothing is shared with other threads that read."""
        self._check_ids(ids)
        self._follow_weights()
        alone = self._alone(self._states.empty if state is None else state)
        own, decoder = alone.states, alone.decoder
        own.reserve(0, len(ids))
        for begin in range(0, len(ids), MAX_TOKENS):
            some = ids[begin : begin + MAX_TOKENS]
            is_last = begin + MAX_TOKENS >= len(ids)
            unscored = len(some) - is_last if scores is None else 0  # unless asked for, scores after the last alone
            logits = decoder.step(some, [0] * len(some), first=unscored)
            if scores is not None:
                scores(logits)
        after = own.take(0)
        if not own.grows:
            self._spare.append(alone)
        return logits[-1].clone(), after  # no view, which would keep the scores of other tokens in memory

    def _alone(self, state: ModelState) -> _Alone:
        """Memory for one sequence with its state, and the decoder that changes it; it is the caller's alone."""
        layers = self._layers
        while True:
            try:
                alone = self._spare.pop()  # one operation: several threads may read
            except IndexError:
                states = States(layers, 1, state)
                return _Alone(layers, states, self._decoder_of(states))
            if alone.layers is layers:  # weights have not moved since
                alone.states.put(0, state)
                return alone

    def _check_ids(self, ids: Sequence[int]) -> None:
        assert all(0 <= id_ < self.model.vocab_size for id_ in ids)

    def _follow_weights(self) -> None:
        """Torch may have moved them since, as share_memory_() does. Once a text, not once a token: it takes 31
        microseconds for gsa-tiny in bf16, 73 in int8."""
        with self._lock:  # several threads may read
            addresses = self._look()
            if addresses == self._addresses:
                return
            self._layers = described(self.model.lm.model)
            self._states.follow(self._layers)
            self._decoder = self._decoder_of(self._states)
            self._addresses = addresses  # last: whatever fails above is done again

    def _look(self) -> list[int]:
        return [address(name, x) for name, x in self._weights.items()]

    def _decoder_of(self, states: States) -> decode.Decoder:
        """What the native engine is called with to change these states. It takes no time worth mentioning to make."""
        lm = self.model.lm
        return decode.Decoder(
            states.blocks(),
            packed_weight(lm.model.embeddings),
            packed_weight(lm.lm_head),
            lm.model.norm.weight,
            lm.model.norm.eps,
            "fp32" if self.model.weights in DENSE else "int8",
            alive=(self.model, states),
        )


def _tensors_of(model: Model) -> dict[str, Tensor]:
    """All that the decoder reads of a model."""
    found: dict[str, Tensor] = {f"the model's {name}": x for name, x in model.lm.named_parameters()}
    for name, layer in model.lm.named_modules():
        if isinstance(layer, InferenceLinear) and layer.bias is not None:
            found[f"the model's {name}.bias"] = layer.bias
        if isinstance(layer, InferenceLinear | InferenceEmbedding):
            parts = layer.packed_weight.parts().items()
            found |= {f"the model's {name}.{part}": x for part, x in parts if x is not None}
    return found
