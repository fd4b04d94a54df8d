"""Weights as decoding reads them: fp32, bf16, int8 or int4, and back to plain tensors.

Letters: N rows, K columns; R = ceil(N / 16) blocks of rows, C = ceil(K / 32) blocks of columns, G groups along a row.

fp32 and bf16 stay as they are. A quantised weight is scale * (q - zero), with q of 8 or 4 bits and a scale (bf16) and a
zero per row and group: the zero lets a group use the whole range of q, whatever its signs, and keeps 0 exact. They lie
in blocks of 16 rows by 32 columns, so that the rows of a block are the lanes of a vector.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from gsa.errors import GSAError, raised_by
from gsa.ops.memory import address, readable, refuse_shared, require_memory, require_writable
from gsa.ops.native import library
from gsa.ops.native import linear as native
from gsa.ops.native.linear import Matrix
from gsa.ops.native.structs import BLOCK_COLUMNS, BLOCK_ROWS
from gsa.ops.transforms import recorded

ROWS, COLUMNS = BLOCK_ROWS, BLOCK_COLUMNS
BITS = {"int8": 8, "int4": 4}
DENSE = {"fp32": torch.float32, "bf16": torch.bfloat16}
FORMATS = (*DENSE, *BITS)
MOST_SHARED = 4 * COLUMNS
"""Activations that share a scale at most, as integers; see csrc/linear.h."""
_QUANTISED_AT_ONCE = 1 << 20  # weights, so that they stay in the cache


@dataclass(frozen=True, eq=False)
class PackedWeight:
    """A matrix [N, K] ready for `matvec`. Made by `pack` or `PackedWeight.from_tensors`."""

    format: str
    """fp32, bf16, int8 or int4."""
    N: int
    K: int
    group: int | None
    """Columns that share a scale; None: a whole row, or no scales at all."""
    weight: Tensor
    """[N, K], or uint8 [R, C, bits, 16, 4]."""
    scale: Tensor | None = None
    """bf16 [R, G, 16]."""
    zero: Tensor | None = None
    """uint8 [R, G, 16]."""

    def __post_init__(self) -> None:
        _check(self)

    def tensors(self) -> dict[str, Tensor]:
        """Plain tensors that describe it fully, for safetensors; `from_tensors` takes them back. Nothing is copied."""
        layout = torch.tensor([self.N, self.K, self.group or 0])
        named = {"weight": self.weight, "scale": self.scale, "zero": self.zero, "layout": layout}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> PackedWeight:
        """The weight that these tensors describe, after checking all of them."""
        for name, tensor in tensors.items():
            if not isinstance(tensor, Tensor):
                raise GSAError(f"from_tensors: {name} must be a tensor, got {type(tensor).__name__}")
        unknown = set(tensors) - {"weight", "scale", "zero", "layout"}
        if unknown or "weight" not in tensors or "layout" not in tensors:
            raise GSAError(f"from_tensors: expected weight, layout, scale and zero, got {', '.join(sorted(tensors))}")
        weight, layout = tensors["weight"].detach(), tensors["layout"]
        with raised_by("from_tensors"):
            require_memory(tensors)
        if layout.dtype != torch.int64 or layout.shape != (3,) or layout.layout != torch.strided or layout.is_meta:
            raise GSAError(f"from_tensors: layout is {layout.dtype} {list(layout.shape)}, expected torch.int64 [3]")
        dense = {dtype: name for name, dtype in DENSE.items()}
        chunks = {bits: name for name, bits in BITS.items()}
        format = dense.get(weight.dtype) or (chunks.get(weight.shape[2]) if weight.dim() == 5 else None)
        if format is None:
            raise GSAError(f"from_tensors: no format has a weight of {weight.dtype} {list(weight.shape)}")
        N, K, group = layout.tolist()
        return cls(format, N, K, group or None, weight, tensors.get("scale"), tensors.get("zero"))

    def unpack(self, out: Tensor | None = None) -> Tensor:
        """The weights as they are used, fp32 [N, K]; those in fp32 themselves are not copied.

        `out` is a flat fp32 tensor of at least N K numbers for the others, so that one serves many weights in turn.
        """
        self.require_memory()
        if self.format == "fp32":
            return self.weight
        if out is not None:
            _check_room(out, self.N * self.K, self.weight.device)
            with raised_by("unpack"):
                refuse_shared({"out": out}, self.parts())
        if not self.weight.is_cpu or library.unavailable(None) is not None:
            plain = self._unpack()
            return plain if out is None else out[: plain.numel()].view(self.N, self.K).copy_(plain)
        if out is None:
            out = torch.empty(self.N * self.K, dtype=torch.float32, device="cpu")
        plain = out[: self.N * self.K].view(self.N, self.K)
        native.unpack(self, plain)
        return plain

    def rows(self, indices: Tensor) -> Tensor:
        """Rows of the weights, fp32 [..., K] for indices [...]: what an embedding reads."""
        self.require_memory()
        if self.scale is None or self.zero is None:
            return self.weight[indices].float()
        flat = indices.reshape(-1)
        block, lane = flat // ROWS, flat % ROWS
        q = self.weight[block, :, :, lane]  # [n, C, bits, 4]
        if self.format == "int4":
            q = torch.stack((q & 15, q >> 4), 3)
        q = q.flatten(1)
        scale, zero = (
            x[block, :, lane].float().repeat_interleave(self.group or q.shape[1], 1)[:, : q.shape[1]]
            for x in (self.scale, self.zero)
        )
        return (scale * (q.float() - zero))[:, : self.K].reshape(*indices.shape, self.K)

    def _unpack(self) -> Tensor:
        """The same in torch."""
        if self.scale is None or self.zero is None:
            return self.weight.float()
        q = _from_blocks(self.weight, BITS[self.format])
        columns = self.weight.shape[1] * COLUMNS
        scale, zero = (_along_rows(x.float(), self.group or columns, columns) for x in (self.scale, self.zero))
        return (scale * (q.float() - zero))[: self.N, : self.K].contiguous()

    def matrix(self) -> Matrix:
        """For the native engine. Made anew when torch has moved a tensor to other memory, as share_memory_() does."""
        addresses = tuple(0 if x is None else address(f"PackedWeight: {name}", x) for name, x in self.parts().items())
        found: Matrix | None = self.__dict__.get("_matrix")
        if found is None or found.addresses != addresses:
            found = self.__dict__["_matrix"] = Matrix(self, addresses)
        return found

    def require_memory(self) -> None:
        """Raises if torch has freed a tensor of it."""
        if not recorded():
            with raised_by("PackedWeight"):
                require_memory(self.parts())

    def parts(self) -> dict[str, Tensor | None]:
        """Its tensors by name."""
        return {"weight": self.weight, "scale": self.scale, "zero": self.zero}

    def __reduce__(self) -> tuple[type[PackedWeight], tuple[object, ...]]:
        """A copy is made anew: it has memory of its own, and addresses of its own."""
        return PackedWeight, tuple(getattr(self, field.name) for field in fields(self))

    @property
    def shared(self) -> int:
        """Columns whose activations share a scale where they become integers: the most that divide a group."""
        blocks = -(-self.K // COLUMNS) if self.group is None else self.group // COLUMNS
        most = min(blocks, MOST_SHARED // COLUMNS)
        return COLUMNS * next(count for count in range(most, 0, -1) if blocks % count == 0)

    @property
    def nbytes(self) -> int:
        """Of the weights and what belongs to them."""
        return sum(x.nbytes for x in (self.weight, self.scale, self.zero) if x is not None)


def pack(weight: Tensor, format: str, group: int | None = COLUMNS) -> PackedWeight:
    """The weight [N, K] in another format: "fp32", "bf16", "int8" or "int4".

    A plain weight that already has the format is not copied: changes to it are seen. `group` is how many columns share
    a scale: a multiple of 32, or None for a whole row (int8 only; int4 takes groups of 32). On normal weights the
    relative error of W x is 0.48% for int8 in groups of 32 (0.61% of 128, 0.75% with a scale per row of 576), and 7.7%
    for int4.

    >>> packed = pack(torch.randn(10, 40), "int8")
    >>> packed.unpack().shape
    torch.Size([10, 40])
    """
    if format not in FORMATS:
        raise GSAError(f"pack: unknown format {format!r}; expected one of {', '.join(map(repr, FORMATS))}")
    if not isinstance(weight, Tensor) or weight.dim() != 2 or not weight.is_floating_point() or not weight.numel():
        got = f"{weight.dtype} {list(weight.shape)}" if isinstance(weight, Tensor) else type(weight).__name__
        raise GSAError(f"pack: expected a floating-point weight [N, K], got {got}")
    if weight.layout != torch.strided or weight.is_meta:
        kind = "meta" if weight.is_meta else weight.layout
        raise GSAError(f"pack: expected a dense weight with its numbers in memory, got {kind}")
    with raised_by("pack"):
        require_memory({"weight": weight})
    weight = readable("weight", weight.detach())
    N, K = weight.shape
    if format in DENSE:
        return PackedWeight(format, N, K, None, weight.to(DENSE[format]).contiguous())
    _check_group("pack", format, group)
    if not bool(weight.float().isfinite().all()):
        raise GSAError(f"pack: cannot quantise a weight with values that are not finite in fp32 to {format}")
    return _quantise(weight, format, group)


def _check_room(out: Tensor, size: int, device: torch.device) -> None:
    if not isinstance(out, Tensor):
        raise GSAError(f"unpack: out must be a tensor, got {type(out).__name__}")
    fits = out.layout == torch.strided and out.dtype == torch.float32 and out.dim() == 1 and out.numel() >= size
    if not fits or not out.is_contiguous() or out.device != device:
        got = f"{out.dtype} {list(out.shape)} on {out.device}"
        raise GSAError(f"unpack: out is {got}, expected contiguous torch.float32 [{size}] on {device}")
    with raised_by("unpack"):
        require_writable("out", out)


def _check_group(operation: str, format: str, group: object) -> None:
    if format == "int4" and group != COLUMNS:
        raise GSAError(f"{operation}: int4 has groups of {COLUMNS}, got {group!r}")
    if group is not None and (type(group) is not int or group < COLUMNS or group % COLUMNS):
        raise GSAError(
            f"{operation}: group must be a multiple of {COLUMNS}, or None for a scale per row, got {group!r}"
        )


def _quantise(weight: Tensor, format: str, group: int | None) -> PackedWeight:
    (N, K), bits = weight.shape, BITS[format]
    columns = -(-K // COLUMNS) * COLUMNS
    width = group or columns
    groups, rows = -(-columns // width), -(-N // ROWS) * ROWS
    step = max(1, _QUANTISED_AT_ONCE // columns // ROWS) * ROWS
    pieces = []
    for first in range(0, rows, step):
        height = min(step, rows - first)
        piece = weight.new_zeros(height, groups * width, dtype=torch.float32)
        rest = weight[first : first + height]
        piece[: rest.shape[0], :K] = rest
        piece = piece.view(height, groups, width)
        unit = _power_of_two(piece)  # so that no square of a weight overflows
        q, scale, zero = (_quantise8 if bits == 8 else _quantise4)(piece / unit)
        lanes = (height // ROWS, ROWS, groups)
        pieces.append(
            (
                _to_blocks(q.view(height, -1)[:, :columns], bits),
                (scale * unit).view(lanes).transpose(1, 2).bfloat16(),
                zero.view(lanes).transpose(1, 2).to(torch.uint8),
            )
        )
    return PackedWeight(format, N, K, group, *(torch.cat(parts) for parts in zip(*pieces, strict=True)))


def _power_of_two(w: Tensor) -> Tensor:
    """About as large as the largest value of each group."""
    exponent = torch.frexp(w.abs().amax(-1, keepdim=True)).exponent
    return torch.ldexp(torch.ones_like(w[..., :1]), exponent.clamp(-120, 120))


def _quantise8(w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q (uint8) [..., G, width], scale and zero [..., G, 1] of w, with all values in range."""
    scale, zero = _range(w, 255, 1.0)
    q, _ = _round(w, scale, zero, 255)
    return q.to(torch.uint8), scale, zero


