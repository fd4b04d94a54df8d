"""Cross-entropy of a linear head, in pieces: the logits of a whole batch never exist at once.

Shape letters: T tokens, D model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.checkpoint import checkpoint

from gsa.errors import GSAError
from gsa.mixers.fused import liger_for
from gsa.mixers.sequences import PackedRows, Padding
from gsa.ops.native import rows as native_rows
from gsa.ops.state import compute_dtype

IGNORED = -100
LOGITS_AT_ONCE = 2**22
"""How many logits in fp32 are held in memory at a time; in half precision twice as many."""
LOGITS_AT_ONCE_OF_A_MODULE = 2**25
"""The same for a head that is called: more, since what hangs on it (say, fetching its weights) happens every time."""


def head_cross_entropy(
    head: nn.Module, x: Tensor, labels: Tensor, *, vocab_size: int, count: Tensor | float | None = None
) -> Tensor:
    """The mean cross-entropy of a head's logits of x [B, T, D] against labels [B, T], of which -100 do not count.

    The sum is divided by `count`, by default the number of labels that count (nan if none does). A head that is just a
    matrix is multiplied with, in pieces (`linear_cross_entropy`). Any other, with an adapter, a bias, hooks or weights
    that lie elsewhere, is called.
    """
    x, labels = x.flatten(0, 1), labels.flatten()
    if _is_a_matrix(head, x):
        assert isinstance(head, nn.Linear)
        return linear_cross_entropy(x, head.weight, labels, count=count)
    return _mean(_called_cross_entropy(head, x, labels, vocab_size), labels, count)


def cross_entropy(logits: Tensor, labels: Tensor, *, count: Tensor | float | None = None) -> Tensor:
    """The same of logits [B, T, V] that are there anyway."""
    labels = labels.flatten()
    return _mean(_called_cross_entropy(_themselves, logits.flatten(0, 1), labels, logits.shape[-1]), labels, count)


def _mean(total: Tensor, labels: Tensor, count: Tensor | float | None) -> Tensor:
    if count is None:
        count = (labels != IGNORED).sum()
    return total / (count.to(total.device) if isinstance(count, Tensor) else count)


def _is_a_matrix(head: nn.Module, x: Tensor) -> bool:
    """Whether head(x) is x W^T and nothing more, with the weight where x is."""
    if type(head) is not nn.Linear:  # an adapter, parametrizations, shards
        return False
    bias: Tensor | None = head.bias
    if bias is not None:
        return False
    if "forward" in vars(head) or any(not _only_fetches(hook) for hook in _hooks(head)):
        return False
    return head.weight.device == x.device and not is_traceable_wrapper_subclass(head.weight)


def _hooks(module: nn.Module) -> Iterator[Any]:
    for name in ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"):
        yield from getattr(module, name).values()


def _only_fetches(hook: Any) -> bool:
    """Whether this is a hook of DeepSpeed's ZeRO, which fetches weights; it does so too when they are asked for."""
    return (getattr(hook, "__module__", None) or "").startswith("deepspeed.")


