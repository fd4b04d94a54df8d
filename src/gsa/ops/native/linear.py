"""Matrix-vector products in the native engine: arguments have been checked, pointers are passed."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gsa.ops.calls import MatvecCall
from gsa.ops.memory import address
from gsa.ops.native.library import check_memory, library
from gsa.ops.native.structs import ACTIVATION_CODES, INPUT_CODES, WEIGHT_CODES, GsaMatrix

if TYPE_CHECKING:
    from gsa.ops.weights import PackedWeight


class Matrix(GsaMatrix):
    """A packed weight as C++ reads it. The tensors it points to must outlive it."""

    def __init__(self, weight: PackedWeight, addresses: tuple[int, ...]) -> None:
        super().__init__(WEIGHT_CODES[weight.format], weight.N, weight.K, weight.group or 0, *addresses)
        self.addresses, self.address = addresses, ctypes.addressof(self)


@lru_cache(None)
def _functions() -> tuple[Any, Any, Any]:
    matvec, read, unpack = library().gsa_matvec, library().gsa_read, library().gsa_unpack
    integer, pointer, size = ctypes.c_int, ctypes.c_void_p, ctypes.c_int64
    matvec.argtypes = [pointer, integer, pointer, pointer, ctypes.c_float, integer, integer, pointer, pointer, integer]
    read.argtypes, read.restype = [pointer, pointer, size, integer], ctypes.c_uint64
    unpack.argtypes, unpack.restype = [pointer, pointer, integer], None
    return matvec, read, unpack


def matvec(call: MatvecCall) -> Tensor:
    """y [..., N] = W x, and whatever goes with it; in `out` if the call has one."""
    weight, x, count, activations, norm, swiglu, residual, out = call
    y = x.new_empty((*x.shape[:-1], weight.N)) if out is None else out
    kind, norm_weight, epsilon = "swiglu" if swiglu else "plain", None, 0.0
    if norm is not None:
        kind, norm_weight, epsilon = "rms_norm", address("matvec: the weight of norm", norm[0]), norm[1]
    matrix = weight.matrix()  # held until the call is over: another thread may replace the weight's own
    code = _functions()[0](
        matrix.address,
        INPUT_CODES[kind],
        address("matvec: x", x),
        norm_weight,
        epsilon,
        count,
        ACTIVATION_CODES[activations],
        None if residual is None else address("matvec: residual", residual),
        address("matvec: out", y),
        torch.get_num_threads(),
    )
    check_memory(code, "matvec")
    return y


def unpack(weight: PackedWeight, out: Tensor) -> None:
    """Fills out [N, K], fp32 and contiguous, with the weights."""
    matrix = weight.matrix()  # held until the call is over, as above
    _functions()[2](matrix.address, address("unpack: out", out), torch.get_num_threads())


class Reader:
    """Reads all bytes of some tensors and does nothing else: what the memory allows."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = [x.contiguous() for x in tensors]  # kept alive
        self.nbytes = sum(x.nbytes for x in self.tensors)
        n = len(self.tensors)
        self._parts = (ctypes.c_void_p * n)(*(address("a tensor", x) for x in self.tensors))
        self._bytes = (ctypes.c_int64 * n)(*(x.nbytes for x in self.tensors))

    def __call__(self) -> int:
        """The exclusive or of all their words of 8 bytes."""
        return int(_functions()[1](self._parts, self._bytes, len(self.tensors), torch.get_num_threads()))
