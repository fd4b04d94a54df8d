"""One token by one kernel, as operators: with a new state, and in place.

Shape letters: BR, BK, BV, BM sides of blocks; B, H, K, V, M as always.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from gsa.ops.state import SlotState, compute_dtype
from gsa.ops.step_operators import register_step
from gsa.ops.triton.jit.one_token import one_token
from gsa.ops.triton.launch import launch

BLOCK_BYTES = 32 << 10
"""Size of the products [BR, BK, BM] or [BR, BM, BV] that are summed at a time: 32 fp32 numbers per thread."""
WARPS = 8


def gsa_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    s: Tensor | None,
    before: SlotState,
    after: SlotState,
    scale: float,
    readout: str,
) -> Tensor:
    """o [B, HQ, V] for one token per row; fills `after`, dense and of the dtype sums are carried in, maybe `before`."""
    dtype = compute_dtype(q.dtype)
    assert all(x.is_contiguous() and x.dtype == dtype for x in after)
    (B, HQ, K), (H, V), M = q.shape, v.shape[1:], g.shape[2]
    o = torch.empty((B, HQ, V), dtype=q.dtype, device=q.device)
    with torch.no_grad():
        q, k, v, g = map(_readable, (q, k, v, g))
        s = None if s is None else _readable(s)
        before_k, before_v = (x.resolve_neg().contiguous() for x in before)
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
        READOUT=readout,
        BR=BR,
        BK=min(fit, triton.next_power_of_2(K)),
        BV=min(fit, triton.next_power_of_2(V)),
        BM=BM,
    )
    return o


def _readable(x: Tensor) -> Tensor:
    """x as kernels take it: features side by side."""
    x = x.resolve_neg()
    return x if x.stride(-1) == 1 else x.contiguous()


def _beside(memory: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty(memory.shape, dtype=dtype, device=memory.device)


step = register_step("triton", gsa_step, _beside)
