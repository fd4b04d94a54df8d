"""Working memory of the chunk engine."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
Result = TypeVar("Result")


class Scratch:
    """Working memory by name: one segment after another, and one call after another, use the same.

    Fresh memory has to be faulted in page by page, which can cost as much as the matmuls that fill it.
    """

    KEPT_BYTES = 64 << 20
    """What a thread may hold on to between calls, for each dtype and device."""

    def __init__(self, dtype: torch.dtype, device: torch.device):
        with torch.inference_mode(False):
            self.empty = torch.empty(0, dtype=dtype, device=device)
        self.buffers: dict[str, Tensor] = {}
        self.views: dict[tuple[str, tuple[int, ...]], Tensor] = {}

    def __call__(self, name: str, *shape: int) -> Tensor:
        """Uninitialised [*shape]; the same memory whenever the name is the same."""
        view = self.views.get((name, shape))
        if view is None:
            size = math.prod(shape)
            buffer = self.buffers.get(name)
            if buffer is None or buffer.numel() < size:
                with torch.inference_mode(False):  # or a later call outside of it could not write here
                    buffer = self.buffers[name] = self.empty.new_empty(size)
            view = self.views[name, shape] = buffer[:size].view(shape)
        return view

    def trim(self) -> None:
        """Ends a call: the memory stays for the next one, unless it is more than may be kept."""
        self.views.clear()
        if sum(x.numel() for x in self.buffers.values()) * self.empty.element_size() > self.KEPT_BYTES:
            self.buffers.clear()


class _Scratches(threading.local):
    def __init__(self) -> None:
        self.held: dict[tuple[torch.dtype, torch.device], Scratch] = {}


_scratches = _Scratches()


def scratch_for(dtype: torch.dtype, device: torch.device) -> Scratch:
    """This thread's working memory."""
    held = _scratches.held
    if (dtype, device) not in held:
        held[dtype, device] = Scratch(dtype, device)
    return held[dtype, device]


def trims_scratch(f: Callable[P, Result]) -> Callable[P, Result]:
    """f, which gives back at its end what may not be kept: see Scratch.trim."""

    @wraps(f)
    def run(*args: P.args, **kwargs: P.kwargs) -> Result:
        try:
            return f(*args, **kwargs)
        finally:
            for scratch in _scratches.held.values():
                scratch.trim()

    return run
