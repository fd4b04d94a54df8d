"""Parts of a layer as the native engine takes them: products, what stands behind them, and what a state is kept in.

`csrc/native.h` says what the fields of the structures mean. Shape letters: N numbers, C channels of a convolution.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gsa.errors import GSAError
from gsa.infer.layers import InferenceEmbedding, InferenceLinear
from gsa.mixers.activations import ACTIVATIONS
from gsa.mixers.base import Mixer
from gsa.mixers.convolution import ShortConvolution
from gsa.mixers.norm import RMSNorm
from gsa.ops.memory import address
from gsa.ops.native.structs import (
    FUNCTION_CODES,
    GATE_CODES,
    MEMORY_BLOCK,
    GsaBlock,
    GsaProduct,
    int32,
)
from gsa.ops.weights import PackedWeight

PADDING = 16
NOWHERE = -1
_FUNCTIONS: dict[Callable[..., Any], str] = {function: name for name, function in ACTIVATIONS.items()}


def padded(width: int) -> int:
    """A width that is whole vectors on every machine."""
    return -(-width // PADDING) * PADDING


def packed_weight(layer: nn.Module) -> PackedWeight:
    """The weights of a layer for inference."""
    assert isinstance(layer, InferenceLinear | InferenceEmbedding)
    return layer.packed_weight


def function_code(function: str | Callable[..., Any]) -> int:
    """The code of an activation, by its name or by itself."""
    name = function if isinstance(function, str) else _FUNCTIONS.get(function, getattr(function, "__name__", "unknown"))
    if name not in FUNCTION_CODES:
        raise GSAError(f"its activation is {name}, which is not compiled")
    return FUNCTION_CODES[name]


@dataclass(frozen=True)
class Kept:
    """A tensor of a mixer's state, as it is kept for several sequences at once: [places, *shape]."""

    shape: tuple[int, ...]
    """Of one sequence, with widths padded."""
    views: Callable[[Tensor], list[Tensor]]
    """What is kept of a sequence, in pieces that together are the mixer's tensor: `pieces` of that has the same."""
    pieces: Callable[[Tensor], list[Tensor]]
    joined: Callable[[list[Tensor]], Tensor]
    """The mixer's tensor again, as a copy of its pieces."""
    bind: Callable[[GsaBlock, Any, int], None]
    """Writes where it begins to a block and its products."""
    dtype: torch.dtype = torch.float32

    @classmethod
    def plain(
        cls,
        shape: tuple[int, ...],
        view: Callable[[Tensor], Tensor],
        bind: Callable[[GsaBlock, Any, int], None],
        dtype: torch.dtype = torch.float32,
    ) -> Kept:
        """In one piece."""
        return cls(shape, lambda x: [view(x)], lambda x: [x], lambda parts: parts[0].clone(), bind, dtype)

    def put(self, kept: Tensor, x: Tensor) -> None:
        """Copies the mixer's tensor of a sequence to where it is kept."""
        for view, piece in zip(self.views(kept), self.pieces(x), strict=True):
            view.copy_(piece)

    def take(self, kept: Tensor) -> Tensor:
        """A copy of what is kept, as the mixer has it."""
        x = self.joined(self.views(kept)).contiguous()
        return x.float() if x.is_floating_point() else x


@dataclass(frozen=True)
class Cached:
    """Keys and values of the last tokens: names in the mixer's state, and how many."""

    keys: str
    values: str
    held: int | None
    """Tokens that a later one needs; None: all."""
    filled: bool
    """Whether the mixer always has so many, zeros where there was none yet."""


