"""Checks of what matrix products are given, and their error messages; `what` is the operation.

Letters: N rows, K columns of W; "columns" of activations are the rows of x, one per token or sequence.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from gsa.errors import GSAError, raised_by
from gsa.ops.memory import refuse_shared, same_place
from gsa.ops.transforms import recorded
from gsa.ops.weights import PackedWeight

Norm = tuple[Tensor, float]
"""The weight [K] and the epsilon of an RMSNorm."""


def count_columns(what: str, weight: PackedWeight, x: Tensor, norm: Norm | None, swiglu: bool) -> int:
    """How many columns x [..., K] has, or [..., 2 K] with `swiglu`; raises unless it suits the weight."""
    if not isinstance(weight, PackedWeight):
        raise GSAError(f"{what}: weight must come from pack, got {type(weight).__name__}")
    if not isinstance(x, Tensor) or x.layout != torch.strided:
        raise GSAError(
            f"{what}: x must be a dense tensor, got {x.layout if isinstance(x, Tensor) else type(x).__name__}"
        )
    if x.dtype != torch.float32:
        raise GSAError(f"{what}: x is {x.dtype}, expected torch.float32")
    width = 2 * weight.K if swiglu else weight.K
    if x.dim() == 0 or x.shape[-1] != width:
        raise GSAError(f"{what}: x has the shape {list(x.shape)}, expected [..., {width}]")
    if x.device != weight.weight.device:
        raise GSAError(f"{what}: x is on {x.device}, the weight is on {weight.weight.device}")
    if x.requires_grad and torch.is_grad_enabled():
        raise GSAError(f"{what}: x requires a gradient, and there is none; use torch.no_grad() or x.detach()")
    if norm is not None:
        _check_norm(what, weight, x, norm, swiglu)
    return x.numel() // width


def _check_norm(what: str, weight: PackedWeight, x: Tensor, norm: Norm, swiglu: bool) -> None:
    if swiglu:
        raise GSAError(f"{what}: norm and swiglu cannot both come before the product")
    if not isinstance(norm, tuple) or len(norm) != 2 or not isinstance(norm[1], float) or not norm[1] >= 0:
        raise GSAError(f"{what}: norm must be a tuple of a weight and an epsilon, a float of at least 0")
    check_like(what, "the weight of norm", norm[0], (weight.K,), x)
    if not norm[0].is_contiguous():
        raise GSAError(f"{what}: the weight of norm must be contiguous")


def check_like(what: str, name: str, tensor: Tensor, shape: tuple[int, ...], x: Tensor) -> None:
    """Raises unless a tensor has the shape, and the dtype and device of x."""
    if not isinstance(tensor, Tensor) or tensor.layout != torch.strided:
        raise GSAError(f"{what}: {name} must be a dense tensor")
    if tensor.dtype != torch.float32 or tensor.shape != shape or tensor.device != x.device:
        got = f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}"
        raise GSAError(f"{what}: {name} is {got}, expected torch.float32 {list(shape)} on {x.device}")


def check_out(
    what: str,
    out: Tensor,
    shape: tuple[int, ...],
    x: Tensor,
    read: Mapping[str, Tensor | None],
    residual: Tensor | None,
) -> None:
    """Raises unless the result can go there. It may be the residual; otherwise it shares no memory with what is
    read."""
    check_like(what, "out", out, shape, x)
    if not out.is_contiguous() or out.requires_grad:
        raise GSAError(f"{what}: out must be contiguous and require no gradient")
    others = {"x": x, **read}
    if residual is not None and not same_place(residual, out):  # else all of it may be overwritten
        others["residual"] = residual
    if not recorded():
        with raised_by(what):
            refuse_shared({"out": out}, others)
