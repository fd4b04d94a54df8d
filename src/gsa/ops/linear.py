"""Matrix-vector products for decoding: y = W x for a few columns, W in fp32, bf16, int8 or int4.

Letters: N rows, K columns of W; "columns" of activations are the rows of x, one per token or sequence.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gsa.errors import GSAError, raised_by
from gsa.ops.calls import MatvecCall
from gsa.ops.memory import readable, refuse_shared, same_place
from gsa.ops.native.structs import MAX_COLUMNS
from gsa.ops.portable_matvec import quantise_activations
from gsa.ops.registry import find
from gsa.ops.transforms import recorded
from gsa.ops.weights import DENSE, PackedWeight, pack

__all__ = ["MAX_COLUMNS", "PackedWeight", "matvec", "pack", "quantise_activations"]


def matvec(
    weight: PackedWeight,
    x: Tensor,
    *,
    activations: str = "fp32",
    norm: tuple[Tensor, float] | None = None,
    swiglu: bool = False,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """y [..., N] = W x for x [..., K] in fp32, of 1 to 16 columns in all. There is no gradient.

    Args:
        weight: W, from `pack`.
        x: Activations; [..., 2 K] with `swiglu`.
        activations: "fp32", or "int8", for int8 and int4 weights: each 32 values become integers with a common scale,
            which is faster and less exact (a relative error of 0.5% more).
        norm: The weight [K] and the epsilon of an RMSNorm that x goes through first.
        swiglu: x is a gate and a value side by side; what is multiplied is silu(gate) * value.
        residual: [..., N], added to the result.
        out: Where the result goes; it may be the residual. New memory by default.
        backend: An engine by name, or "auto": what `use_backend` says, or else the native engine where it can run and
            torch elsewhere. The engine "triton" has no such products.

    >>> y = matvec(pack(torch.randn(10, 40), "int4"), torch.randn(40), activations="int8")
    """
    count = _check_input(weight, x, activations, norm, swiglu)
    shape = (*x.shape[:-1], weight.N)
    x = readable("matvec: x", x)
    if norm is not None:
        norm = (readable("matvec: the weight of norm", norm[0]), norm[1])
    if residual is not None:
        _check_like("residual", residual, shape, x)
        residual = readable("matvec: residual", residual)
    if out is not None:
        _check_out(out, shape, x, weight, norm, residual)
    call = MatvecCall(weight, x, count, activations, norm, swiglu, residual, out)
    y: Tensor = find("matvec", backend, x.device)(call)
    return y


def _check_input(
    weight: PackedWeight, x: Tensor, activations: str, norm: tuple[Tensor, float] | None, swiglu: bool
) -> int:
    """The number of columns."""
    if not isinstance(weight, PackedWeight):
        raise GSAError(f"matvec: weight must come from pack, got {type(weight).__name__}")
    if not isinstance(x, Tensor) or x.layout != torch.strided:
        raise GSAError(
            f"matvec: x must be a dense tensor, got {x.layout if isinstance(x, Tensor) else type(x).__name__}"
        )
    if x.dtype != torch.float32:
        raise GSAError(f"matvec: x is {x.dtype}, expected torch.float32")
    width = 2 * weight.K if swiglu else weight.K
    if x.dim() == 0 or x.shape[-1] != width:
        raise GSAError(f"matvec: x has the shape {list(x.shape)}, expected [..., {width}]")
    count = x.numel() // width
    if not 1 <= count <= MAX_COLUMNS:
        raise GSAError(f"matvec: x has {count} columns, expected 1 to {MAX_COLUMNS}")
    if x.device != weight.weight.device:
        raise GSAError(f"matvec: x is on {x.device}, the weight is on {weight.weight.device}")
    if x.requires_grad and torch.is_grad_enabled():
        raise GSAError("matvec: x requires a gradient, and there is none; use torch.no_grad() or x.detach()")
    if activations != "fp32":
        _check_activations(weight, activations)
    if norm is not None:
        _check_norm(weight, x, norm, swiglu)
    return count


def _check_activations(weight: PackedWeight, activations: str) -> None:
    if activations != "int8":
        raise GSAError(f"matvec: unknown activations {activations!r}; expected 'fp32' or 'int8'")
    if weight.format in DENSE:
        raise GSAError(f"matvec: int8 activations need a weight in int8 or int4, got {weight.format}")


def _check_norm(weight: PackedWeight, x: Tensor, norm: tuple[Tensor, float], swiglu: bool) -> None:
    if swiglu:
        raise GSAError("matvec: norm and swiglu cannot both come before the product")
    if not isinstance(norm, tuple) or len(norm) != 2 or not isinstance(norm[1], float) or not norm[1] >= 0:
        raise GSAError("matvec: norm must be a tuple of a weight and an epsilon, a float of at least 0")
    _check_like("the weight of norm", norm[0], (weight.K,), x)
    if not norm[0].is_contiguous():
        raise GSAError("matvec: the weight of norm must be contiguous")


def _check_like(name: str, tensor: Tensor, shape: tuple[int, ...], x: Tensor) -> None:
    if not isinstance(tensor, Tensor) or tensor.layout != torch.strided:
        raise GSAError(f"matvec: {name} must be a dense tensor")
    if tensor.dtype != torch.float32 or tensor.shape != shape or tensor.device != x.device:
        got = f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}"
        raise GSAError(f"matvec: {name} is {got}, expected torch.float32 {list(shape)} on {x.device}")


def _check_out(
    out: Tensor,
    shape: tuple[int, ...],
    x: Tensor,
    weight: PackedWeight,
    norm: tuple[Tensor, float] | None,
    residual: Tensor | None,
) -> None:
    """`out` may be the residual; otherwise it shares no memory with what is read."""
    _check_like("out", out, shape, x)
    if not out.is_contiguous() or out.requires_grad:
        raise GSAError("matvec: out must be contiguous and require no gradient")
    read = {"x": x, "weight": weight.weight, "scale": weight.scale, "zero": weight.zero, "residual": residual}
    if residual is not None and same_place(residual, out):  # all of which may be overwritten
        del read["residual"]
    if norm is not None:
        read["the weight of norm"] = norm[0]
    if not recorded():
        with raised_by("matvec"):
            refuse_shared({"out": out}, read)
