"""The engine `native`: the compiled kernels, as operators with the signatures of gsa.ops.reference."""

import torch
from torch import Tensor

from gsa.ops.native import kernels
from gsa.ops.native import selective_scan as scan_kernels
from gsa.ops.operators import register
from gsa.ops.selective_scan_operator import register_selective_scan
from gsa.ops.step_operators import traced


def _needs_operator(*tensors: Tensor | None) -> bool:
    return traced(*tensors) or torch._C._functorch.peek_interpreter_stack() is not None


gated_linear_attention, gated_slot_attention = register("native", kernels)
selective_scan = register_selective_scan("native", scan_kernels, _needs_operator)
