"""Which slots take a token that leaves the window, and what they forget for it: from its key and value.

Shape letters: H key/value heads, K width of a head, M slots.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from gsa.mixers.activations import log_forget_gate

ROUTERS = ("softmax", "gates")
LEAST = 1e-12
"""A slot that would take less than this share of a token takes nothing: what is divided by such sums stays finite."""
HALF_LIVES = (16.0, 1024.0)
"""With fresh gates: of the slots that forget fastest and slowest, in tokens."""
TOKENS_PER_SLOT = 64.0
"""With a fresh softmax: what a slot comes to stand for, if time did nothing."""
HALF_LIFE = 512.0
"""With a fresh softmax: tokens after which half of a slot is gone by time alone."""


class SlotRouter(nn.Module):
    """Log gates g and shares s [.., H, M] of a token's key and value [.., H, K], by a matrix [M, 2K] for each head.

    With "softmax", slots share a token by the softmax of their logits. Each forgets as much as it takes in, so that it
    would come to stand for 1 / rate tokens, and a little (fade) for every token that goes anywhere: what is very old
    has turned to positions that nobody was trained on. Slots gather tokens with similar keys, which a query would find
    together. With "gates", a = sigmoid(logits)^(1/tau), and slots share a token by their 1 - a: slots differ in how far
    they reach back.
    """

    def __init__(self, kind: str, heads: int, slots: int, width: int, temperature: float):
        super().__init__()
        self.kind, self.temperature = kind, temperature
        self.weight = nn.Parameter(torch.empty(heads, slots, 2 * width))
        self.bias = nn.Parameter(torch.empty(heads, slots))
        if kind == "softmax":
            self.log_rate = nn.Parameter(torch.empty(heads, slots))
            self.log_fade = nn.Parameter(torch.empty(heads, slots))
        self.reset()

    def reset(self) -> None:
        """Fresh weights."""
        nn.init.normal_(self.weight, 0.0, self.weight.shape[2] ** -0.5)
        with torch.no_grad():
            if self.kind == "softmax":
                self.bias.zero_()
                self.log_rate.fill_(-math.log(TOKENS_PER_SLOT))
                self.log_fade.fill_(math.log(math.log(2) / HALF_LIFE))
            else:
                half_lives = spread_half_lives(self.bias.shape[1], self.bias.device)
                self.bias.copy_(half_life_bias(half_lives, self.temperature).expand_as(self.bias))

    def forward(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        token = torch.cat([k, v], -1).to(self.weight.dtype)
        logits = torch.einsum("...hc,hmc->...hm", token, self.weight) + self.bias
        if self.kind == "softmax":
            s = nn.functional.threshold(logits.softmax(-1), LEAST, 0.0)
            return -(self.log_rate.exp() * s + self.log_fade.exp()), s
        g = log_forget_gate(logits, self.temperature)
        forgotten = -torch.expm1(g)
        total = forgotten.sum(-1, keepdim=True)
        return g, nn.functional.threshold(forgotten / torch.where(total > 0, total, 1.0), LEAST, 0.0)


def spread_half_lives(count: int, device: torch.device | None = None) -> Tensor:
    """Half-lives spread evenly in their logarithm, where gates begin that nothing else is known of."""
    low, high = (math.log2(half_life) for half_life in HALF_LIVES)
    return torch.logspace(low, high, count, base=2.0, device=device)


def half_life_bias(half_lives: Tensor, temperature: float) -> Tensor:
    """The logits of gates that forget half in so many tokens: -log(2^(tau / h) - 1)."""
    x = math.log(2) * temperature / half_lives
    return -x - torch.log(-torch.expm1(-x))