def blocks(x: Tensor, rows: int, width: int) -> list[Tensor]:
    """Memories [..., rows * padded width] as [..., rows, blocks, columns]: all whole blocks, and the rest if any."""
    whole = width // MEMORY_BLOCK * MEMORY_BLOCK
    full = x[..., : whole * rows].unflatten(-1, (whole // MEMORY_BLOCK, rows, MEMORY_BLOCK)).transpose(-3, -2)
    if whole == width:
        return [full]
    rest = x[..., whole * rows :].unflatten(-1, (rows, 1, padded(width) - whole))[..., : width - whole]
    return [full, rest]


def in_blocks(x: Tensor) -> list[Tensor]:
    """A matrix [..., rows, width] in the pieces that `blocks` has."""
    width = x.shape[-1]
    whole = width // MEMORY_BLOCK * MEMORY_BLOCK
    full = x[..., :whole].unflatten(-1, (whole // MEMORY_BLOCK, MEMORY_BLOCK))
    return [full] if whole == width else [full, x[..., None, whole:]]


def out_of_blocks(pieces: list[Tensor]) -> Tensor:
    """The matrix of such pieces, as a copy."""
    return torch.cat([piece.flatten(-2) for piece in pieces], -1)


class Parts:
    """A layer, put together part by part. Its structures point to tensors that are kept here."""

    def __init__(self) -> None:
        self.block, self._products = GsaBlock(), list[GsaProduct]()
        self.kept: dict[str, Kept] = {}
        self.cached: Cached | None = None
        self.block.output.gate = self.block.memory.decay = self.block.memory.write = NOWHERE
        self._alive: list[object] = []

    def products(self) -> Any:
        """All products so far, as an array of structures."""
        return (GsaProduct * len(self._products))(*self._products)

    def place(self, width: int) -> int:
        """Room for so many numbers among the features of a token."""
        place = self.block.features
        self.block.features += padded(width)
        return place

    def numbers(self, name: str, x: Tensor) -> int:
        """Where the numbers of a tensor begin, which is kept from now on."""
        assert x.dtype in (torch.float32, torch.float64, torch.bfloat16)
        assert x.is_contiguous()
        self._alive.append(x)
        return address(name, x)

    def rows(self, name: str, x: Tensor, dtype: torch.dtype = torch.float32) -> int:
        """The same for a copy whose last dimension is padded; what comes behind may be read and is not used."""
        wide = F.pad(x.detach().to(dtype), (0, padded(x.shape[-1]) - x.shape[-1]))
        return self.numbers(name, F.pad(wide.flatten(), (0, PADDING)))

    def matrix(self, name: str, x: Tensor) -> int:
        """The same for a matrix [n, width], in blocks as memories are."""
        n, width = x.shape
        copy = torch.zeros(n * padded(width), dtype=torch.float32, device="cpu")
        for view, piece in zip(blocks(copy, n, width), in_blocks(x.detach()), strict=True):
            view.copy_(piece)
        return self.numbers(name, copy)

    def product(
        self,
        layer: nn.Module,
        *,
        input: int = NOWHERE,
        function: str | Callable[..., Any] = "none",
        convolution: tuple[str, ShortConvolution] | None = None,
        convolution_function: str | Callable[..., Any] | None = None,
        gate: Mapping[str, Any] | None = None,
        bias: Tensor | None = None,
    ) -> int:
        """The place of W x + bias, of x at a place or the layer's own, behind convolution, function and gate.

        The convolution comes with the name of its state; its function is its own unless another is given, and the
        bias that of the layer.
        """
        weight = packed_weight(layer)
        product = GsaProduct(matrix=weight.matrix(), input=input, output=self.place(weight.N))
        self._alive.append(weight)
        bias = getattr(layer, "bias", None) if bias is None else bias.detach()
        if bias is not None:
            product.bias = self.numbers("bias", bias)
        product.function = function_code(function)
        if convolution is not None:
            self._convolve(product, *convolution, convolution_function)
        product.gate.write = NOWHERE
        if gate is not None:
            for name, value in gate.items():
                setattr(product.gate, name, value)
        self._products.append(product)
        return int(product.output)

    def _convolve(
        self, product: GsaProduct, name: str, layer: ShortConvolution, function: str | Callable[..., Any] | None
    ) -> None:
        number, C, conv = len(self._products), layer.channels, product.convolution
        conv.channels, conv.size = C, int32("tokens of a convolution", layer.size)
        conv.function = function_code(layer.activation if function is None else function)
        conv.weight = self.rows(f"{name}.weight", layer.weight[:, 0].t())
        if layer.bias is not None:
            conv.bias = self.rows(f"{name}.bias", layer.bias)

        def bind(block: GsaBlock, products: Any, where: int) -> None:
            products[number].convolution.past = where

        self.kept[name] = Kept.plain((layer.size - 1, padded(C)), lambda x: x[..., :C], bind)

    def forget_gate(
        self, width: int, temperature: float, *, write: bool, bounds: Tensor | None = None
    ) -> dict[str, Any]:
        """A gate of logits [N] in the place of which decays come; 1 - decay has a place of its own if it is wanted."""
        gate: dict[str, Any] = {"kind": GATE_CODES["forget"], "temperature": temperature}
        if write:
            gate["write"] = self.place(width)
        if bounds is not None:
            gate["log_bound"], gate["log_rest"] = (self.rows("lower_bounds", row) for row in bounds)
        return gate

    def write_gate(self, heads: int, slots: int, clamp: float, normalise: bool) -> dict[str, Any]:
        """ABC's gate, of write logits [heads * slots]. Its normaliser is kept in fp64, in which it is summed up."""
        number, N = len(self._products), heads * slots

        def bind(block: GsaBlock, products: Any, where: int) -> None:
            products[number].gate.log_z = where

        def view(x: Tensor) -> Tensor:
            return x[:N].unflatten(0, (heads, slots))

        self.kept["log_z"] = Kept.plain((padded(N),), view, bind, torch.float64)
        kind, place = GATE_CODES["write"], self.place(N)
        return {"kind": kind, "clamp": clamp, "normalise": int(normalise), "write": place}

    def norm(self, layer: RMSNorm) -> tuple[int, float]:
        """Weight and epsilon of a norm."""
        return self.numbers("norm", layer.weight), layer.eps

    def constant_gates(self, decay: Tensor, write: Tensor | None = None) -> None:
        """Gates that are the same for every token."""
        memory = self.block.memory
        memory.constant_decay = self.rows("decay", decay.flatten())
        if write is not None:
            memory.constant_write = self.rows("write", write.flatten())

    def keep_memory(self, name: str, field: str, heads: int, rows: int, width: int) -> None:
        """A memory [heads, rows, width]."""

        def bind(block: GsaBlock, products: Any, where: int) -> None:
            setattr(block.memory, field, where)

        shape = (heads, rows * padded(width))
        self.kept[name] = Kept(shape, lambda x: blocks(x, rows, width), in_blocks, out_of_blocks, bind)

    def keep_channels(self, name: str, states: int, channels: int) -> None:
        """The memory [channels, states] of a scan, which lies the other way round."""

        def bind(block: GsaBlock, products: Any, where: int) -> None:
            block.scan.memory = where

        self.kept[name] = Kept(
            (states * padded(channels),),
            lambda x: blocks(x, states, channels),
            lambda x: in_blocks(x.mT),
            lambda pieces: out_of_blocks(pieces).mT,
            bind,
        )

    def count_positions(self) -> None:
        """The layer counts the tokens of each sequence."""

        def bind(block: GsaBlock, products: Any, where: int) -> None:
            block.heads.positions = where

        self.kept["position"] = Kept.plain((), lambda x: x, bind, torch.int64)

    def convolution_of(self, mixer: Mixer, name: str) -> tuple[str, ShortConvolution] | None:
        """The convolution behind a projection, if there is one."""
        conv = getattr(mixer, f"{name}_conv", None)
        return None if conv is None else (f"{name}_conv", conv)
