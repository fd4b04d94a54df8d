"""Checks of arguments, done once around all engines: messages name the operation, what came and what is expected."""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from gsa.errors import GSAError, raised_by
from gsa.ops.memory import require_memory
from gsa.ops.readout import READOUTS
from gsa.ops.state import compute_dtype
from gsa.ops.transforms import recorded

_INTEGERS = (torch.int32, torch.int64)
_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class Checker:
    """The checks of one operation; `op` leads every message."""

    def __init__(self, op: str):
        self.op = op

    def fail(self, message: str) -> GSAError:
        return GSAError(f"{self.op}: {message}")

    def tensor(self, name: str, x: object, layout: str, like: Tensor | None = None) -> Tensor:
        """x as a floating tensor with one dimension per letter of `layout`, on the device of `like`."""
        if not isinstance(x, Tensor):
            raise self.fail(f"{name} must be a tensor [{layout}], got {type(x).__name__}")
        if x.is_nested:
            raise self.fail(f"{name} must be dense, got a nested tensor; sequences can be packed, see cu_seqlens")
        if x.dim() != layout.count(",") + 1:
            raise self.fail(f"{name} must have the shape [{layout}], got {list(x.shape)}")
        if x.dtype not in _FLOATS:
            raise self.fail(f"{name} must be floating point (64, 32 or 16 bits), got {x.dtype}")
        if x.layout != torch.strided:
            raise self.fail(f"{name} must be dense, got {x.layout}")
        if like is not None and x.device != like.device:
            raise self.fail(f"{name} is on {x.device}, q is on {like.device}")
        return x

    def converted(self, name: str, x: Tensor, dtype: torch.dtype) -> Tensor:
        """x in another dtype. torch would also read what is not there; engines look for themselves."""
        if x.dtype == dtype:
            return x
        if not recorded():
            with raised_by(self.op):
                require_memory({name: x})
        return x.to(dtype)

    def same(self, what: str, a: str, x: int, b: str, y: int) -> None:
        if x != y:
            raise self.fail(f"{a} has {x} {what}, {b} has {y}")

    def qkv(self, q: Tensor, k: Tensor, v: Tensor, *, steps: bool = False, past: bool = False) -> None:
        """The shapes, dtypes and devices of queries, keys and values; without time if they are single steps. With
        `past`, there may be keys and values before the first query."""
        lead = "B" if steps else "B, T"
        q = self.tensor("q", q, f"{lead}, HQ, K")
        self.tensor("k", k, f"{lead}, H, K", q)
        self.tensor("v", v, f"{lead}, H, V", q)
        for name, x in (("k", k), ("v", v)):
            if x.dtype != q.dtype:
                raise self.fail(f"{name} is {x.dtype}, q is {q.dtype}; q, k and v must agree")
            self._lead(name, x, *((k, "k") if past else (q, "q")))
        if past:
            self.same("rows", "k", k.shape[0], "q", q.shape[0])
        self.same("heads", "v", v.shape[-2], "k", k.shape[-2])
        self.same("features per head", "k", k.shape[-1], "q", q.shape[-1])
        HQ, H = q.shape[-2], k.shape[-2]
        if H == 0 or HQ == 0 or HQ % H:
            raise self.fail(f"q has {HQ} heads, which is not a multiple of the {H} heads of k and v")
        for name, x in (("k", k), ("v", v)):
            if x.shape[-1] == 0:
                raise self.fail(f"{name} has heads of width 0")

    def _lead(self, name: str, x: Tensor, q: Tensor, like: str = "q") -> None:
        self.same("rows", name, x.shape[0], like, q.shape[0])
        if x.dim() == 4:
            self.same("time steps", name, x.shape[1], like, q.shape[1])

    def gate(self, name: str, g: Tensor, q: Tensor, H: int, widths: dict[str, int] | None) -> None:
        """A per-token quantity of the key/value heads; `widths` names the widths allowed (None: any but zero)."""
        letters = "M" if widths is None else "|".join(widths)
        self.tensor(name, g, f"B, {'T, ' if q.dim() == 4 else ''}H, {letters}", q)
        self._lead(name, g, q)
        self.same("heads", name, g.shape[-2], "k", H)
        if widths is None and g.shape[-1] == 0:
            raise self.fail(f"{name} has no slots")
        if widths is not None and g.shape[-1] not in widths.values():
            allowed = " or ".join(key if key.isdigit() else f"{key} = {value}" for key, value in widths.items())
            raise self.fail(f"{name} has width {g.shape[-1]}, expected {allowed}")

    def state(self, name: str, x: object, shape: tuple[int, ...], letters: str, like: Tensor) -> Tensor:
        """x as a state of this shape, for inputs like q, in the dtype that sums are carried in."""
        state = self.tensor(name, x, letters, like)
        if tuple(state.shape) != shape:
            raise self.fail(f"{name} must have the shape [{letters}] = {list(shape)}, got {list(state.shape)}")
        return self.converted(name, state, compute_dtype(like.dtype))

    def scale(self, scale: float | None, K: int) -> float:
        """The scale as a number; None is 1/sqrt(K)."""
        if scale is None:
            return float(K**-0.5)
        if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not abs(scale) <= sys.float_info.max:
            raise self.fail(f"scale must be a finite number or None, got {scale!r}")
        return float(scale)

    def flags(self, **flags: bool) -> None:
        """Refuses what only counts as true or false, such as the word "no"."""
        for name, value in flags.items():
            if value is not True and value is not False:
                raise self.fail(f"{name} must be True or False, got {value!r}")

    def by_value(self, check: bool | None, q: Tensor) -> bool:
        """Whether engines look at values; None is where that costs nothing: on a GPU, Python would wait for it."""
        if check is None:
            return q.is_cpu
        if not isinstance(check, bool):
            raise self.fail(f"check must be True, False or None, got {check!r}")
        return check

    def readout(self, readout: str) -> None:
        if not isinstance(readout, str) or readout not in READOUTS:
            raise self.fail(f"unknown readout {readout!r}; expected one of {', '.join(map(repr, READOUTS))}")

    def sequences(self, q: Tensor, cu_seqlens: Tensor | None) -> int:
        """The number of sequences N. The values of cu_seqlens are checked where they are read, by the engine."""
        if cu_seqlens is None:
            return q.shape[0]
        if (
            not isinstance(cu_seqlens, Tensor)
            or cu_seqlens.layout != torch.strided
            or cu_seqlens.dim() != 1
            or cu_seqlens.dtype not in _INTEGERS
        ):
            got = (
                f"{cu_seqlens.dtype} {list(cu_seqlens.shape)}"
                if isinstance(cu_seqlens, Tensor)
                else type(cu_seqlens).__name__
            )
            raise self.fail(f"cu_seqlens must be an int32 or int64 tensor [N+1], got {got}")
        if cu_seqlens.device.type != "cpu" and cu_seqlens.device != q.device:
            raise self.fail(f"cu_seqlens is on {cu_seqlens.device}, expected {q.device} or the CPU")
        if not recorded():
            with raised_by(self.op):
                require_memory({"cu_seqlens": cu_seqlens})
        if cu_seqlens.shape[0] == 0:
            raise self.fail("cu_seqlens is empty, expected N+1 entries beginning with 0")
        if q.shape[0] != 1:
            raise self.fail(f"cu_seqlens packs sequences into a batch of 1, but q has {q.shape[0]} rows")
        return cu_seqlens.shape[0] - 1

    def one_dtype(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v unchanged, but for autocast, which may leave them in different dtypes: then the widest of theirs."""
        tensors = (q, k, v)
        if (
            not all(isinstance(x, Tensor) and x.is_floating_point() for x in tensors)
            or len({x.dtype for x in tensors}) == 1
        ):
            return tensors
        if not torch.is_autocast_enabled(q.device.type):
            return tensors
        dtype = torch.promote_types(torch.promote_types(q.dtype, k.dtype), v.dtype)
        return self.converted("q", q, dtype), self.converted("k", k, dtype), self.converted("v", v, dtype)