def _called_cross_entropy(head: Callable[[Tensor], Tensor], x: Tensor, labels: Tensor, vocab_size: int) -> Tensor:
    """The sum over labels [T] of the cross-entropy of head(x) [T, V].

    In pieces, whose logits are computed again in the pass backward. Compiled code takes all at once: the number of
    pieces would tie it to one length.
    """

    def piece_sum(x: Tensor, labels: Tensor) -> Tensor:
        logits = head(x[None])[0]  # a batch, as others call it
        labels = labels.to(logits.device)
        return F.cross_entropy(logits.to(compute_dtype(logits.dtype)), labels, ignore_index=IGNORED, reduction="sum")

    if torch.compiler.is_compiling():
        return piece_sum(x, labels)
    rows = max(LOGITS_AT_ONCE_OF_A_MODULE // vocab_size, 1)
    if len(x) <= rows:
        return piece_sum(x, labels)
    pieces = zip(x.split(rows), labels.split(rows), strict=True)
    if not torch.is_grad_enabled():
        return torch.stack([piece_sum(*piece) for piece in pieces]).sum()
    return torch.stack([checkpoint(piece_sum, *piece, use_reentrant=False) for piece in pieces]).sum()


def _themselves(logits: Tensor) -> Tensor:
    return logits


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
    if weight.device != x.device or labels.device != x.device:
        # for example, a head whose weight was offloaded
        raise GSAError(
            f"linear_cross_entropy: x is on {x.device}, weight on {weight.device}, labels on {labels.device}; "
            "they must be on one device"
        )
    if count is None:
        count = (labels != IGNORED).sum()
    elif isinstance(count, Tensor):
        count = count.to(x.device)
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x = x.to(dtype)
    elif x.dtype != weight.dtype:
        raise GSAError(f"linear_cross_entropy: x is {x.dtype}, weight is {weight.dtype}")
    if not torch.compiler.is_compiling() and (liger := liger_for(x)) is not None:
        sum_of = (None, None, IGNORED, 0.0, 0.0, "sum", None, False, torch.float32)
        return liger["linear_cross_entropy"](x, weight.to(x.dtype), labels, *sum_of)[0] / count
    x_grad, weight_grad = (torch.is_grad_enabled() and tensor.requires_grad for tensor in (x, weight))
    return _linear_cross_entropy(x, weight, labels, x_grad, weight_grad)[0] / count


@torch.library.custom_op("gsa::linear_cross_entropy", mutates_args=())
def _linear_cross_entropy(
    x: Tensor, weight: Tensor, labels: Tensor, needs_x: bool, needs_weight: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The sum over labels, and its gradients by x and weight, empty where they are not needed.

    Products are in the dtype of x; the weight may come in a wider one, in which its gradient is summed.
    """
    total, x_grad, weight_grad = _results(x, weight, labels, needs_x, needs_weight)
    total.zero_()
    weight_grad.zero_()
    narrow = weight.to(x.dtype)
    count = max(LOGITS_AT_ONCE * 4 // (narrow.itemsize * narrow.shape[0]), 1)
    for begin in range(0, x.shape[0], count):
        piece = slice(begin, begin + count)
        loss, p = _piece(x[piece] @ narrow.T, labels[piece], needs_x or needs_weight)
        total += loss
        if needs_x:
            x_grad[piece] = p @ narrow
        if needs_weight:
            weight_grad += p.T @ x[piece]
    return total, x_grad, weight_grad


def _piece(logits: Tensor, labels: Tensor, gradient: bool) -> tuple[Tensor, Tensor]:
    """The sum of the losses of logits [rows, V] in fp32 at least, and, if asked for, its gradient by them, p - onehot,
    in their dtype and their memory."""
    counts = labels != IGNORED
    chosen = torch.where(counts, labels, 0)
    low, high = chosen.aminmax()
    if int(low) < 0 or int(high) >= logits.shape[1]:
        raise GSAError(f"linear_cross_entropy: labels must be in 0..{logits.shape[1] - 1}, or {IGNORED}")
    if native_rows.usable(logits):
        return native_rows.cross_entropy(logits, labels, gradient=gradient).sum(), logits
    dtype, chosen, counts = logits.dtype, chosen[:, None], counts[:, None]
    logits = logits.to(compute_dtype(dtype))
    top = logits.amax(1, keepdim=True)
    correct = logits.gather(1, chosen) - top
    p = logits.sub_(top).exp_()
    mass = p.sum(1, keepdim=True)
    loss = torch.where(counts, mass.log() - correct, 0).sum()
    if gradient:
        p = p.mul_(counts / mass).scatter_add_(1, chosen, -counts.to(p.dtype)).to(dtype)
    return loss, p


@_linear_cross_entropy.register_fake
def _results(
    x: Tensor, weight: Tensor, labels: Tensor, needs_x: bool, needs_weight: bool
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = compute_dtype(x.dtype)
    return (
        x.new_empty((), dtype=dtype),
        x.new_empty(x.shape if needs_x else 0),
        weight.new_empty(weight.shape if needs_weight else 0, dtype=dtype),  # a sum over pieces
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.needs, ctx.dtype = inputs[3:], inputs[1].dtype
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*output[1:])


def _backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    if torch.is_grad_enabled():
        raise GSAError("linear_cross_entropy: it has no second derivative")
    x_grad, weight_grad = ctx.saved_tensors
    needs_x, needs_weight = ctx.needs
    return (
        (x_grad.to(grad.dtype) * grad).to(x_grad.dtype) if needs_x else None,
        (weight_grad * grad).to(ctx.dtype) if needs_weight else None,
        None,
        None,
        None,
    )


_linear_cross_entropy.register_autograd(_backward, setup_context=_save)


def ignored_at_pads(labels: Tensor, packing: Padding | PackedRows | None) -> Tensor:
    """Labels [B, T] with -100 at pads."""
    return labels if packing is None else torch.where(packing.mask, labels, IGNORED)


def next_token_labels(labels: Tensor, packing: Padding | PackedRows | None, cu_seqlens: Tensor | None) -> Tensor:
    """What each token should predict [B, T]: the label after it in its sequence; -100 at the ends and at pads."""
    if labels.shape[1] == 0:
        return labels
    if packing is not None:
        packed = packing.pack(ignored_at_pads(labels, packing))
        return packing.unpack(next_token_labels(packed, None, packing.cu_seqlens), IGNORED)
    shifted = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
    if cu_seqlens is None:
        return shifted
    ends = (cu_seqlens[1:].to(device=labels.device, dtype=torch.int64) - 1) % labels.shape[1]  # -1: an empty beginning
    return shifted.index_fill(1, ends, IGNORED)
