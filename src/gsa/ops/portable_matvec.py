"""Matrix-vector products for decoding in torch, on any device.

Letters: K columns of the matrix, C parts of them that share a scale.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from gsa.errors import raised_by
from gsa.ops.calls import MatvecCall
from gsa.ops.memory import require_memory, require_writable
from gsa.ops.transforms import recorded
from gsa.ops.weights import COLUMNS


def matvec(call: MatvecCall) -> Tensor:
    """y [..., N] = W x, and whatever goes with it; in `out` if the call has one."""
    if not recorded():
        with raised_by("matvec"):
            norm_weight = None if call.norm is None else call.norm[0]
            require_memory({"x": call.x, "the weight of norm": norm_weight, "residual": call.residual})
            if call.out is not None:
                require_writable("out", call.out)
    x, width = call.x, call.weight.K
    if call.norm is not None:
        x = F.rms_norm(x, (width,), *call.norm)
    if call.swiglu:
        gate, value = x.chunk(2, -1)
        x = F.silu(gate) * value
    if call.activations == "int8":
        q, scale = quantise_activations(x, call.weight.shared)
        x = (scale * q.float()).flatten(-2)[..., :width]
    y = F.linear(x, call.weight.unpack())
    if call.residual is not None:
        y = y + call.residual
    return y if call.out is None else call.out.copy_(y)


def quantise_activations(x: Tensor, shared: int = COLUMNS) -> tuple[Tensor, Tensor]:
    """Integers (int8) and scales of x [..., K], for each `shared` values: [..., C, shared] and [..., C, 1], filled with
    zeros."""
    blocks = F.pad(x, (0, -x.shape[-1] % shared)).unflatten(-1, (-1, shared))
    highest = blocks.abs().amax(-1, keepdim=True)
    q = torch.where(highest > 1e-30, blocks * (127 / highest), 0).round()
    return q.nan_to_num(0).to(torch.int8), highest / 127 + (blocks * 0).sum(-1, keepdim=True)  # NaN if not finite
