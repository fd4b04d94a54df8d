"""Cross-entropy of a linear head, in pieces: the logits of a whole batch never exist at once.

Shape letters: T tokens, D model width, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from gsa.errors import GSAError

IGNORED = -100
PIECE = 2**22  # logits held at a time


def linear_cross_entropy(x: Tensor, weight: Tensor, labels: Tensor, *, count: Tensor | float | None = None) -> Tensor:
    """The mean cross-entropy of logits x W^T [T, V] against labels [T], of which those that are -100 do not count.

    x [T, D], weight [V, D]. The sum is divided by `count`, by default the number of labels that count (nan if none
    does). The pass forward also computes the gradients, piece by piece, so that the pass backward only scales them.
    """
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1]:
        raise GSAError(
            f"linear_cross_entropy: x [T, D] and weight [V, D] do not fit: {list(x.shape)}, {list(weight.shape)}"
        )
    if tuple(labels.shape) != (x.shape[0],) or labels.dtype != torch.int64:
        raise GSAError(
            f"linear_cross_entropy: labels must be int64 [T] = [{x.shape[0]}], got {labels.dtype} {list(labels.shape)}"
        )
    if count is None:
        count = (labels != IGNORED).sum()
    if x.device.type == "cuda" and (liger := _liger()) is not None:
        return liger(x, weight, labels) / count
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight = x.to(dtype), weight.to(dtype)
    if x.dtype != weight.dtype:
        raise GSAError(f"linear_cross_entropy: x is {x.dtype}, weight is {weight.dtype}")
    with torch.autocast(x.device.type, enabled=False):
        x_grad, weight_grad = (torch.is_grad_enabled() and tensor.requires_grad for tensor in (x, weight))
        return _LinearCrossEntropy.apply(x, weight, labels, x_grad, weight_grad) / count


class _LinearCrossEntropy(torch.autograd.Function):
    """The sum over labels, with gradients computed along the way."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, labels: Tensor, needs_x: bool, needs_weight: bool
    ) -> Tensor:
        V, compute = weight.shape[0], torch.float64 if x.dtype == torch.float64 else torch.float32
        total = x.new_zeros((), dtype=compute)
        x_grad = torch.empty_like(x) if needs_x else None
        weight_grad = torch.zeros_like(weight, dtype=compute) if needs_weight else None
        rows = max(PIECE // V, 1)
        for begin in range(0, x.shape[0], rows):
            piece, target = x[begin : begin + rows], labels[begin : begin + rows]
            counts = target != IGNORED
            chosen = torch.where(counts, target, 0)[:, None]
            logits = (piece @ weight.T).to(compute)
            # log p of the target, and p - onehot, the gradient by the logits, in the logits' own memory
            top = logits.amax(1, keepdim=True)
            correct = logits.gather(1, chosen) - top
            p = logits.sub_(top).exp_()
            mass = p.sum(1, keepdim=True)
            total = total + torch.where(counts[:, None], mass.log() - correct, 0).sum()
            if not (needs_x or needs_weight):
                continue
            p = p.mul_(counts[:, None] / mass)
            p = p.scatter_add_(1, chosen, -counts[:, None].to(compute)).to(x.dtype)
            if x_grad is not None:
                x_grad[begin : begin + rows] = p @ weight
            if weight_grad is not None:
                weight_grad += p.T @ piece
        ctx.save_for_backward(x_grad, None if weight_grad is None else weight_grad.to(weight.dtype))
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x_grad, weight_grad = ctx.saved_tensors
        scaled = (None if g is None else g * grad.to(g.dtype) for g in (x_grad, weight_grad))
        return (*scaled, None, None, None)


def _liger() -> Any:
    """liger-kernel's fused form of the same sum, if it is installed."""
    try:
        from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction
    except ImportError:
        return None
    return lambda x, weight, labels: LigerFusedLinearCrossEntropyFunction.apply(
        x, weight, labels, None, None, IGNORED, 0.0, 0.0, "sum"
    )[0]


def next_token_labels(labels: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
    """What each token should predict [B, T]: the label after it, and -100 at the ends of sequences and at pads."""
    if mask is not None:
        labels = torch.where(mask.to(torch.bool), labels, IGNORED)
    shifted = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
    if cu_seqlens is not None:
        ends = cu_seqlens[1:].to(torch.int64) - 1
        ends = torch.where(ends >= 0, ends, labels.shape[1] - 1)  # empty sequences at the beginning
        shifted = shifted.index_fill(1, ends.to(labels.device), IGNORED)
    return shifted
