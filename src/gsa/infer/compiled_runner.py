"""CompiledRunner: gated slot attention on the CPU. One call of the native engine takes a token through all layers.

Long texts are read by the model's own forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gsa.infer.layers import InferenceEmbedding, InferenceLinear
from gsa.infer.model import Model
from gsa.infer.runner import Runner
from gsa.mixers.gsa import GatedSlotAttention
from gsa.models.backbone import Block
from gsa.models.state import ModelState
from gsa.ops.linear import MAX_COLUMNS
from gsa.ops.memory import address
from gsa.ops.native import decode, library
from gsa.ops.native.structs import GsaBlock
from gsa.ops.weights import DENSE, PackedWeight

SHORT_READ = 64
"""Texts of up to so many tokens are read by the native engine, 16 tokens per call, for which it reads the weights once.
That is faster than the model's forward for so few."""


def obstacle(model: Model) -> str | None:
    """Why the native engine cannot run a model, or None if it can."""
    reason = library.unavailable(model.device)
    if reason is not None:
        return reason
    for i, block in enumerate(model.lm.model.layers):
        found = _obstacle(block)
        if found is not None:
            return f"layer {i}: {found}"
    return None


def _obstacle(block: Block) -> str | None:
    mixer = block.mixer
    if not isinstance(mixer, GatedSlotAttention):
        return f"its mixer is {mixer.options.mixer}"
    if block.mlp is None:
        return "it has no MLP"
    options = mixer.options
    if options.gate != "data":
        return f"its gate is {options.gate}"
    if options.conv_size:
        return "it has convolutions"
    for name in (options.feature_map, options.value_activation, options.output_activation):
        if name not in decode.FUNCTIONS:
            return f"its activation is {name}"
    return None


class CompiledRunner(Runner):
    """The states of all places lie together, by layer, and the native engine changes them where they are."""

    def __init__(self, model: Model, batch_size: int):
        super().__init__(model, batch_size)
        with torch.inference_mode(False):  # tensors made in inference mode could not be written to outside of it
            self._states = model.lm.init_state(batch_size)
        self._weights = _tensors_of(model)
        self._describe()

    def put(self, place: int, state: ModelState) -> None:
        self._follow_weights()
        for mine, other in zip(self._states.layers, state.layers, strict=True):
            for name, x in mine.items():
                x[place].copy_(other[name][0])

    def take(self, place: int) -> ModelState:
        return self._states.map(lambda x: x[place : place + 1].clone())

    def clear(self, place: int) -> None:
        for layer in self._states.layers:
            for x in layer.values():
                x[place].zero_()

    def _step(self, ids: Sequence[int], places: Sequence[int]) -> Tensor:
        self._check_ids(ids)
        assert all(0 <= place < self.batch_size for place in places)
        return self._decoder.step(ids, places)

    def _read(self, ids: Tensor, state: ModelState | None) -> tuple[Tensor, ModelState]:
        return super()._read(ids, state) if ids.shape[0] > SHORT_READ else self._read_short(ids.tolist(), state)

    def _read_short(self, ids: list[int], state: ModelState | None) -> tuple[Tensor, ModelState]:
        """By the native engine, on a state of its own, so that nothing is shared with other threads that read."""
        self._check_ids(ids)
        self._follow_weights()
        after = self.model.init_state() if state is None else state.map(_contiguous_copy)
        decoder = self._decoder_of(after)
        for begin in range(0, len(ids), MAX_COLUMNS):
            some = ids[begin : begin + MAX_COLUMNS]
            is_last = begin + MAX_COLUMNS >= len(ids)
            logits = decoder.step(some, [0] * len(some), first=len(some) - is_last)  # scores after the last alone
        return logits[0], after

    def _check_ids(self, ids: Sequence[int]) -> None:
        assert all(0 <= id_ < self.model.vocab_size for id_ in ids)

    def _describe(self) -> None:
        """The layers and their decoder, over the weights where they are now."""
        self._addresses = self._look()
        self._blocks = [_described(block) for block in self.model.lm.model.layers]
        self._decoder = self._decoder_of(self._states)

    def _follow_weights(self) -> None:
        """Torch may have moved them since, as share_memory_() does. Once a text, not once a token: it takes 31
        microseconds for gsa-tiny in bf16, 73 in int8."""
        if self._look() != self._addresses:
            self._describe()

    def _look(self) -> list[int]:
        return [address(name, x) for name, x in self._weights.items()]

    def _decoder_of(self, states: ModelState) -> decode.Decoder:
        """What the native engine is called with to change these states. It takes no time worth mentioning to make."""
        lm = self.model.lm
        blocks = [
            _with_state(block, state["k"], state["v"]) for block, state in zip(self._blocks, states.layers, strict=True)
        ]
        return decode.Decoder(
            blocks,
            _packed_weight(lm.model.embeddings),
            _packed_weight(lm.lm_head),
            lm.model.norm.weight,
            lm.model.norm.eps,
            "fp32" if self.model.weights in DENSE else "int8",
            alive=(self.model, states),
        )


def _tensors_of(model: Model) -> dict[str, Tensor]:
    """All that the decoder reads of a model."""
    found: dict[str, Tensor] = {f"the model's {name}": x for name, x in model.lm.named_parameters()}
    for name, layer in model.lm.named_modules():
        if isinstance(layer, InferenceLinear | InferenceEmbedding):
            parts = layer.packed_weight.parts().items()
            found |= {f"the model's {name}.{part}": x for part, x in parts if x is not None}
    return found


def _contiguous_copy(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def _packed_weight(layer: torch.nn.Module) -> PackedWeight:
    assert isinstance(layer, InferenceLinear | InferenceEmbedding)
    return layer.packed_weight


def _with_state(block: GsaBlock, keys: Tensor, values: Tensor) -> GsaBlock:
    """The same block over other states."""
    copy = GsaBlock.from_buffer_copy(block)
    copy.keys, copy.values = decode.address_of_floats("state.k", keys), decode.address_of_floats("state.v", values)
    return copy


def _described(block: Block) -> GsaBlock:
    """A layer as the native engine takes it, without a state."""
    mixer, mlp = block.mixer, block.mlp
    assert isinstance(mixer, GatedSlotAttention)
    assert mlp is not None
    options = mixer.options
    names = ("q", "k", "v", "f", "o", *(("g",) if options.output_gate else ()))
    norm: dict[str, Any] = {}
    if options.output_norm != "none":
        norm = {"output_norm": mixer.norm.weight, "output_epsilon": mixer.norm.eps}
    return decode.block(
        **{name: _packed_weight(getattr(mixer, f"{name}_proj")) for name in names},
        **{name: _packed_weight(getattr(mlp, f"{name}_proj")) for name in ("gate", "up", "down")},
        **norm,
        mixer_norm=block.mixer_norm.weight,
        mixer_epsilon=block.mixer_norm.eps,
        mlp_norm=block.mlp_norm.weight,
        mlp_epsilon=block.mlp_norm.eps,
        scale=options.key_width**-0.5 if options.scale is None else options.scale,
        temperature=options.gate_temperature,
        heads=options.kv_heads,
        queries=options.num_attention_heads // options.kv_heads,
        key_width=options.key_width,
        value_width=options.value_width,
        slots=options.num_slots,
        readout=options.readout,
        feature_map=options.feature_map,
        value_activation=options.value_activation,
        output_activation=options.output_activation,
        output_norm_kind=options.output_norm,
    )
