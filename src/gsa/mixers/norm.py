"""The RMS norm of mixers and blocks."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gsa.mixers.fused import rms_norm


class RMSNorm(nn.Module):
    """x over the root of its mean square, times a weight; computed in fp32 at least, in any mix of dtypes."""

    handed_out = False
    """Whether others see the result, and not only products: autocast then leaves its dtype alone."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps, self.handed_out)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"
