"""Norms, activations and gates that keep little for the pass backward, and read and write memory once.

torch would keep every product on the way; here the inputs are kept, and the rest is computed again. On a CPU that is
done by the native engine's functions of rows, on a GPU by liger-kernel's where it is installed, elsewhere in torch.
Compiled code takes the plain formulas, which the compiler fuses by itself.

Under autocast a norm gives the dtype that is cast to, since what follows it is a product: otherwise each of several
projections would cast it again. One whose result is handed out keeps the dtype of its input.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from gsa.ops.native import rows
from gsa.ops.state import compute_dtype


def rms_norm(x: Tensor, weight: Tensor, eps: float, handed_out: bool = False) -> Tensor:
    """x over the root of its mean square along the last dimension, times a weight; computed in fp32 at least."""
    dtype = x.dtype if handed_out else _product_dtype(x)
    if torch.compiler.is_compiling():
        return _plain_rms_norm(x, weight, eps).to(dtype)
    if x.dtype == weight.dtype and (liger := liger_for(x)) is not None:
        return liger["rms_norm"](x, weight, eps, 0.0, "gemma", False).to(dtype)
    if rows.usable(x, weight):
        return _Rows.apply("rms_norm", x, None, None, weight, eps, dtype)
    return _RMSNorm.apply(x, weight, eps).to(dtype)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """swish(gate) * up"""
    if torch.compiler.is_compiling():
        return F.silu(gate) * up
    if (liger := liger_for(gate)) is not None:
        return liger["swiglu"](gate, up)
    if gate.dtype == up.dtype and gate.shape == up.shape and rows.usable(gate, up):
        return _Rows.apply("swiglu", gate, up, None, None, 0.0, None)
    return _SwiGLU.apply(gate, up)


def skip_gate(x: Tensor, skipped: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
    """(x + weight * skipped) * swish(gate), all of one dtype and shape but for the weight of each channel."""
    if rows.usable(x, skipped, gate, weight):
        return _Rows.apply("skip_gate", x, skipped, gate, weight, 0.0, None)
    return swiglu(gate, torch.addcmul(x, skipped, weight.to(x.dtype)))


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)), in fp32 at least."""
    dtype = compute_dtype(x.dtype)
    return _Rows.apply("softplus", x, None, None, None, 0.0, dtype) if rows.usable(x) else F.softplus(x.to(dtype))


def _product_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which a product would take x."""
    device = x.device.type
    if x.dtype == torch.float64 or not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return x.dtype
    return torch.get_autocast_dtype(device)


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


def _plain_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.to(compute_dtype(x.dtype))
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight


PLAIN: dict[str, Callable[..., Tensor]] = {
    "rms_norm": lambda x, y, z, weight, eps: _plain_rms_norm(x, weight, eps),
    "swiglu": lambda x, y, z, weight, eps: F.silu(x) * y,
    "skip_gate": lambda x, y, z, weight, eps: (x + weight.to(x.dtype) * y) * F.silu(z),
    "softplus": lambda x, y, z, weight, eps: F.softplus(x.to(compute_dtype(x.dtype))),
}
"""What the native functions of rows compute, as formulas that torch can differentiate any number of times."""


class _Rows(torch.autograd.Function):
    """A native function of rows; keeps its inputs alone."""

    @staticmethod
    def forward(
        ctx: Any,
        function: str,
        x: Tensor,
        y: Tensor | None,
        z: Tensor | None,
        weight: Tensor | None,
        epsilon: float,
        dtype: torch.dtype | None,
    ) -> Tensor:
        ctx.save_for_backward(x, y, z, weight)
        ctx.function, ctx.epsilon = function, epsilon
        return rows.forward(function, x, y, z, weight=weight, epsilon=epsilon, dtype=dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        inputs = ctx.saved_tensors
        if torch.is_grad_enabled() or not rows.usable(grad, *inputs):
            found = gradients(lambda *given: PLAIN[ctx.function](*given, ctx.epsilon), inputs, grad)
        else:
            x, y, z, weight = inputs
            found = rows.backward(ctx.function, grad, x, y, z, weight=weight, epsilon=ctx.epsilon)
        return None, *found, None, None


def gradients(
    function: Callable[..., Tensor], inputs: tuple[Tensor | None, ...], grad: Tensor
) -> tuple[Tensor | None, ...]:
    """The gradients of a function's inputs from that of its result, by torch, and themselves differentiable if torch
    records what is done."""
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        # Views of their own: an input may be the same as another, or be computed from it, which is no path of this
        # function.
        given = [
            x if x is None else x.view_as(x) if again and x.requires_grad else x.detach().requires_grad_()
            for x in inputs
        ]
        result = function(*given)
    wanted = [x for x in given if x is not None]
    options = {"create_graph": again, "allow_unused": True, "materialize_grads": True}  # no token uses no weight
    found = iter(torch.autograd.grad(result, wanted, grad.to(result.dtype), **options))
    return tuple(None if x is None else next(found) for x in given)


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
