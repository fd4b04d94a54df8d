"""Functions that mixers apply entry by entry: activations, feature maps of queries and keys, forget gates."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gsa.ops.state import compute_dtype


def _identity(x: Tensor) -> Tensor:
    return x


def _elu1(x: Tensor) -> Tensor:
    return F.elu(x) + 1


def _relu2(x: Tensor) -> Tensor:
    return F.relu(x).square()


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": _identity,
    "swish": F.silu,
    "relu": F.relu,
    "relu2": _relu2,
    "gelu": F.gelu,
    "sigmoid": torch.sigmoid,
    "elu1": _elu1,
}
FEATURE_MAPS = (*ACTIVATIONS, "t2r")
SOFTMAX = "softmax"
"""A feature map of twice as many features, none negative, as Hedgehog has it: softmax(x), and softmax(-x) behind it."""
NOT_NEGATIVE = ("relu", "relu2", "sigmoid", "elu1", "t2r", SOFTMAX)


def both_softmaxes(x: Tensor) -> Tensor:
    """[.., 2 K] of x [.., K], in fp32 at least within."""
    wide = x.to(compute_dtype(x.dtype))
    return torch.cat([wide.softmax(-1), (-wide).softmax(-1)], -1).to(x.dtype)


class FeatureMap(nn.Module):
    """An activation on queries and keys, for `t2r` behind a learned matrix that all heads share."""

    def __init__(self, name: str, width: int):
        super().__init__()
        self.layer = nn.Linear(width, width, bias=False) if name == "t2r" else None
        named: dict[str, Callable[[Tensor], Tensor]] = {"t2r": F.relu, SOFTMAX: both_softmaxes}
        self.activation = named[name] if name in named else ACTIVATIONS[name]

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(x if self.layer is None else self.layer(x))


def log_forget_gate(logits: Tensor, temperature: float) -> Tensor:
    """log of sigmoid(logits)^(1/temperature), in fp32 at least: a slow gate is 1 in half precision."""
    return F.logsigmoid(logits.to(compute_dtype(logits.dtype))) / temperature
