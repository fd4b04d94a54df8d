"""Matrix-vector products in the native engine: arguments have been checked, pointers are passed."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gsa.errors import GSAError
from gsa.ops.native.library import library

if TYPE_CHECKING:
    from gsa.ops.weights import PackedWeight

_FORMAT = {"fp32": 0, "bf16": 1, "int8": 2, "int4": 3}
ACTIVATIONS = {"fp32": 0, "int8": 1, "int8-portable": 2}
"""The last computes what int8 does, as on a machine without the instruction for it; for tests."""
PLAIN, RMS_NORM, SWIGLU = 0, 1, 2


class Matrix(ctypes.Structure):
    """GsaMatrix of csrc/native.h. The tensors it points to must outlive it."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("format", "N", "K", "group")),
        *((name, ctypes.c_void_p) for name in ("weight", "scale", "zero")),
    ]

    def __init__(self, weight: PackedWeight, addresses: tuple[int, ...]) -> None:
        super().__init__(_FORMAT[weight.format], weight.N, weight.K, weight.group or 0, *addresses)
        self.addresses, self.address = addresses, ctypes.addressof(self)


@lru_cache(None)
def _functions() -> tuple[Any, Any, Any]:
    matvec, read, unpack = library().gsa_matvec, library().gsa_read, library().gsa_unpack
    integer, pointer, size = ctypes.c_int, ctypes.c_void_p, ctypes.c_int64
    matvec.argtypes = [pointer, integer, pointer, pointer, ctypes.c_float, integer, integer, pointer, pointer, integer]
    read.argtypes, read.restype = [pointer, pointer, size, integer], ctypes.c_uint64
    unpack.argtypes, unpack.restype = [pointer, pointer, integer], None
    return matvec, read, unpack


def matvec(
    weight: PackedWeight,
    x: Tensor,
    count: int,
    activations: str,
    norm: tuple[Tensor, float] | None,
    swiglu: bool,
    residual: Tensor | None,
    out: Tensor,
) -> None:
    kind, norm_weight, epsilon = SWIGLU if swiglu else PLAIN, None, 0.0
    if norm is not None:
        kind, norm_weight, epsilon = RMS_NORM, norm[0].data_ptr(), norm[1]
    failed = _functions()[0](
        weight.matrix().address,
        kind,
        x.data_ptr(),
        norm_weight,
        epsilon,
        count,
        ACTIVATIONS[activations],
        None if residual is None else residual.data_ptr(),
        out.data_ptr(),
        torch.get_num_threads(),
    )
    if failed:
        raise GSAError("matvec: no memory for the activations")


def unpack(weight: PackedWeight, out: Tensor) -> None:
    """Fills out [N, K], fp32 and contiguous, with the weights."""
    _functions()[2](weight.matrix().address, out.data_ptr(), torch.get_num_threads())


class Reader:
    """Reads all bytes of some tensors and does nothing else: what the memory allows."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = [x.contiguous() for x in tensors]  # kept alive
        self.nbytes = sum(x.nbytes for x in self.tensors)
        n = len(self.tensors)
        self._parts = (ctypes.c_void_p * n)(*(x.data_ptr() for x in self.tensors))
        self._bytes = (ctypes.c_int64 * n)(*(x.nbytes for x in self.tensors))

    def __call__(self) -> int:
        """The exclusive or of all their words of 8 bytes."""
        return int(_functions()[1](self._parts, self._bytes, len(self.tensors), torch.get_num_threads()))
