"""One token of gated slot attention in torch, on any device, with a derivative unless it is in place.

Shape letters: B batch, H key/value heads, R queries per key/value head (HQ = H * R), K, V widths, M slots.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gsa.errors import raised_by
from gsa.ops.calls import StepCall, sums_dtype
from gsa.ops.gates import refuse_gates
from gsa.ops.memory import refuse_shared, require_memory, require_writable
from gsa.ops.readout import READOUTS
from gsa.ops.state import SlotState
from gsa.ops.transforms import recorded


def gated_slot_attention_step(call: StepCall, *, inplace: bool) -> tuple[Tensor, SlotState]:
    """The output [B, HQ, V] and the state after it; in place, the call's own."""
    with raised_by("gated_slot_attention_step"):
        if not recorded():
            written, read = call.written_and_read()
            require_memory({**read, **written})
            if inplace:
                for name, x in written.items():
                    require_writable(name, x)
                refuse_shared(written, read)
        if call.check:
            refuse_gates(g=call.g)
    dtype, memory_k, memory_v = sums_dtype(call), call.memory_k, call.memory_v
    graph = torch.is_grad_enabled() and not inplace
    with torch.autocast(call.q.device.type, enabled=False), torch.set_grad_enabled(graph):
        k, v, g = call.k.to(dtype), call.v.to(dtype), call.g.to(dtype)
        decay, write = g.exp(), -torch.expm1(g) if call.s is None else call.s.to(dtype)
        if inplace:
            memory_k.mul_(decay[:, :, None, :]).addcmul_(k[..., None], write[:, :, None, :])
            memory_v.mul_(decay[..., None]).addcmul_(write[..., None], v[:, :, None, :])
        else:
            memory_k = memory_k.to(dtype) * decay[:, :, None, :] + k[..., None] * write[:, :, None, :]
            memory_v = memory_v.to(dtype) * decay[..., None] + write[..., None] * v[:, :, None, :]
        queries = call.q.to(dtype).unflatten(1, (k.shape[1], -1)) * call.scale  # [B, H, R, K]
        o = READOUTS[call.readout].apply(queries @ memory_k) @ memory_v
        return o.flatten(1, 2).to(call.q.dtype), SlotState(memory_k, memory_v)
