"""What flash-linear-attention's kernels of gated slot attention do, counted like ours from the installed package.

Runs in a process of its own, with TRITON_INTERPRET=1: the package looks for a GPU when it is imported, and is told of
the one that is meant.
"""

from __future__ import annotations

import builtins
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from gsa.bench.gpu.counting import Counted, Work, counting, saved_for_backward, slot_inputs
from gsa.ops.triton.launch import Target

CHUNK = 64  # tokens; what chunk_gsa takes if it is not told


def count_fla(target: Target, chunks: int, width: int, slots: int) -> Counted:
    """Forward and backward over so many chunks of one head, as its layer calls it: bf16 throughout, s from outside.

    Of the tile sizes that its autotuner may choose from, each kernel takes those that move the fewest bytes.
    """
    chunk_gsa = _imported_for(target)
    q, k, v, g = slot_inputs(chunks * CHUNK, width, slots, gate_dtype=torch.bfloat16)
    s = (1 - g.exp()).to(g.dtype)
    inputs = [x.requires_grad_() for x in (q, k, v, s, g)]
    do = torch.randn_like(v)
    with counting() as works, _as_on_a_gpu(works):
        with saved_for_backward(inputs) as saved:
            o, _ = chunk_gsa(*inputs, scale=1.0)
        forward = len(works)
        torch.autograd.grad(o, inputs, do)
    return Counted(works[:forward], works[forward:], saved)


def _imported_for(target: Target) -> Callable[..., tuple[Tensor, Any]]:
    """chunk_gsa, with the choice of tiles that the package offers on the target."""
    with warnings.catch_warnings(action="ignore"):  # that there is no GPU
        from fla.utils import hardware

        with patch.object(hardware, "get_all_max_shared_mem", lambda: [target.shared_bytes]):
            hardware.check_shared_mem.cache_clear()
            from fla.ops.gsa import chunk_gsa
    return chunk_gsa


@contextmanager
def _as_on_a_gpu(works: list[Work]) -> Iterator[None]:
    """Inside, the interpreter runs the package's kernels, and autotuning chooses by the bytes that are moved."""
    from fla.ops.common import chunk_h
    from fla.ops.utils.cache import CachedAutotuner
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.interpreter import InterpreterBuilder

    def run(tuner: Any, *args: Any, **kwargs: Any) -> None:
        tuner.nargs = dict(zip(tuner.arg_names, args, strict=False))
        key = tuple(kwargs.get(name) for name in tuner.keys)
        # Warps and stages change nothing that is counted.
        tiles = {tuple(config.kwargs.items()): config for config in tuner.prune_configs(kwargs)}
        tried = {}
        for config in [tuner.cache[key]] if key in tuner.cache else tiles.values():
            tuner.fn.run(*args, **kwargs, **config.all_kwargs())
            tried[config] = works.pop()
        tuner.cache[key] = min(tried, key=lambda config: tried[config].read + tried[config].written)
        works.append(tried[tuner.cache[key]])

    with (
        patch.object(Autotuner, "run", run),
        patch.object(CachedAutotuner, "run", run),
        # What the interpreter lacks: a method of numbers that loops count with, and constants in bf16.
        patch.object(chunk_h, "range", _range, create=True),
        patch.object(InterpreterBuilder, "get_bf16", _bf16, create=True),
    ):
        yield


class _Index(int):
    def to(self, dtype: Any) -> _Index:
        return self


def _range(*bounds: Any) -> Iterator[_Index]:
    return map(_Index, builtins.range(*bounds))


def _bf16(builder: Any, value: float) -> Any:
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    bits = torch.tensor([value], dtype=torch.bfloat16).view(torch.uint16)
    return TensorHandle(np.array(bits), tl.bfloat16)
