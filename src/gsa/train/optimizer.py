"""AdamW with weight decay where it belongs."""

from __future__ import annotations

import torch
from torch import nn

from gsa.mixers.convolution import ShortConvolution
from gsa.models.lm import LM


def adamw(
    model: LM, *, lr: float, betas: tuple[float, float], eps: float, weight_decay: float, decay_all: bool
) -> torch.optim.AdamW:
    """AdamW over a model; weight decay on the matrices of linear maps and convolutions only, unless on all."""
    matrices = decayed(model)
    parameters = list(model.named_parameters())
    groups = [
        {"params": [p for name, p in parameters if decay_all or name in matrices], "weight_decay": weight_decay},
        {"params": [p for name, p in parameters if not decay_all and name not in matrices], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=lr, betas=betas, eps=eps, fused=True)


def decayed(model: nn.Module) -> set[str]:
    """The names of parameters that weight decay is for: no norm, bias, embedding (a tied head is one) or time scale."""
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    return {
        f"{prefix}.weight" if prefix else "weight"
        for prefix, module in model.named_modules()
        if isinstance(module, nn.Linear | ShortConvolution) and id(module.weight) not in embeddings
    }
