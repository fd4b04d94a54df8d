"""Layers over packed weights: what inference puts in place of a model's linear layers and embedding.

Activations are fp32 whatever the weights are. A few tokens go through the matrix-vector kernels; for more, a layer's
weights become fp32 for the time of one product, which costs little beside it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gsa.mixers.activations import FeatureMap
from gsa.ops.linear import MOST, matvec
from gsa.ops.packed import DENSE, PackedWeight, pack


class Scratch:
    """Memory for the weights of one layer as fp32, used by all layers in turn."""

    def __init__(self) -> None:
        self._held: dict[torch.device, Tensor] = {}

    def get(self, weight: PackedWeight) -> Tensor:
        device, size = weight.weight.device, weight.N * weight.K
        held = self._held.get(device)
        if held is None or held.numel() < size:
            held = self._held[device] = torch.empty(size, dtype=torch.float32, device=device)
        return held


class PackedLinear(nn.Module):
    """A linear layer for inference."""

    weight: Tensor
    """Of no size: it says which dtype and device states have."""
    bias: Tensor | None

    def __init__(self, packed: PackedWeight, bias: Tensor | None, scratch: Scratch):
        super().__init__()
        self.packed, self._scratch = packed, scratch
        self.activations = "fp32" if packed.format in DENSE else "int8"
        self.register_buffer("weight", torch.empty(0, dtype=torch.float32, device=packed.weight.device))
        self.register_buffer("bias", None if bias is None else bias.detach().float())

    def forward(self, x: Tensor) -> Tensor:
        if 0 < x.numel() <= MOST * self.packed.K:
            y = matvec(self.packed, x, activations=self.activations)
            return y if self.bias is None else y + self.bias
        plain = self.packed.format == "fp32"
        return F.linear(x, self.packed.unpack(None if plain else self._scratch.get(self.packed)), self.bias)

    def extra_repr(self) -> str:
        return f"{self.packed.K}, {self.packed.N}, {self.packed.format}"


class PackedEmbedding(nn.Module):
    """An embedding for inference; a tied one shares its weights with the head."""

    def __init__(self, packed: PackedWeight):
        super().__init__()
        self.packed = packed

    @property
    def num_embeddings(self) -> int:
        return self.packed.N

    def forward(self, ids: Tensor) -> Tensor:
        return self.packed.rows(ids)


def pack_layers(model: Any, format: str) -> list[PackedWeight]:
    """Replaces the linear layers and the embedding of an LM, one by one, so that no two copies of all weights exist.

    Everything else (norms, biases, convolutions) becomes fp32. The weights are returned, shared ones once.
    """
    scratch, found = Scratch(), []
    tied = model.lm_head.weight is model.model.embeddings.weight
    embeddings = pack(model.model.embeddings.weight, format)
    found.append(embeddings)
    model.model.embeddings = PackedEmbedding(embeddings)
    if tied:
        model.lm_head = PackedLinear(embeddings, None, scratch)
    maps = {layer.layer for layer in model.modules() if isinstance(layer, FeatureMap)}  # small, and over heads
    linear = [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear) and layer not in maps]
    for name in linear:
        layer = model.get_submodule(name)
        packed = pack(layer.weight, format)
        found.append(packed)
        model.set_submodule(name, PackedLinear(packed, layer.bias, scratch))
    model.float()
    return found
