"""A token through all blocks of a model, in one call: arguments have been checked."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, c_int, c_int64, c_void_p
from functools import lru_cache

import torch
from torch import Tensor

from gsa.ops.memory import address
from gsa.ops.native import results
from gsa.ops.native.library import check_memory, library
from gsa.ops.native.structs import ACTIVATION_CODES, GsaBlock, GsaDecoder
from gsa.ops.weights import PackedWeight


@lru_cache(None)
def _compiled() -> ctypes.CDLL:
    lib = library()
    lib.gsa_decode.argtypes = [POINTER(GsaDecoder), c_void_p, c_void_p, c_int, c_int, c_void_p, c_int]
    lib.gsa_products.argtypes = [c_void_p, c_int64, c_void_p, c_int, c_void_p, c_int]
    return lib


def _empty(*shape: int) -> Tensor:
    """Room for results, whatever torch's defaults are."""
    return torch.empty(shape, dtype=torch.float32, device="cpu")


def address_of_floats(name: str, x: Tensor) -> int:
    """Where the numbers of a weight or state begin."""
    assert x.dtype == torch.float32
    assert x.is_contiguous()
    return address(name, x)


class Decoder:
    """The blocks of a model between its embedding and its head. `alive` is kept while this is."""

    def __init__(
        self,
        blocks: Sequence[GsaBlock],
        embeddings: PackedWeight,
        head: PackedWeight,
        norm: Tensor,
        epsilon: float,
        activations: str,
        alive: object,
    ):
        self.vocabulary = head.N
        self._alive = (alive, embeddings, head, norm)
        self._blocks = (GsaBlock * len(blocks))(*blocks)
        self._struct = GsaDecoder(
            embeddings.K,
            len(blocks),
            self._blocks,
            embeddings.matrix(),
            head.matrix(),
            address_of_floats("norm", norm),
            epsilon,
            ACTIVATION_CODES[activations],
        )
        self._run, self._address = _compiled().gsa_decode, ctypes.byref(self._struct)

    def step(self, ids: Sequence[int], state_of: Sequence[int], first: int = 0) -> Tensor:
        """Reads token ids[i] into state number state_of[i]; those of one sequence stand together, in their order.

        Logits [n, vocabulary] after the tokens from `first` on.
        """
        count = len(ids)
        numbers = c_int64 * count
        logits = results.empty((count - first, self.vocabulary), torch.float32)
        room, threads = address("logits", logits), torch.get_num_threads()
        code = self._run(self._address, numbers(*ids), numbers(*state_of), count, first, room, threads)
        check_memory(code, "decode")
        return logits


class Products:
    """All products of some weights with one vector each, in one call: what the kernels alone take for them."""

    def __init__(self, weights: Sequence[PackedWeight], activations: str):
        self._weights = list(weights)
        self._matrices = (c_void_p * len(weights))(*(weight.matrix().address for weight in weights))
        self._x = _empty(max(weight.K for weight in weights)).normal_()
        self._y = _empty(max(weight.N for weight in weights))
        self._activations = ACTIVATION_CODES[activations]

    def __call__(self) -> None:
        x, y = address("x", self._x), address("y", self._y)
        arguments = self._matrices, len(self._weights), x, self._activations, y, torch.get_num_threads()
        check_memory(_compiled().gsa_products(*arguments), "products")
