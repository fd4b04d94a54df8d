"""The gate to memory: where the numbers of a tensor lie, once it is certain that they are there.

A tensor may be less than its shape says. Its storage may have been freed or made smaller behind its back, as
`untyped_storage().resize_` does; its numbers may be held with the other sign, or be zeros that lie nowhere, both of
which autograd makes. torch does not always look: it crashes, or computes with whatever lies there.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from gsa.errors import GSAError


def lack_of_memory(x: Tensor) -> str | None:
    """Why the numbers of x cannot all be read, as a clause that follows its name; None if they can.

    Tensors that only stand for others, such as those of torch.func, are looked at where they are unwrapped.
    """
    if type(x).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return None
    try:
        held = x.untyped_storage().nbytes()
    except NotImplementedError:
        return None
    extent = _extent(x)
    needed = extent + x.storage_offset() * x.itemsize
    if needed <= held or extent == 0:
        return None
    return f"{list(x.shape)} needs {needed} bytes of memory, but its storage has {held}: it was freed or made smaller"


def require_memory(tensors: Mapping[str, object]) -> None:
    """Raises unless all numbers of these tensors can be read; other things among them are passed over."""
    for name, x in tensors.items():
        lack = lack_of_memory(x) if isinstance(x, Tensor) else None
        if lack is not None:
            raise GSAError(f"{name} {lack}")


def address(name: str, x: Tensor) -> int:
    """Where the numbers of x begin. Every pointer that C++ is given comes from here."""
    if not x.is_cpu:
        raise GSAError(f"the native engine runs on the CPU, but {name} is on {x.device}")
    require_memory({name: x})
    try:
        begin = x.data_ptr()
    except RuntimeError:
        begin = 0
    if (begin == 0 and x.numel() > 0) or x.is_neg():
        raise GSAError(f"{name} is a {type(x).__name__} whose numbers are not in memory as they are")
    return begin


def readable(x: Tensor) -> Tensor:
    """x with its numbers in memory as they are; a copy if they were not."""
    return x.clone() if x.is_neg() or x._is_zerotensor() else x


def require_writable(name: str, x: Tensor) -> None:
    """Raises unless numbers can be written to the memory of x as they are."""
    require_memory({name: x})
    if x.is_neg() or x._is_zerotensor() or _overlaps_itself(x):
        raise GSAError(f"{name} is a view that cannot be written to, such as an expanded one; pass {name}.clone()")


def refuse_shared(written: dict[str, Tensor], read: dict[str, Tensor | None]) -> None:
    """Raises if a tensor that is updated in place shares memory with another, or with one that is read meanwhile."""
    spans = [(name, *_span(x)) for name, x in read.items() if x is not None]
    for name, x in written.items():
        begin, end = _span(x)
        for other, other_begin, other_end in spans:
            if begin < other_end and other_begin < end:
                raise GSAError(f"{other} and {name} share memory, so {name} cannot be written to")
        spans.append((name, begin, end))


def same_place(x: Tensor, y: Tensor) -> bool:
    """Whether the numbers of both, contiguous and of one shape, lie at the same place."""
    return _span(x) == _span(y)


def _overlaps_itself(x: Tensor) -> bool:
    """Whether different elements of x may lie at the same place, as those of expanded views do."""
    if x.is_contiguous():
        return False
    reach = 0  # from the first to the last element of the dimensions so far, the narrowest first
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False


def _extent(x: Tensor) -> int:
    """Bytes from the first number of x to the end of the last."""
    if x.is_contiguous():
        return int(x.nbytes)
    last = sum(stride * (size - 1) for stride, size in zip(x.stride(), x.shape, strict=True))
    return int((last + 1) * x.itemsize)


def _span(x: Tensor) -> tuple[int, int]:
    """Where the numbers of x begin and end; nowhere if it only stands for others."""
    if type(x).__torch_dispatch__ is not Tensor.__torch_dispatch__ or torch._C._functorch.is_functorch_wrapped_tensor(
        x
    ):
        return 0, 0
    begin = x.data_ptr()
    return begin, begin + _extent(x)
