"""Where the operators are tested: `pytest --device cuda` computes on a GPU what is computed on the CPU by default.

On the CPU, kernels written for GPUs run in Triton's interpreter: slow, and to the same numbers.
"""

from __future__ import annotations

import os

import pytest
import torch

DEVICE = torch.device("cpu")
"""What tests marked `any_device` make their tensors on; settled before any of them is imported."""


def choose(name: str) -> None:
    """Settles the device. Triton reads TRITON_INTERPRET where kernels are defined, so that comes first of all."""
    global DEVICE
    if name == "cuda":
        if not torch.cuda.is_available():
            raise pytest.UsageError("--device cuda: no GPU was found (torch.cuda.is_available() is False)")
        os.environ.pop("TRITON_INTERPRET", None)
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # the same bits every time
        DEVICE = torch.device("cuda", torch.cuda.current_device())
    else:
        os.environ["TRITON_INTERPRET"] = "1"
        os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["HIP_VISIBLE_DEVICES"] = ""  # `auto` means the CPU, too
        DEVICE = torch.device("cpu")


def prepare_interpreter() -> None:
    """Makes Triton's interpreter round as GPUs do, and lose no time."""
    _round_like_a_gpu()
    _patch_once()


def _patch_once() -> None:
    """A kernel changes Triton's language for as long as it runs; each function it calls would do so once more."""
    import triton.language as tl
    from triton.runtime import interpreter

    changed = set()

    def call(self, *args, **kwargs):  # type: ignore[no-untyped-def]
        names = self.fn.__globals__
        if id(names) not in changed and not any(x is tl for x in names.values()):
            interpreter._patch_lang(self.fn)  # Triton's own functions know another part of it, and never put it back
            changed.add(id(names))
        return self.rewrite()(*args, **kwargs)

    interpreter.InterpretedFunction.__call__ = call


def _round_like_a_gpu() -> None:
    """To bf16: to the nearest and then to even; by itself the interpreter cuts off."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def rounding(x, from_type, to_type, mode):  # type: ignore[no-untyped-def]
        if from_type != tl.float32 or to_type != tl.bfloat16:
            return convert(x, from_type, to_type, mode)
        bits = np.ascontiguousarray(x).view(np.uint32).reshape(x.shape)
        nearest = (bits + np.uint32(0x7FFF) + (bits >> 16 & 1)) >> 16
        return np.where(np.isnan(x), np.uint32(0x7FC0), nearest).astype(np.uint16)

    interpreter._convert_float = rounding
