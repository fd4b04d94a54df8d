"""Short causal convolutions by the compiled kernels.

Shape letters: B batch, T time, C channels, N sequences, K taps.
"""

from __future__ import annotations

from ctypes import POINTER, c_int
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from gsa.errors import GSAError
from gsa.ops.memory import require_memory
from gsa.ops.native.arguments import Arguments
from gsa.ops.native.library import declare
from gsa.ops.native.results import empty
from gsa.ops.native.structs import FUNCTION_CODES, GsaConvolution, int32
from gsa.ops.state import compute_dtype


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, past: Tensor | None, cu_seqlens: Tensor | None, function: str
) -> Tensor:
    """y [B, T, C] = f(bias + sum of the last K tokens, each times its weight), in the dtype of x.

    x [B, T, C], weight [C, 1, K], bias [C], past [N, K-1, C] or None for zeros; `function` is none or swish.
    """
    y = empty(tuple(x.shape), x.dtype)
    arguments = _arguments(x, weight, bias, past, cu_seqlens, function, y=y)
    arguments.run(_compiled(), 0)
    return y


def backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    past: Tensor | None,
    cu_seqlens: Tensor | None,
    function: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of x, weight, bias and past from that of y; that of bias whether there is one or not."""
    dtype, (C, _, K) = compute_dtype(x.dtype), weight.shape
    dx, dweight, dbias = empty(tuple(x.shape), x.dtype), empty((K, C), dtype), empty((C,), dtype)
    arguments = _arguments(x, weight, bias, past, cu_seqlens, function, d_y=grad, dx=dx)
    N = arguments.struct.shape.sequences
    dpast = torch.zeros(N, K - 1, C, dtype=dtype, device="cpu")  # zeros, as a sequence may have no tokens
    arguments.results(dweight=dweight, dbias=dbias, dpast=dpast)
    arguments.run(_compiled(), 1)
    return (
        dx,
        dweight.T.unsqueeze(1).to(weight.dtype),
        dbias if bias is None else dbias.to(bias.dtype),
        None if past is None else dpast.to(past.dtype),
    )


def _arguments(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    past: Tensor | None,
    cu_seqlens: Tensor | None,
    function: str,
    **tensors: Tensor,
) -> Arguments:
    dtype = compute_dtype(x.dtype)
    arguments = Arguments(GsaConvolution(taps=int32("taps", weight.shape[2]), function=FUNCTION_CODES[function]))
    require_memory({"x": x, **tensors})
    arguments.tensors(**{name: t.unsqueeze(2) for name, t in {"x": x, **tensors}.items()})
    arguments.states(dtype, weight=weight[:, 0].T, bias=bias, past=past)
    arguments.shape(x.unsqueeze(2), 1, cu_seqlens)
    _check_shapes(arguments.struct.shape.sequences, x, weight, bias, past)
    return arguments


def _check_shapes(N: int, x: Tensor, weight: Tensor, bias: Tensor | None, past: Tensor | None) -> None:
    C, K = x.shape[-1], weight.shape[2]
    expected = {"weight": (weight, (C, 1, K)), "bias": (bias, (C,)), "past": (past, (N, K - 1, C))}
    for name, (tensor, shape) in expected.items():
        if tensor is not None and tuple(tensor.shape) != shape:
            raise GSAError(f"convolution: {name} has the shape {list(tensor.shape)}, expected {list(shape)}")


@lru_cache(None)
def _compiled() -> Any:
    return declare("gsa_convolution", POINTER(GsaConvolution), c_int)
