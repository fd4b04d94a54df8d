"""A token through all blocks of a model of gated slot attention, in one call: arguments have been checked."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, Structure, c_double, c_float, c_int, c_int32, c_int64, c_void_p
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from gsa.errors import GSAError
from gsa.ops.native.kernels import READOUT_CODES, tensor_fields
from gsa.ops.native.library import library
from gsa.ops.native.linear import ACTIVATIONS, Matrix
from gsa.ops.weights import PackedWeight

FUNCTIONS = {"none": 0, "swish": 1, "relu": 2, "relu2": 3, "sigmoid": 4}
"""Activations that are compiled."""
NORMS = {"none": 0, "full": 1, "heads": 2}
_CODES = {
    "readout": READOUT_CODES,
    "feature_map": FUNCTIONS,
    "value_activation": FUNCTIONS,
    "output_activation": FUNCTIONS,
    "output_norm_kind": NORMS,
}


class Block(Structure):
    """GsaBlock of csrc/native.h. What it points to must outlive it."""

    _fields_ = [
        *tensor_fields(Matrix, "q k v f g o gate up down"),
        *tensor_fields(c_void_p, "mixer_norm output_norm mlp_norm keys values"),
        *tensor_fields(c_double, "scale temperature"),
        *tensor_fields(c_float, "mixer_epsilon output_epsilon mlp_epsilon"),
        *tensor_fields(c_int32, "heads queries key_width value_width slots"),
        *tensor_fields(c_int32, " ".join(_CODES)),
    ]


class _Decoder(Structure):
    _fields_ = [
        *tensor_fields(c_int64, "width number"),
        ("blocks", POINTER(Block)),
        *tensor_fields(Matrix, "embeddings head"),
        ("norm", c_void_p),
        ("epsilon", c_float),
        ("activations", c_int32),
    ]


@lru_cache(None)
def _compiled() -> ctypes.CDLL:
    lib = library()
    lib.gsa_decode.argtypes = [POINTER(_Decoder), c_void_p, c_void_p, c_int, c_int, c_void_p, c_int]
    lib.gsa_products.argtypes = [c_void_p, c_int64, c_void_p, c_int, c_void_p, c_int]
    sizes = (c_int64 * 2)()
    lib.gsa_decoder_sizes(sizes)
    expected = [ctypes.sizeof(x) for x in (Block, _Decoder)]
    assert list(sizes) == expected, f"csrc/native.h has structures of {list(sizes)} bytes, these are of {expected}"
    return lib


def _empty(*shape: int) -> Tensor:
    """Room for results, whatever torch's defaults are."""
    return torch.empty(shape, dtype=torch.float32, device="cpu")


def _argument(name: str, value: Any) -> Any:
    if isinstance(value, PackedWeight):
        return value.matrix()
    if isinstance(value, Tensor):
        assert value.is_cpu
        assert value.dtype == torch.float32
        assert value.is_contiguous()
        return value.data_ptr()
    return _CODES[name][value] if name in _CODES else value


def block(**fields: PackedWeight | Tensor | float | str) -> Block:
    """A block, from weights, tensors, numbers and names by field; what is not given is not there."""
    return Block(**{name: _argument(name, value) for name, value in fields.items()})


class Decoder:
    """The blocks of a model between its embedding and its head. `alive` is kept while this is."""

    def __init__(
        self,
        blocks: Sequence[Block],
        embeddings: PackedWeight,
        head: PackedWeight,
        norm: Tensor,
        epsilon: float,
        activations: str,
        alive: object,
    ):
        self.vocabulary = head.N
        self._alive = (alive, embeddings, head, norm)
        self._blocks = (Block * len(blocks))(*blocks)
        self._struct = _Decoder(
            embeddings.K,
            len(blocks),
            self._blocks,
            embeddings.matrix(),
            head.matrix(),
            norm.data_ptr(),
            epsilon,
            ACTIVATIONS[activations],
        )
        self._run, self._address = _compiled().gsa_decode, ctypes.byref(self._struct)

    def step(self, ids: Sequence[int], places: Sequence[int], first: int = 0) -> Tensor:
        """Reads token ids[i] for the sequence at places[i]; those of one sequence stand together, in their order.

        Logits [n, vocabulary] after the tokens from `first` on.
        """
        count = len(ids)
        numbers = c_int64 * count
        logits = _empty(count - first, self.vocabulary)
        address, threads = logits.data_ptr(), torch.get_num_threads()
        if self._run(self._address, numbers(*ids), numbers(*places), count, first, address, threads):
            raise GSAError("decode: no memory for the activations")
        return logits


class Products:
    """All products of some weights with one vector each, in one call: what the kernels alone take for them."""

    def __init__(self, weights: Sequence[PackedWeight], activations: str):
        self._weights = list(weights)
        self._matrices = (c_void_p * len(weights))(*(weight.matrix().address for weight in weights))
        self._x = _empty(max(weight.K for weight in weights)).normal_()
        self._y = _empty(max(weight.N for weight in weights))
        self._activations = ACTIVATIONS[activations]

    def __call__(self) -> None:
        arguments = self._matrices, len(self._weights), self._x.data_ptr(), self._activations, self._y.data_ptr()
        if _compiled().gsa_products(*arguments, torch.get_num_threads()):
            raise GSAError("products: no memory for the activations")
