"""Functions of rows by the compiled kernels: norms, gates and cross-entropy, each in one pass over memory.

Shape letters: W width of a row; V vocabulary.
"""

from __future__ import annotations

from ctypes import POINTER, c_int
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from gsa.errors import GSAError
from gsa.ops.memory import address, require_memory
from gsa.ops.native import library
from gsa.ops.native.arguments import MAX_FEATURES, Arguments
from gsa.ops.native.library import declare
from gsa.ops.native.results import empty
from gsa.ops.native.structs import DTYPE_CODES, ROWS_CODES, GsaCrossEntropy, GsaRows, int32
from gsa.ops.operators import needs_operator
from gsa.ops.registry import chosen
from gsa.ops.state import compute_dtype
from gsa.ops.transforms import in_forward_mode


def usable(*tensors: Tensor | None) -> bool:
    """Whether the compiled functions can take these tensors here: on a CPU, and with nothing that has to see torch's
    own operations, such as a compiler or torch.func."""
    return (
        not torch.compiler.is_compiling()
        and library.unavailable(None) is None
        and chosen() in ("auto", "native")
        and all(x is None or _fits(x) for x in tensors)
        and not needs_operator(*tensors)
        and not in_forward_mode()
    )


def _fits(x: Tensor) -> bool:
    return x.is_cpu and x.dtype in DTYPE_CODES and x.dim() > 0 and x.shape[-1] <= MAX_FEATURES


def forward(
    function: str,
    x: Tensor,
    y: Tensor | None = None,
    z: Tensor | None = None,
    *,
    weight: Tensor | None = None,
    epsilon: float = 0.0,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """A function of rows (`ROWS_CODES`, told in csrc/native.h) of x, y and z [..., W], in the dtype of x or another."""
    out = empty(tuple(x.shape), x.dtype if dtype is None else dtype)
    _run(function, {"x": x, "y": y, "z": z, "out": out}, weight, None, epsilon, backward=False)
    return out


def backward(
    function: str,
    grad: Tensor,
    x: Tensor,
    y: Tensor | None = None,
    z: Tensor | None = None,
    *,
    weight: Tensor | None = None,
    epsilon: float = 0.0,
) -> tuple[Tensor | None, ...]:
    """The gradients of x, y, z and weight from that of the result."""
    found = {
        f"d{name}": None if t is None else empty(tuple(t.shape), t.dtype)
        for name, t in zip("xyz", (x, y, z), strict=True)
    }
    dweight = None if weight is None else empty(tuple(weight.shape), compute_dtype(x.dtype))
    _run(function, {"x": x, "y": y, "z": z, "d_out": grad, **found}, weight, dweight, epsilon, backward=True)
    return *found.values(), None if weight is None or dweight is None else dweight.to(weight.dtype)


def _run(
    function: str,
    tensors: dict[str, Tensor | None],
    weight: Tensor | None,
    dweight: Tensor | None,
    epsilon: float,
    backward: bool,
) -> None:
    x = tensors["x"]
    assert x is not None
    width, wide = x.shape[-1], x.dtype == torch.float64
    if any(t is not None and t.shape != x.shape for t in tensors.values()) or (
        weight is not None and tuple(weight.shape) != (width,)
    ):
        shapes = {name: list(t.shape) for name, t in {**tensors, "weight": weight}.items() if t is not None}
        raise GSAError(f"{function}: shapes do not fit: {shapes}")
    require_memory(tensors)
    if x.numel() == 0:
        if dweight is not None:
            dweight.zero_()
        return
    arguments = Arguments(
        GsaRows(
            rows=x.numel() // width,
            function=ROWS_CODES[function],
            width=int32("numbers of a row", width),
            threads=torch.get_num_threads(),
            wide=wide,
            epsilon=epsilon,
        )
    )
    arguments.tensors(**{name: None if t is None else _as_rows(t) for name, t in tensors.items()})
    arguments.states(compute_dtype(x.dtype), weight=weight)
    if dweight is not None:
        arguments.results(dweight=dweight)
    arguments.run(_compiled("gsa_rows"), int(backward))


def cross_entropy(logits: Tensor, labels: Tensor, *, gradient: bool) -> Tensor:
    """The losses [rows] of logits [rows, V] against labels [rows], in fp32 at least; negative labels do not count.

    With `gradient`, the logits are overwritten with the gradient of the sum of all losses.
    """
    losses = empty((logits.shape[0],), compute_dtype(logits.dtype))
    if logits.numel() == 0:
        return losses.zero_()
    if labels.dtype != torch.int64 or len(labels) != len(logits) or int(labels.max()) >= logits.shape[1]:
        raise GSAError(
            f"cross_entropy: expected {len(logits)} labels in int64 below {logits.shape[1]} (V), "
            f"got {len(labels)} in {labels.dtype} up to {int(labels.max())}"
        )
    labels = labels.contiguous()
    arguments = Arguments(
        GsaCrossEntropy(
            rows=logits.shape[0],
            threads=torch.get_num_threads(),
            wide=logits.dtype == torch.float64,
            gradient=gradient,
            labels=address("labels", labels),
        )
    )
    arguments.alive.append(labels)
    assert logits.is_contiguous()  # it is written to, so that a copy would not do
    arguments.tensors(logits=_as_rows(logits))
    arguments.results(losses=losses)
    arguments.run(_compiled("gsa_cross_entropy"))
    return losses


def _as_rows(x: Tensor) -> Tensor:
    """x [..., W] as [1, rows, 1, W]; a copy if its rows do not lie at one distance."""
    return x.reshape(1, -1, 1, x.shape[-1])


@lru_cache(None)
def _compiled(name: str) -> Any:
    return declare(name, POINTER(GsaRows), c_int) if name == "gsa_rows" else declare(name, POINTER(GsaCrossEntropy))
