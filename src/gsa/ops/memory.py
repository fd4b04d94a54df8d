"""The gate to memory: where the numbers of a tensor lie, once it is certain that they are there.

A tensor may be less than its shape says. Its storage may have been freed or made smaller behind its back, as
`untyped_storage().resize_` does; its numbers may be held with the other sign, or be zeros that lie nowhere, both of
which autograd makes. torch does not always look: it crashes, or computes with whatever lies there.

Every pointer that C++ is given comes from `address` or `located`. What torch computes goes through `require_memory`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from gsa.errors import GSAError
from gsa.ops.transforms import recorded


def address(name: str, x: Tensor) -> int:
    """Where the numbers of x begin, of which none is missing; C++ may write to it."""
    if not x.is_cpu:
        raise GSAError(f"{name} is on {x.device}, and the native engine runs on the CPU")
    try:
        held, begin = x.untyped_storage().nbytes(), x.data_ptr()
    except RuntimeError:
        raise GSAError(f"{name} is a {type(x).__name__} that stands for other tensors, and has no memory") from None
    needed = x.nbytes if x.is_contiguous() else _extent(x)
    if needed == 0:
        return begin
    if x.storage_offset() * x.itemsize + needed > held:
        raise GSAError(f"{name} {_lack(x, held)}")
    if begin == 0 or x.is_neg():
        raise GSAError(f"{name} is a view or a {type(x).__name__} whose numbers are not in memory as they are")
    return begin


def located(name: str, x: Tensor) -> tuple[Tensor, int]:
    """x and where its numbers begin, to be read by C++; x is a copy if they were not in memory as they are."""
    if x.is_neg() or (x.data_ptr() == 0 and x._is_zerotensor()):
        x = readable(name, x)
    return x, address(name, x)


def readable(name: str, x: Tensor) -> Tensor:
    """x contiguous, with its numbers in memory as they are; a copy if they were not."""
    if recorded():
        return x.resolve_neg().contiguous()
    if x.is_contiguous() and not x.is_neg() and not x._is_zerotensor():
        return x
    require_memory({name: x})
    return x.clone(memory_format=torch.contiguous_format)


def require_memory(tensors: Mapping[str, object]) -> None:
    """Raises unless all numbers of these tensors can be read. Other things among them are passed over, and tensors that
    only stand for others: those are looked at where they are unwrapped, or not at all while calls are recorded."""
    if recorded():
        return
    for name, x in tensors.items():
        if not isinstance(x, Tensor) or type(x).__torch_dispatch__ is not Tensor.__torch_dispatch__:
            continue
        try:
            held = x.untyped_storage().nbytes()
        except NotImplementedError:
            continue
        needed = _extent(x)
        if needed > 0 and x.storage_offset() * x.itemsize + needed > held:
            raise GSAError(f"{name} {_lack(x, held)}")


def require_writable(name: str, x: Tensor) -> None:
    """Raises unless numbers can be written to the memory of x as they are, each to a place of its own."""
    require_memory({name: x})
    if x.is_neg() or x._is_zerotensor() or _overlaps_itself(x):
        raise GSAError(f"{name} is a view that cannot be written to, such as an expanded one; pass {name}.clone()")


def refuse_shared(written: Mapping[str, Tensor], read: Mapping[str, Tensor | None]) -> None:
    """Raises if a tensor that is written to shares memory with another, or with one that is read meanwhile."""
    if recorded():
        return
    others = [(name, x) for name, x in read.items() if x is not None]
    for name, x in written.items():
        for other, y in others:
            if _share(x, y):
                raise GSAError(f"{other} and {name} share memory, so {name} cannot be written to")
        others.append((name, x))


def same_place(x: Tensor, y: Tensor) -> bool:
    """Whether the numbers of both begin and end at the same place."""
    return _span(x) == _span(y)


def _lack(x: Tensor, held: int) -> str:
    needed = x.storage_offset() * x.itemsize + _extent(x)
    return f"{list(x.shape)} needs {needed} bytes of memory, but its storage has {held}: it was freed or made smaller"


def _extent(x: Tensor) -> int:
    """Bytes from the first number of x to the end of the last."""
    if x.is_contiguous():
        return int(x.nbytes)
    last = sum(stride * (size - 1) for stride, size in zip(x.stride(), x.shape, strict=True))
    return int((last + 1) * x.itemsize)


def _span(x: Tensor) -> tuple[int, int]:
    """Where the numbers of x begin and end."""
    begin = x.data_ptr()
    return begin, begin + _extent(x) if begin else 0


def _share(x: Tensor, y: Tensor) -> bool:
    """Whether numbers of both may lie at the same place.

    Where their spans cross, one may still lie in the gaps of the other, as two parts of a larger tensor do: such parts
    have equal strides, and together are a view that does not overlap itself.
    """
    (begin, end), (other_begin, other_end) = _span(x), _span(y)
    if begin >= other_end or other_begin >= end:
        return False
    apart, odd = divmod(abs(other_begin - begin), x.itemsize)
    if odd or (x.shape, x.stride(), x.dtype) != (y.shape, y.stride(), y.dtype):
        return True
    return _overlap((2, *x.shape), (apart, *x.stride()))


def _overlaps_itself(x: Tensor) -> bool:
    """Whether different elements of x may lie at the same place."""
    return not x.is_contiguous() and _overlap(x.shape, x.stride())


def _overlap(shape: Sequence[int], strides: Sequence[int]) -> bool:
    reach = 0  # from the first to the last element of the dimensions so far, the narrowest first
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False
