"""One token by the compiled kernels, as operators: with a new state, and in place."""

from __future__ import annotations

import torch
from torch import Tensor

from gsa.ops.native.kernels import gsa_step
from gsa.ops.native.results import empty
from gsa.ops.step_operators import register_step


def _beside(memory: Tensor, dtype: torch.dtype) -> Tensor:
    return empty(tuple(memory.shape), dtype)


step = register_step("native", gsa_step, _beside)
