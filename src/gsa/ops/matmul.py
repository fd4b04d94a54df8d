"""Matrix products over many tokens, in bf16 or int8 where the processor has units for that: what prompts are read with.

Letters: N rows, K columns of W; "columns" of activations are the rows of x, one per token.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from gsa.errors import GSAError
from gsa.ops.memory import readable
from gsa.ops.native import library
from gsa.ops.native import matmul as native
from gsa.ops.native.structs import COMPUTE_CODES
from gsa.ops.product_checks import Norm, check_like, check_out, count_columns
from gsa.ops.weights import DENSE, PackedWeight

UNITS = {"bf16": "AVX-512 BF16", "int8": "AVX-512 VNNI"}
"""What products in each kind of numbers need of the processor."""


def missing_unit(compute: str) -> str | None:
    """Why products in "bf16" or "int8" cannot be computed by a unit for them here, as a clause; None if they can."""
    reason = library.unavailable(None)
    if reason is not None:
        return f"the native engine cannot run here: {reason}"
    if native.has_unit(compute):
        return None
    if library.isa() != library.isas()[0]:
        return f"the instruction set in use, {library.isa()}, has no {UNITS[compute]}"
    return f"this CPU has no {UNITS[compute]}"


def matmul(
    weights: PackedWeight | Sequence[PackedWeight],
    x: Tensor,
    *,
    compute: str = "bf16",
    norm: Norm | None = None,
    swiglu: bool = False,
    residual: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """y [..., N] = W x for x [..., K] in fp32, of any number of columns from 1 on. There is no gradient.

    The native engine computes it. A column's result does not depend on the others, nor on the number of threads.

    Args:
        weights: W, from `pack`; or several with the same K, which x meets one after the other: N is then all of
            their rows.
        x: Activations; [..., 2 K] with `swiglu`.
        compute: "bf16": x and W are rounded to bf16 and their products added up in fp32. "int8", for int8 and int4
            weights of one group size: x becomes integers, as in `matvec`. Both need the processor's unit for that; with
            "-portable" behind the name they do not, which is slow and gives the same bits.
        norm: The weight [K] and the epsilon of an RMSNorm that x goes through first.
        swiglu: x is a gate and a value side by side; what is multiplied is silu(gate) * value.
        residual: [..., N], added to the result.
        out: Where the result goes; it may be the residual. New memory by default.

    >>> weight = gsa.ops.linear.pack(torch.randn(10, 40), "int4")
    >>> matmul(weight, torch.randn(100, 40), compute="int8-portable").shape
    torch.Size([100, 10])
    """
    several = [weights] if isinstance(weights, PackedWeight) else list(weights)
    if not several:
        raise GSAError("matmul: expected at least one weight, got none")
    count = count_columns("matmul", several[0], x, norm, swiglu)
    if count < 1:
        raise GSAError("matmul: x has no columns, expected at least 1")
    _check_weights(several)
    _check_compute(several, compute)
    shape = (*x.shape[:-1], sum(weight.N for weight in several))
    x = readable("matmul: x", x)
    if norm is not None:
        norm = (readable("matmul: the weight of norm", norm[0]), norm[1])
    if residual is not None:
        check_like("matmul", "residual", residual, shape, x)
        residual = readable("matmul: residual", residual)
    if out is not None:
        read = {f"weight {i}'s {name}": part for i, w in enumerate(several) for name, part in w.parts().items()}
        check_out("matmul", out, shape, x, {**read, "the weight of norm": None if norm is None else norm[0]}, residual)
    y = x.new_empty(shape) if out is None else out
    native.matmul(several, x, count, compute, norm, swiglu, residual, y)
    return y


def _check_weights(weights: list[PackedWeight]) -> None:
    first = weights[0]
    for weight in weights:
        if not isinstance(weight, PackedWeight):
            raise GSAError(f"matmul: weights must come from pack, got {type(weight).__name__}")
        if weight.K != first.K:
            raise GSAError(f"matmul: weights must have the same K, got {first.K} and {weight.K}")


def _check_compute(weights: list[PackedWeight], compute: str) -> None:
    if compute not in COMPUTE_CODES:
        raise GSAError(f"matmul: unknown compute {compute!r}; expected one of {', '.join(map(repr, COMPUTE_CODES))}")
    if compute in UNITS:
        missing = missing_unit(compute)
        if missing is not None:
            raise GSAError(f"matmul: products in {compute}: {missing}")
    if compute.startswith("int8"):
        for weight in weights:
            if weight.format in DENSE:
                raise GSAError(f"matmul: products in int8 need weights in int8 or int4, got {weight.format}")
            if weight.group != weights[0].group:
                raise GSAError("matmul: products in int8 need weights with groups of one size")
