"""One token of gated slot attention by one kernel.

A program owns the memories of one head of one row. It could be more than one, as keys and values fall into blocks; but
the weights of the slots need the scores of all keys, so the value side would wait for every other program of the head,
in a second kernel. As it is, each number of the state is read once and written once, by the same program: so the state
may be updated in place, without a race and without atomics.

Shape letters: BR, BK, BV, BM sides of blocks, R queries per key/value head; B, H, K, V, M as always.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gsa.ops.calls import StepCall, sums_dtype
from gsa.ops.state import SlotState
from gsa.ops.triton.gates import one_minus_exp
from gsa.ops.triton.gates import readout as weights_of
from gsa.ops.triton.launch import launch

BLOCK_BYTES = 32 << 10
"""Of the products [BR, BK, BM] or [BR, BM, BV] that are added up at a time: 32 fp32 numbers a thread."""
WARPS = 8


@triton.jit
def one_token(
    q,
    k,
    v,
    g,
    s,
    before_k,
    before_v,
    after_k,
    after_v,
    o,
    scale,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    g_row,
    g_head,
    s_row,
    s_head,
    H,
    R,
    K,
    V,
    M,
    READOUT: tl.constexpr,
    BR: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    BM: tl.constexpr,
):
    """Outputs o [B, H * R, V] and the memories after the token, [B, H, K, M] and [B, H, M, V]."""
    program = tl.program_id(0).to(tl.int64)
    row, head = program // H, program % H
    sums: tl.constexpr = after_k.dtype.element_ty
    slots = tl.arange(0, BM)
    queries = tl.arange(0, BR)

    gate = tl.load(g + row * g_row + head * g_head + slots, mask=slots < M, other=0.0).to(sums)
    decay = tl.exp(gate)
    if s is None:
        write = one_minus_exp(gate)
    else:
        write = tl.load(s + row * s_row + head * s_head + slots, mask=slots < M, other=0.0).to(sums)

    scores = tl.zeros([BR, BM], sums)
    for start in range(0, K, BK):
        features = start + tl.arange(0, BK)
        inside = (features < K)[:, None] & (slots < M)[None, :]
        place = program * K * M + features[:, None] * M + slots[None, :]
        key = tl.load(k + row * k_row + head * k_head + features, mask=features < K, other=0.0).to(sums)
        memory = tl.load(before_k + place, mask=inside, other=0.0).to(sums)
        memory = memory * decay[None, :] + key[:, None] * write[None, :]
        tl.debug_barrier()  # of a small tile several warps hold the same entries: none may write before all have read
        tl.store(after_k + place, memory, mask=inside)
        query = tl.load(
            q + row * q_row + (head * R + queries)[:, None] * q_head + features[None, :],
            mask=(queries < R)[:, None] & (features < K)[None, :],
            other=0.0,
        ).to(sums)
        scores += tl.sum((query * scale)[:, :, None] * memory[None, :, :], 1)

    weights = weights_of(scores, M, READOUT)
    for start in range(0, V, BV):
        features = start + tl.arange(0, BV)
        inside = (slots < M)[:, None] & (features < V)[None, :]
        place = program * M * V + slots[:, None] * V + features[None, :]
        value = tl.load(v + row * v_row + head * v_head + features, mask=features < V, other=0.0).to(sums)
        memory = tl.load(before_v + place, mask=inside, other=0.0).to(sums)
        memory = memory * decay[:, None] + write[:, None] * value[None, :]
        tl.debug_barrier()  # of a small tile several warps hold the same entries: none may write before all have read
        tl.store(after_v + place, memory, mask=inside)
        tl.store(
            o + (program * R + queries)[:, None] * V + features[None, :],
            tl.sum(weights[:, :, None] * memory[None, :, :], 1),
            mask=(queries < R)[:, None] & (features < V)[None, :],
        )


def step(call: StepCall, *, inplace: bool) -> tuple[Tensor, SlotState]:
    """The output [B, HQ, V] for one token per row, and the state after it; in place, the call's own."""
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
