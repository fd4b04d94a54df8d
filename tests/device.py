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
        DEVICE = torch.device("cpu")


def round_like_a_gpu() -> None:
    """Makes Triton's interpreter round to bf16 as GPUs do, to the nearest and then to even; by itself it cuts off."""
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
