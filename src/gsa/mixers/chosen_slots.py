"""A router that lets a token write to few of the slots, and gates of whole heads, as Raven has them.

Shape letters: B batch, T time, D model width, H key/value heads, M slots.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gsa.ops.state import compute_dtype

ROUTERS = ("none", "sigmoid", "softmax")


class SlotChoice(nn.Module):
    """Weights [B, T, H, M] of the slots for every token x [B, T, D]; those of slots that are not chosen are 0.

    Of every head, the `chosen` slots with the largest scores are taken, and those that score as much as the last of
    them. Sigmoid scores are divided by their sum; softmax scores, which sum to at most 1, stay as they are.
    """

    def __init__(self, width: int, heads: int, slots: int, kind: str, chosen: int, noise: float):
        super().__init__()
        self.kind, self.slots, self.chosen, self.noise = kind, slots, chosen, noise
        self.proj = nn.Linear(width, heads * slots, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        logits = self.proj(x).unflatten(-1, (-1, self.slots))
        logits = logits.to(compute_dtype(logits.dtype))
        if self.training and self.noise:
            # Gumbel noise: a slot is the first with the probability that a softmax gives it.
            logits = logits - self.noise * torch.empty_like(logits).exponential_().log()
        left_out = logits < logits.detach().topk(self.chosen, -1).values[..., -1:]
        if self.kind == "softmax":
            return logits.softmax(-1).masked_fill(left_out, 0.0)
        return F.logsigmoid(logits).masked_fill(left_out, -torch.inf).softmax(-1)  # sums that are too small stay exact


class HeadGate(nn.Module):
    """Log gates [B, T, H, 1] = -exp(A) softplus(W x + b), which begin as Mamba-2's do."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.proj = nn.Linear(width, heads, bias=False)
        self.bias = nn.Parameter(torch.empty(heads))
        self.log_rate = nn.Parameter(torch.empty(heads))
        self.reset()

    def reset(self) -> None:
        """Rates from 1 to 16 over the heads; steps, drawn evenly in their logarithm, from 0.001 to 0.1."""
        with torch.no_grad():
            self.log_rate.copy_(torch.linspace(1, 16, len(self.log_rate), device=self.log_rate.device).log())
            nn.init.uniform_(self.bias, math.log(0.001), math.log(0.1))
            steps = self.bias.exp()
            self.bias.copy_(steps + torch.log(-torch.expm1(-steps)))  # the inverse of softplus

    def forward(self, x: Tensor) -> Tensor:
        dt = self.proj(x)
        dt = F.softplus(dt.to(compute_dtype(dt.dtype)) + self.bias)
        return (-self.log_rate.exp() * dt)[..., None]
