"""RMS norm and SwiGLU that keep little for the pass backward, and liger-kernel's own on a GPU where it is installed.

torch would keep every product on the way; here the inputs are kept, and the rest is computed again. Compiled code takes
the plain formulas, which the compiler fuses by itself.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from gsa.ops.state import compute_dtype


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x over the root of its mean square along the last dimension, times a weight; in fp32 at least, as x's dtype."""
    if torch.compiler.is_compiling():
        wide = x.to(compute_dtype(x.dtype))
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)
    if x.dtype == weight.dtype and (liger := liger_for(x)) is not None:
        return liger["rms_norm"](x, weight, eps, 0.0, "gemma", False)
    return _RMSNorm.apply(x, weight, eps)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """swish(gate) * up"""
    if torch.compiler.is_compiling():
        return F.silu(gate) * up
    if (liger := liger_for(gate)) is not None:
        return liger["swiglu"](gate, up)
    return _SwiGLU.apply(gate, up)


def liger_for(x: Tensor) -> dict[str, Any] | None:
    """liger-kernel's functions, if x is on a GPU and it is installed."""
    return _liger() if x.is_cuda else None


@cache
def _liger() -> dict[str, Any] | None:
    try:
        from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction
    except ImportError:
        return None
    return {
        "linear_cross_entropy": LigerFusedLinearCrossEntropyFunction.apply,
        "rms_norm": LigerRMSNormFunction.apply,
        "swiglu": LigerSiLUMulFunction.apply,
    }


def _scale(x: Tensor, eps: float) -> Tensor:
    """What each row of x is multiplied by."""
    return torch.rsqrt(torch.linalg.vector_norm(x, dim=-1, keepdim=True).square() / x.shape[-1] + eps)


class _RMSNorm(torch.autograd.Function):
    """Keeps x alone."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.to(compute_dtype(x.dtype))
        return (wide * _scale(wide, eps)).mul_(weight).to(x.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:2])
        ctx.eps = inputs[2]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        wide, grad = x.to(compute_dtype(x.dtype)), grad.to(compute_dtype(x.dtype))
        scale = _scale(wide, ctx.eps)
        normed, weighted = wide * scale, grad * weight
        weight_grad = (grad * normed).reshape(-1, weight.shape[0]).sum(0).to(weight.dtype)
        x_grad = (weighted - normed * (weighted * normed).mean(-1, keepdim=True)) * scale
        return x_grad.to(x.dtype), weight_grad, None


class _SwiGLU(torch.autograd.Function):
    """Keeps gate and up."""

    generate_vmap_rule = True

    @staticmethod
    def forward(gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(gate) * up

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        if torch.is_grad_enabled():  # a derivative of this is wanted too, and torch's own has none
            s = torch.sigmoid(gate)
            return grad * up * (s + gate * s * (1 - s)), grad * gate * s
        return torch.ops.aten.silu_backward(grad * up, gate), grad * F.silu(gate)
