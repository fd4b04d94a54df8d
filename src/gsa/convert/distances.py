"""How far back the teacher looks, and the half-lives of gates that reach as far.

Shape letters: N texts, T time, D model width, H key/value heads, HQ query heads, M slots.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from gsa.convert.attention import Scores
from gsa.mixers.attention import Attention
from gsa.mixers.slots import half_life_bias

SHORTEST = 4.0
"""Tokens: no half-life is shorter."""


class Measured(NamedTuple):
    """What was measured of a layer's attention."""

    beyond: Tensor
    """[HQ] share of attention beyond the window, over the tokens that have something there."""
    ages: Tensor
    """[H, T] attention beyond the window by how long ago a token left it."""


def measured(mixer: Attention, x: Tensor, window: int, sinks: int) -> Measured:
    """A layer's attention to its inputs x [N, T, D], beyond a window and sinks."""
    options, T = mixer.options, x.shape[1]
    ages, shares = torch.zeros(options.kv_heads, T), torch.zeros(options.heads)
    distance = torch.arange(T)[:, None] - torch.arange(T) - window
    far = (distance >= 0) & (torch.arange(T) >= sinks)
    for row in x:
        q, k, _ = mixer.project(row[None])
        p = Scores(options, q[0], k[0]).teacher().softmax(-1)  # [HQ, T, T]
        p = p.masked_fill(~far, 0.0)
        shares += p[:, window + sinks :].sum(-1).mean(-1)
        by_head = p.unflatten(0, (options.kv_heads, -1)).sum(1).flatten(1)
        ages.index_add_(1, distance.clamp(min=0).flatten(), by_head)
    return Measured(shares / len(x), ages)


def quantiles(ages: Tensor, count: int) -> Tensor:
    """Half-lives [H, count]: ages below which lie 1/2, 3/2, 5/2, ... of `count` parts of the attention ages [H, T]."""
    total = ages.double().cumsum(1)
    wanted = (torch.arange(count, dtype=torch.float64) + 0.5) / count * total[:, -1:]
    place = torch.searchsorted(total, wanted.contiguous()).clamp(max=ages.shape[1] - 1)
    before = total.gather(1, place) - ages.double().gather(1, place)
    within = (wanted - before) / ages.double().gather(1, place).clamp(min=1e-30)
    return (place + within.clamp(0, 1)).clamp(min=SHORTEST).float()


def gate_bias(half_lives: Tensor, options: Any, logits: Tensor) -> Tensor:
    """Biases with which gates have these half-lives [H, M], beside mean logits of the shape of the biases."""
    return half_life_bias(half_lives, options.gate_temperature).reshape(logits.shape) - logits


def spread(half_lives: Tensor) -> dict[str, Any]:
    marks = torch.quantile(half_lives.flatten(), torch.tensor([0.1, 0.5, 0.9])).tolist()
    return {"half_lives": [round(mark, 1) for mark in marks]}
