"""The kernel that decodes one token.

A program owns the memories of one head of one row. Several programs could share a head, each with a block of keys or
values; but the weights of the slots need the scores over all keys, so the value side would have to wait for all of
them, in a second kernel. With one program, each number of the state is read once and written once by the same program,
so the state can be updated in place without races or atomics.

Shape letters: BR, BK, BV, BM sides of blocks, R queries per key/value head; B, H, K, V, M as always.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gsa.ops.triton.jit.decay import one_minus_exp
from gsa.ops.triton.jit.readout import readout as weights_of


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
