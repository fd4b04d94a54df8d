"""Matrix-vector products for decoding: y = W x for a few columns, W in fp32, bf16, int8 or int4.

Letters: N rows, K columns of W; "columns" of activations are the rows of x, one per token or sequence.
"""

from __future__ import annotations

from torch import Tensor

from gsa.errors import GSAError
from gsa.ops.calls import MatvecCall
from gsa.ops.memory import readable
from gsa.ops.native.structs import MAX_COLUMNS
from gsa.ops.portable_matvec import quantise_activations
from gsa.ops.product_checks import Norm, check_like, check_out, count_columns
from gsa.ops.registry import find
from gsa.ops.weights import DENSE, PackedWeight, pack

__all__ = ["MAX_COLUMNS", "PackedWeight", "matvec", "pack", "quantise_activations"]


def matvec(
    weight: PackedWeight,
    x: Tensor,
    *,
    activations: str = "fp32",
    norm: Norm | None = None,
    swiglu: bool = False,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """y [..., N] = W x for x [..., K] in fp32, of 1 to 16 columns in all. There is no gradient.

    Args:
        weight: W, from `pack`.
        x: Activations; [..., 2 K] with `swiglu`.
        activations: "fp32", or "int8", for int8 and int4 weights: values become integers with a scale for each 32, or
            up to 128 if the weights have such groups, which is faster and less exact (an error of 0.5 to 0.7% more).
        norm: The weight [K] and the epsilon of an RMSNorm that x goes through first.
        swiglu: x is a gate and a value side by side; what is multiplied is silu(gate) * value.
        residual: [..., N], added to the result.
        out: Where the result goes; it may be the residual. New memory by default.
        backend: An engine by name, or "auto": what `use_backend` says, or else the native engine where it can run and
            torch elsewhere. The engine "triton" has no such products.

    >>> y = matvec(pack(torch.randn(10, 40), "int4"), torch.randn(40), activations="int8")
    """
    count = count_columns("matvec", weight, x, norm, swiglu)
    if not 1 <= count <= MAX_COLUMNS:
        raise GSAError(f"matvec: x has {count} columns, expected 1 to {MAX_COLUMNS}")
    if activations != "fp32":
        _check_activations(weight, activations)
    shape = (*x.shape[:-1], weight.N)
    x = readable("matvec: x", x)
    if norm is not None:
        norm = (readable("matvec: the weight of norm", norm[0]), norm[1])
    if residual is not None:
        check_like("matvec", "residual", residual, shape, x)
        residual = readable("matvec: residual", residual)
    if out is not None:
        read = {**weight.parts(), "the weight of norm": None if norm is None else norm[0]}
        check_out("matvec", out, shape, x, read, residual)
    call = MatvecCall(weight, x, count, activations, norm, swiglu, residual, out)
    y: Tensor = find("matvec", backend, x.device)(call)
    return y


def _check_activations(weight: PackedWeight, activations: str) -> None:
    if activations != "int8":
        raise GSAError(f"matvec: unknown activations {activations!r}; expected 'fp32' or 'int8'")
    if weight.format in DENSE:
        raise GSAError(f"matvec: int8 activations need a weight in int8 or int4, got {weight.format}")
