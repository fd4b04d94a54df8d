"""Pieces that mixers share: norms, activations, feature maps, forget gates, rotary positions.

Shape letters: B batch, T time, H heads, K width of a head.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gsa.mixers.fused import rms_norm
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


class FeatureMap(nn.Module):
    """An activation on queries and keys, for `t2r` behind a learned matrix that all heads share."""

    def __init__(self, name: str, width: int):
        super().__init__()
        self.layer = nn.Linear(width, width, bias=False) if name == "t2r" else None
        self.activation = F.relu if name == "t2r" else ACTIVATIONS[name]

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(x if self.layer is None else self.layer(x))


class RMSNorm(nn.Module):
    """x over the root of its mean square, times a weight; computed in fp32 at least, in any mix of dtypes."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"


def log_forget_gate(logits: Tensor, temperature: float) -> Tensor:
    """log of sigmoid(logits)^(1/temperature), in fp32 at least: a slow gate is 1 in half precision."""
    return F.logsigmoid(logits.to(compute_dtype(logits.dtype))) / temperature


def rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """x [B, T, H, K] turned by its positions [B or 1, T]: rotary embedding, first half against second half.

    Angles are fp64 where the device has it: in fp32, those of heads of 128 are off by up to 0.06 at position a million.
    """
    half = x.shape[-1] // 2
    dtype = torch.float32 if x.device.type == "mps" else torch.float64
    frequencies = theta ** (torch.arange(half, device=x.device, dtype=dtype) / -half)
    angles = positions[..., None, None].to(dtype) * frequencies
    compute = compute_dtype(x.dtype)
    cos, sin = angles.cos().to(compute), angles.sin().to(compute)
    a, b = x.to(compute).chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)
