"""Linear layers and embeddings for inference on CPUs: weights in fp32, bf16, int8 or int4, activations in fp32.

Up to 16 tokens go through the matrix-vector kernels, which read the weights as they are stored. For more tokens, the
products are computed in bf16 or int8 (see `gsa.infer.compute`), or a layer's weights are converted to fp32 for one
matrix product of torch; the conversion costs little beside that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gsa.infer.dense import DenseEmbedding, DenseLinear
from gsa.mixers.activations import FeatureMap
from gsa.mixers.hybrid import Hybrid
from gsa.mixers.norm import RMSNorm
from gsa.models.backbone import AddedSwiGLU, SwiGLU
from gsa.ops.linear import MAX_COLUMNS, matvec
from gsa.ops.matmul import matmul
from gsa.ops.weights import DENSE, PackedWeight, pack

Weight = TypeVar("Weight")

GROUPS = {"int8": 64, "int4": 32}
"""Columns of a weight that share a scale, and activations with them where they become integers. With 64, sums of
products in int8 become floats half as often as with 32, and losses hardly rise; with 128 they do (docs/log.md)."""


class Unpacker:
    """Converts weights to fp32, one layer at a time, in memory that all layers of a model share.

    Several threads may read texts with one model: each holds the memory for one product, and the others wait.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._memory: dict[torch.device, Tensor] = {}

    def __reduce__(self) -> tuple[type[Unpacker], tuple[()]]:
        """A copy of a model has memory of its own; what is in it now is not worth copying."""
        return Unpacker, ()

    @contextmanager
    def fp32(self, weight: PackedWeight) -> Iterator[Tensor]:
        """The weights [N, K] as fp32, valid inside the `with` block; those stored in fp32 are not copied."""
        if weight.format == "fp32":
            yield weight.unpack()
            return
        with self._lock:
            yield weight.unpack(self._room(weight))

    def _room(self, weight: PackedWeight) -> Tensor:
        """At least N K numbers on the weight's device."""
        device, size = weight.weight.device, weight.N * weight.K
        held = self._memory.get(device)
        if held is None or held.numel() < size:
            held = self._memory[device] = torch.empty(size, dtype=torch.float32, device=device)
        return held


class InferenceLinear(nn.Module):
    """A linear layer for inference."""

    weight: Tensor
    """Empty. Mixers take the dtype and device of their states from it, as they do from an nn.Linear's."""
    bias: Tensor | None

    def __init__(self, packed_weight: PackedWeight, bias: Tensor | None, unpacker: Unpacker, compute: str = "fp32"):
        super().__init__()
        self.packed_weight, self.compute, self._unpacker = packed_weight, compute, unpacker
        self.activations = "fp32" if packed_weight.format in DENSE else "int8"
        self.register_buffer("weight", torch.empty(0, dtype=torch.float32, device=packed_weight.weight.device))
        self.register_buffer("bias", None if bias is None else bias.detach().float())

    def forward(self, x: Tensor) -> Tensor:
        if 0 < x.numel() <= MAX_COLUMNS * self.packed_weight.K:
            y = matvec(self.packed_weight, x, activations=self.activations)
            return y if self.bias is None else y + self.bias
        if self.has_matmul(x):
            y = matmul(self.packed_weight, x, compute=self.compute)
            return y if self.bias is None else y.add_(self.bias)
        with self._unpacker.fp32(self.packed_weight) as weight:
            return F.linear(x, weight, self.bias)

    def has_matmul(self, x: Tensor) -> bool:
        """Whether x is for the native engine's products over many tokens."""
        return self.compute != "fp32" and x.is_cpu and x.numel() > MAX_COLUMNS * self.packed_weight.K

    def extra_repr(self) -> str:
        return f"{self.packed_weight.K}, {self.packed_weight.N}, {self.packed_weight.format}, {self.compute}"


class InferenceSwiGLU(AddedSwiGLU):
    """An MLP over inference layers. For many tokens, norm, activation and residual are part of its two products."""

    def __init__(self, mlp: SwiGLU):
        nn.Module.__init__(self)  # it takes the layers over
        for name, layer in mlp.named_children():
            assert isinstance(layer, InferenceLinear)
            self.add_module(name, layer)

    def add_to(self, x: Tensor, norm: RMSNorm) -> Tensor:
        gate, up, down = (cast(InferenceLinear, layer) for layer in (self.gate_proj, self.up_proj, self.down_proj))
        if not gate.has_matmul(x):
            return x + self(norm(x))
        both, compute = [gate.packed_weight, up.packed_weight], gate.compute
        inner = matmul(both, x, compute=compute, norm=(norm.weight, norm.eps))
        return matmul(down.packed_weight, inner, compute=compute, swiglu=True, residual=x)


class InferenceEmbedding(nn.Module):
    """An embedding for inference; a tied one shares its weights with the head."""

    def __init__(self, packed_weight: PackedWeight):
        super().__init__()
        self.packed_weight = packed_weight

    @property
    def num_embeddings(self) -> int:
        return self.packed_weight.N

    def forward(self, ids: Tensor) -> Tensor:
        return self.packed_weight.rows(ids)


def use_packed_layers(lm: Any, format: str, compute: str) -> int:
    """Gives an LM these layers and this embedding, for CPUs; the bytes of their weights."""
    unpacker = Unpacker()
    weights = use_layers(
        lm,
        prepare=lambda weight: pack(weight, format, GROUPS.get(format)),
        embedding=InferenceEmbedding,
        linear=lambda weight, bias: InferenceLinear(weight, bias, unpacker, compute),
    )
    for block in lm.model.layers:
        if block.mlp is not None:
            block.mlp = InferenceSwiGLU(block.mlp)
        if isinstance(block.mixer, Hybrid) and format != "fp32":
            for x in (block.mixer.slot_router.weight, block.mixer.slot_query):  # bf16 is what decoding reads
                x.data = x.data.bfloat16().float()
    return sum(weight.nbytes for weight in weights)


def use_dense_layers(lm: Any, format: str) -> int:
    """Gives an LM those of `gsa.infer.dense`, for GPUs; the bytes of their weights."""
    weights = use_layers(
        lm,
        prepare=lambda weight: weight.detach().to(DENSE[format]),
        embedding=DenseEmbedding,
        linear=DenseLinear,
    )
    return sum(weight.nbytes for weight in weights)


def use_layers(
    lm: Any,
    *,
    prepare: Callable[[Tensor], Weight],
    embedding: Callable[[Weight], nn.Module],
    linear: Callable[[Weight, Tensor | None], nn.Module],
) -> list[Weight]:
    """Replaces the linear layers and the embedding of an LM, and returns their weights, shared ones once.

    Layers are replaced one by one, so that there are never two copies of all weights. Everything else (norms, biases,
    convolutions) becomes fp32.
    """
    tied = lm.lm_head.weight is lm.model.embeddings.weight
    weights = [prepare(lm.model.embeddings.weight)]
    lm.model.embeddings = embedding(weights[0])
    if tied:
        lm.lm_head = linear(weights[0], None)
    maps = {layer.layer for layer in lm.modules() if isinstance(layer, FeatureMap)}  # small, and applied per head
    names = [name for name, layer in lm.named_modules() if isinstance(layer, nn.Linear) and layer not in maps]
    for name in names:
        layer = lm.get_submodule(name)
        weights.append(prepare(layer.weight))
        lm.set_submodule(name, linear(weights[-1], layer.bias))
    lm.float()
    return weights
