"""Tensors that are less, or lie otherwise, than their shape says."""

from __future__ import annotations

from collections.abc import Callable

import torch
from hypothesis import strategies as st
from torch import Tensor

from tests.ops.cases import Tensors


def _with_offset(x: Tensor) -> Tensor:
    return torch.cat((torch.full((3,), torch.nan, dtype=x.dtype), x.flatten()))[3:].view(x.shape)


def _with_gaps(x: Tensor) -> Tensor:
    return torch.stack((x, torch.full_like(x, torch.nan)), -1)[..., 0]


def _in_wider_rows(x: Tensor) -> Tensor:
    return torch.cat((x, torch.full_like(x[..., :1], torch.nan)), -1)[..., :-1]


def _first_dimension_last(x: Tensor) -> Tensor:
    return x.movedim(0, -1).contiguous().movedim(-1, 0)


WHOLE: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda x: x,
    "offset": _with_offset,
    "gaps": _with_gaps,
    "wider rows": _in_wider_rows,
    "first dimension last": _first_dimension_last,
    "expanded": lambda x: x[:1].expand_as(x),
    "negated": lambda x: torch._neg_view(-x),
    "zero": lambda x: torch._efficientzerotensor(x.shape, dtype=x.dtype),
}
"""All numbers are there, or known."""


def gone(x: Tensor) -> Tensor:
    x = x.clone()
    x.untyped_storage().resize_(0)
    return x


def short(x: Tensor) -> Tensor:
    """One number is missing."""
    x = x.clone()
    x.untyped_storage().resize_(max(x.nbytes - x.itemsize, 0))
    return x


def short_view(x: Tensor) -> Tensor:
    """The same, of a view with gaps and an offset."""
    wide = torch.zeros(*x.shape[:-1], 2 * x.shape[-1] + 1, dtype=x.dtype)
    view = wide[..., 1::2]
    view.copy_(x)
    last = view.storage_offset() + sum(s * (n - 1) for n, s in zip(view.shape, view.stride(), strict=True))
    wide.untyped_storage().resize_(max(last, 0) * x.itemsize)
    return view


LACKING: dict[str, Callable[[Tensor], Tensor]] = {"gone": gone, "short": short, "short view": short_view}
MISSING = r"needs \d+ bytes of memory, but its storage has \d+: it was freed or made smaller"


def disguised(data: st.DataObject, inputs: Tensors) -> tuple[Tensors, Tensors, bool]:
    """The inputs in disguise, what their numbers are, and whether some are missing."""
    strange, numbers, lacking = {}, {}, False
    kinds = st.sampled_from(sorted(WHOLE) * 4 + sorted(LACKING))
    for name, x in inputs.items():
        kind = data.draw(kinds, name) if x.numel() else "plain"
        if kind in LACKING:
            strange[name], numbers[name], lacking = LACKING[kind](x), x, True
        else:
            strange[name] = WHOLE[kind](x)
            numbers[name] = strange[name].clone(memory_format=torch.contiguous_format)
    return strange, numbers, lacking
