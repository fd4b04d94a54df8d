"""One token of gated slot attention by one kernel.

Shape letters: BR, BK, BV, BM sides of blocks; B, H, K, V, M as always.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from gsa.ops.calls import StepCall, sums_dtype
from gsa.ops.gates import refuse_gates
from gsa.ops.state import SlotState
from gsa.ops.triton.jit.one_token import one_token
from gsa.ops.triton.launch import launch

BLOCK_BYTES = 32 << 10
"""Size of the products [BR, BK, BM] or [BR, BM, BV] that are summed at a time: 32 fp32 numbers per thread."""
WARPS = 8


def step(call: StepCall, *, inplace: bool) -> tuple[Tensor, SlotState]:
    """The output [B, HQ, V] for one token per row, and the state after it; in place, the call's own."""
    if call.check:
        refuse_gates(g=call.g)
    dtype, scale = sums_dtype(call), call.scale
    (B, HQ, K), (H, V), M = call.q.shape, call.v.shape[1:], call.g.shape[2]
    memories = SlotState(call.memory_k, call.memory_v)
    after = memories if inplace else SlotState(*(x.new_empty(x.shape, dtype=dtype) for x in memories))
    assert all(x.is_contiguous() and x.dtype == dtype for x in after)
    o = call.q.new_empty((B, HQ, V))
    with torch.no_grad():
        q, k, v, g = map(_readable, (call.q, call.k, call.v, call.g))
        s = None if call.s is None else _readable(call.s)
        before_k, before_v = (x.resolve_neg().contiguous() for x in memories)
        if dtype == torch.float64:
            q, scale = q * scale, 1.0  # numbers reach a kernel in single precision
    BR, BM = triton.next_power_of_2(HQ // H), max(16, triton.next_power_of_2(M))
    fit = max(1, BLOCK_BYTES // (dtype.itemsize * BR * BM))
    launch(
        one_token,
        B * H,
        WARPS,
        1,
        q=q,
        k=k,
        v=v,
        g=g,
        s=s,
        before_k=before_k,
        before_v=before_v,
        after_k=after.k,
        after_v=after.v,
        o=o,
        scale=scale,
        q_row=q.stride(0),
        q_head=q.stride(1),
        k_row=k.stride(0),
        k_head=k.stride(1),
        v_row=v.stride(0),
        v_head=v.stride(1),
        g_row=g.stride(0),
        g_head=g.stride(1),
        s_row=0 if s is None else s.stride(0),
        s_head=0 if s is None else s.stride(1),
        H=H,
        R=HQ // H,
        K=K,
        V=V,
        M=M,
        READOUT=call.readout,
        BR=BR,
        BK=min(fit, triton.next_power_of_2(K)),
        BV=min(fit, triton.next_power_of_2(V)),
        BM=BM,
    )
    return o, after


def _readable(x: Tensor) -> Tensor:
    """x as kernels take it: features side by side."""
    x = x.resolve_neg()
    return x if x.stride(-1) == 1 else x.contiguous()
