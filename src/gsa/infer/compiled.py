"""Places of a model of gated slot attention on the CPU: a token is one call of the native engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gsa.infer.model import Model
from gsa.infer.packed import PackedEmbedding, PackedLinear
from gsa.infer.places import Places
from gsa.mixers.gsa import GatedSlotAttention
from gsa.models.backbone import Block
from gsa.models.state import ModelState
from gsa.ops.linear import MOST
from gsa.ops.native import decode, library
from gsa.ops.packed import DENSE, PackedWeight


def obstacle(model: Model) -> str | None:
    """Why a model cannot be stepped by the native engine, or None if it can."""
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
    if not isinstance(mixer, GatedSlotAttention) or block.mlp is None:
        return f"its mixer is {mixer.options.mixer}"
    options = mixer.options
    if options.gate != "data":
        return f"its gate is {options.gate}"
    if options.conv_size:
        return "it has convolutions"
    for name in (options.feature_map, options.value_activation, options.output_activation):
        if name not in decode.FUNCTIONS:
            return f"its activation is {name}"
    return None


class CompiledPlaces(Places):
    """States lie together, by layer; the engine changes them in place."""

    def __init__(self, model: Model, size: int):
        super().__init__(model, size)
        with torch.inference_mode(False):  # they may be changed anywhere, wherever they are made
            self._states = model.lm.init_state(size)
        lm, embeddings = model.lm, model.lm.model.embeddings
        assert isinstance(embeddings, PackedEmbedding)
        blocks = [
            _described(block, state["k"], state["v"])
            for block, state in zip(lm.model.layers, self._states.layers, strict=True)
        ]
        self._decoder = decode.Decoder(
            blocks,
            embeddings.packed,
            _packed(lm.lm_head),
            lm.model.norm.weight,
            lm.model.norm.eps,
            "fp32" if model.weights in DENSE else "int8",
            alive=(model, self._states),
        )

    def put(self, place: int, state: ModelState) -> None:
        for mine, other in zip(self._states.layers, state.layers, strict=True):
            for name, x in mine.items():
                x[place].copy_(other[name][0])

    def take(self, place: int) -> ModelState:
        return self._states.map(lambda x: x[place : place + 1].clone())

    def clear(self, place: int) -> None:
        for layer in self._states.layers:
            for x in layer.values():
                x[place].zero_()

    def _step(self, ids: Sequence[int], at: Sequence[int]) -> Tensor:
        assert all(0 <= id_ < self.model.vocab_size for id_ in ids)
        assert all(0 <= place < self.size for place in at)
        return self._decoder.step(ids, at)

    def feed(self, ids: Sequence[int], place: int) -> Tensor:
        """Reads a few tokens for one sequence: scores of the next token [vocab]. Faster than the model's forward for
        so few: the weights are read once for sixteen."""
        assert all(0 <= id_ < self.model.vocab_size for id_ in ids)
        assert 0 <= place < self.size
        for begin in range(0, len(ids), MOST):
            some = ids[begin : begin + MOST]
            last = begin + MOST >= len(ids)
            logits = self._decoder.step(some, [place] * len(some), len(some) - last)
        return logits[0]


def _packed(layer: torch.nn.Module) -> PackedWeight:
    assert isinstance(layer, PackedLinear)
    return layer.packed


def _described(block: Block, keys: Tensor, values: Tensor) -> decode.Block:
    mixer, mlp = block.mixer, block.mlp
    assert isinstance(mixer, GatedSlotAttention)
    assert mlp is not None
    options = mixer.options
    names = ("q", "k", "v", "f", "o", *(("g",) if options.output_gate else ()))
    norm: dict[str, Any] = {}
    if options.output_norm != "none":
        norm = {"output_norm": mixer.norm.weight, "output_epsilon": mixer.norm.eps}
    return decode.block(
        **{name: _packed(getattr(mixer, f"{name}_proj")) for name in names},
        **{name: _packed(getattr(mlp, f"{name}_proj")) for name in ("gate", "up", "down")},
        **norm,
        mixer_norm=block.mixer_norm.weight,
        mixer_epsilon=block.mixer_norm.eps,
        mlp_norm=block.mlp_norm.weight,
        mlp_epsilon=block.mlp_norm.eps,
        keys=keys,
        values=values,
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
