"""How far a student's next token is from its teacher's: KL over the teacher's likeliest tokens and the rest as one.

With p the teacher's and q the student's probabilities, r what is left to all other tokens,

    KL = sum over likeliest of p_i (ln p_i - ln q_i) + p_r (ln p_r - ln q_r)

whose gradient by the student's logits is q_i - p_i for a likeliest token, and q_j (1 - p_r / q_r) for another. Computed
in pieces along with its gradients, so that the logits of a whole batch never exist. Shape letters: T tokens, D width,
V vocabulary, k likeliest.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

LOGITS_AT_ONCE = 2**23
LEAST_REST = 1e-6
"""The rest is never less likely than this: a logarithm and a quotient need it."""


def likeliest_divergence(x: Tensor, weight: Tensor, ids: Tensor, log_probs: Tensor) -> Tensor:
    """The mean KL of logits x W^T against log-probabilities [T, k] of tokens ids [T, k]; x [T, D], weight [V, D]."""
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    return _Divergence.apply(x, weight, ids, log_probs) / x.shape[0]


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ids: Tensor, log_probs: Tensor) -> Tensor:
        narrow = weight.to(x.dtype)
        total = torch.zeros((), device=x.device)
        x_grad = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        weight_grad = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        rows = max(LOGITS_AT_ONCE // weight.shape[0], 1)
        for begin in range(0, x.shape[0], rows):
            piece = slice(begin, begin + rows)
            logits = (x[piece] @ narrow.T).float()
            loss, gradient = _piece(logits, ids[piece], log_probs[piece])
            total += loss
            gradient = gradient.to(x.dtype)
            if x_grad is not None:
                x_grad[piece] = gradient @ narrow
            if weight_grad is not None:
                weight_grad += gradient.T @ x[piece]
        ctx.save_for_backward(x_grad, weight_grad)
        ctx.dtype = weight.dtype
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x_grad, weight_grad = ctx.saved_tensors
        return (
            None if x_grad is None else (x_grad.float() * grad).to(x_grad.dtype),
            None if weight_grad is None else (weight_grad * grad).to(ctx.dtype),
            None,
            None,
        )


def _piece(logits: Tensor, ids: Tensor, log_probs: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of KLs, and its gradient by the logits [T, V], in their memory."""
    lse = logits.logsumexp(-1, keepdim=True)
    chosen = logits.gather(-1, ids) - lse
    p = log_probs.exp()
    p_rest = (1 - p.sum(-1, keepdim=True)).clamp_min(LEAST_REST)
    q_rest = (1 - chosen.exp().sum(-1, keepdim=True)).clamp_min(LEAST_REST)
    loss = (p * (log_probs - chosen)).sum() + (p_rest * (p_rest / q_rest).log()).sum()
    gradient = logits.sub_(lse).exp_().mul_(1 - p_rest / q_rest)
    return loss, gradient.scatter_(-1, ids, chosen.exp() - p)