def _quantise4(w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same in 4 bits. So few do better when the extremes may be cut off, so the best of several ranges is taken.

    Given q, the scale with the least squared error is known; q is then rounded once more.
    """
    best: tuple[Tensor, ...] | None = None
    for factor in (1.05, 1.0, 0.95, 0.9, 0.85):
        scale, zero = _range(w, 15, factor)
        steps = _round(w, scale, zero, 15)[0] - zero
        fitted = (w * steps).sum(-1, keepdim=True) / steps.square().sum(-1, keepdim=True).clamp(min=1.0)
        scale = fitted.bfloat16().float()
        q, error = _round(w, scale, zero, 15)
        found = (q, scale, zero, error)
        best = (
            found
            if best is None
            else tuple(torch.where(error < best[3], x, y) for x, y in zip(found, best, strict=True))
        )
    assert best is not None
    return best[0].to(torch.uint8), best[1], best[2]


def _range(w: Tensor, levels: int, factor: float) -> tuple[Tensor, Tensor]:
    """A scale (a value of bf16) and a zero (an integer) that spread the range of w, times a factor, over the levels."""
    low, high = w.amin(-1, keepdim=True).clamp(max=0), w.amax(-1, keepdim=True).clamp(min=0)
    scale = (high * (factor / levels) - low * (factor / levels)).bfloat16().float()
    middle = (low + high) / 2
    zero = (levels / 2 - torch.where(scale > 0, middle / scale, 0)).round().clamp(0, levels)
    return scale, zero


def _round(w: Tensor, scale: Tensor, zero: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """q, and the squared error of a group."""
    q = (torch.where(scale > 0, w / scale, 0).round() + zero).clamp(0, levels)
    return q, (scale * (q - zero) - w).square().sum(-1, keepdim=True)


def _to_blocks(q: Tensor, bits: int) -> Tensor:
    """[16 R, 32 C] -> [R, C, 8 or 4, 16, 4]: four columns of 16 rows together, two fours in one with 4 bits."""
    R, C = q.shape[0] // ROWS, q.shape[1] // COLUMNS
    if bits == 8:
        return q.view(R, ROWS, C, 8, 4).permute(0, 2, 3, 1, 4).contiguous()
    low, high = q.view(R, ROWS, C, 4, 2, 4).permute(4, 0, 2, 3, 1, 5)
    return (low | high << 4).contiguous()


def _from_blocks(blocks: Tensor, bits: int) -> Tensor:
    R, C = blocks.shape[:2]
    if bits == 8:
        return blocks.permute(0, 3, 1, 2, 4).reshape(R * ROWS, C * COLUMNS)
    both = torch.stack((blocks & 15, blocks >> 4), 4)  # [R, C, 4, 16, 2, 4]
    return both.permute(0, 3, 1, 2, 4, 5).reshape(R * ROWS, C * COLUMNS)


def _along_rows(x: Tensor, group: int, columns: int) -> Tensor:
    """[R, G, 16] -> [16 R, columns], each value for all columns of its group."""
    return x.transpose(1, 2).flatten(0, 1).repeat_interleave(group, 1)[:, :columns]


def _check(packed: PackedWeight) -> None:
    """Everything that must hold before a pointer is passed on."""
    format, N, K = packed.format, packed.N, packed.K
    if format not in FORMATS:
        raise GSAError(f"PackedWeight: unknown format {format!r}; expected one of {', '.join(map(repr, FORMATS))}")
    if type(N) is not int or type(K) is not int or N < 1 or K < 1:
        raise GSAError(f"PackedWeight: expected at least 1 x 1, got {N} x {K}")
    if format in DENSE and packed.group is not None:
        raise GSAError(f"PackedWeight: {format} has no groups, got {packed.group!r}")
    if format in BITS:
        _check_group("PackedWeight", format, packed.group)
    for name, kind in _parts(format, N, K, packed.group).items():
        x = getattr(packed, name)
        got = None if x is None else (x.dtype, tuple(x.shape)) if isinstance(x, Tensor) else type(x).__name__
        if got != kind:
            expected, given = (f"{k[0]} {list(k[1])}" if isinstance(k, tuple) else str(k) for k in (kind, got))
            raise GSAError(f"PackedWeight: {name} of {N} x {K} in {format} is {expected}, got {given}")
        if x is not None and (x.layout != torch.strided or not x.is_contiguous() or x.device != packed.weight.device):
            raise GSAError(f"PackedWeight: {name} must be dense, contiguous and on {packed.weight.device}")
        if x is not None and (x.is_neg() or x._is_zerotensor()):
            raise GSAError(f"PackedWeight: the numbers of {name} must be in memory as they are; pass {name}.clone()")
    packed.require_memory()
    if packed.scale is not None and not bool(packed.scale.isfinite().all()):
        raise GSAError("PackedWeight: scale has values that are not finite")


def _parts(format: str, N: int, K: int, group: int | None) -> dict[str, tuple[torch.dtype, tuple[int, ...]] | None]:
    """Dtype and shape of each tensor of a packed weight; None for one that it does not have."""
    if format in DENSE:
        return {"weight": (DENSE[format], (N, K)), "scale": None, "zero": None}
    R, C = -(-N // ROWS), -(-K // COLUMNS)
    G = 1 if group is None else -(-C * COLUMNS // group)
    return {
        "weight": (torch.uint8, (R, C, BITS[format], ROWS, 4)),
        "scale": (torch.bfloat16, (R, G, ROWS)),
        "zero": (torch.uint8, (R, G, ROWS)),
    }
