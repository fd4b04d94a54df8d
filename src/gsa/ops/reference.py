"""The paper's equations as a token loop: the definition every engine is compared with.

Nothing here is optimised. Gradients come from autograd, so nothing is saved for them here, and every derivative that
torch has exists: second ones, forward mode, all transforms of torch.func. Any dtype works; autocast does not reach in.

Shape letters: B batch, T time, H key/value heads, R queries per key/value head (HQ = H * R),
K key width, V value width, M slots, N sequences; of the selective scan: E channels, S states of a channel.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from gsa.errors import raised_by
from gsa.ops.calls import (
    BoundedMemoryCall,
    JoinedSlotsCall,
    LinearCall,
    ScanCall,
    SlotCall,
    Tensors,
    WindowCall,
    sums_dtype,
)
from gsa.ops.gates import refuse_gates, refuse_logits, refuse_positions, refuse_rates, refuse_strengths
from gsa.ops.memory import require_memory
from gsa.ops.portable_matvec import matvec
from gsa.ops.portable_slots import EMPTY
from gsa.ops.portable_step import gated_slot_attention_step
from gsa.ops.readout import READOUTS
from gsa.ops.sequences import sequence_bounds
from gsa.ops.transforms import recorded

__all__ = [
    "attention_with_bounded_memory",
    "gated_linear_attention",
    "gated_slot_attention",
    "gated_slot_attention_step",
    "joined_slots",
    "matvec",
    "selective_scan",
    "window_attention",
]


def _operation(f: Callable[[Any], Tensors]) -> Callable[[Any], Tensors]:
    """f with its name in errors, and autocast off, which would round the matmuls of a token loop at every step."""

    @wraps(f)
    def run(call: Any) -> Tensors:
        with torch.autocast(call[0].device.type, enabled=False), raised_by(f.__name__):
            if not recorded():
                require_memory(call._asdict())
            return f(call)

    return run


@_operation
def gated_linear_attention(call: LinearCall) -> Tensors:
    """Outputs [B, T, HQ, V] and final states [N, H, K, V] of gated linear attention, token by token."""
    if call.check:
        refuse_gates(gk=call.gk, gv=call.gv)
    dtype, out_dtype = sums_dtype(call), call.q.dtype
    q, k, v = call.q.to(dtype) * call.scale, call.k.to(dtype), call.v.to(dtype)
    H, K, V = k.shape[2], k.shape[3], v.shape[3]
    q = q.unflatten(2, (H, -1))  # [B, T, H, R, K]
    decay_k = torch.ones_like(k) if call.gk is None else call.gk.to(dtype).exp()
    decay_v = torch.ones_like(v) if call.gv is None else call.gv.to(dtype).exp()

    lanes, final = [], []
    for n, (b, start, stop) in enumerate(sequence_bounds(q.shape[0], q.shape[1], call.cu_seqlens)):
        S = q.new_zeros(H, K, V) if call.initial is None else call.initial[n].to(dtype)
        rows = []
        for t in range(start, stop):
            # S_t = diag(exp gk_t) S_{t-1} diag(exp gv_t) + k_t (x) v_t
            S = decay_k[b, t, :, :, None] * S * decay_v[b, t, :, None, :] + k[b, t, :, :, None] * v[b, t, :, None, :]
            # o_t = S_t^T q_t
            rows.append(q[b, t] @ S)
        lanes.append(torch.stack(rows) if rows else q[b, :0] @ S)
        final.append(S)
    return _assemble(lanes, final, q, V, out_dtype, (H, K, V))


@_operation
def gated_slot_attention(call: SlotCall) -> Tensors:
    """Outputs [B, T, HQ, V] and final memories [N, H, K, M], [N, H, M, V] of gated slot attention (paper, eq. 5)."""
    if call.check:
        refuse_gates(g=call.g)
    dtype, out_dtype = sums_dtype(call), call.q.dtype
    q, k, v, g = call.q.to(dtype) * call.scale, call.k.to(dtype), call.v.to(dtype), call.g.to(dtype)
    alpha = g.exp()
    write = -torch.expm1(g) if call.s is None else call.s.to(dtype)  # 1 - alpha
    f = READOUTS[call.readout].apply
    H, K, V, M = k.shape[2], k.shape[3], v.shape[3], g.shape[3]
    q = q.unflatten(2, (H, -1))  # [B, T, H, R, K]

    lanes, final_k, final_v = [], [], []
    for n, (b, start, stop) in enumerate(sequence_bounds(q.shape[0], q.shape[1], call.cu_seqlens)):
        Kt = q.new_zeros(H, K, M) if call.initial_k is None else call.initial_k[n].to(dtype)
        Vt = q.new_zeros(H, M, V) if call.initial_v is None else call.initial_v[n].to(dtype)
        rows = []
        for t in range(start, stop):
            a, w = alpha[b, t], write[b, t]
            # K~_t = Diag(alpha_t) K~_{t-1} + (1 - alpha_t) (x) k_t     (held transposed, [K, M])
            Kt = Kt * a[:, None, :] + k[b, t, :, :, None] * w[:, None, :]
            # V~_t = Diag(alpha_t) V~_{t-1} + (1 - alpha_t) (x) v_t
            Vt = a[:, :, None] * Vt + w[:, :, None] * v[b, t, :, None, :]
            # o_t = V~_t^T softmax(K~_t q_t)
            rows.append(f(q[b, t] @ Kt) @ Vt)
        lanes.append(torch.stack(rows) if rows else f(q[b, :0] @ Kt) @ Vt)
        final_k.append(Kt)
        final_v.append(Vt)
    o, last_k = _assemble(lanes, final_k, q, V, out_dtype, (H, K, M))
    return o, last_k, torch.stack(final_v) if final_v else q.new_zeros(0, H, M, V)


@_operation
def attention_with_bounded_memory(call: BoundedMemoryCall) -> Tensors:
    """Outputs [B, T, HQ, V] of ABC (paper, eq. 2 and 3), final memories, and the log of their normaliser [N, H, M]."""
    if call.check:
        refuse_logits(call.w, call.initial_log_z)
    dtype, out_dtype = sums_dtype(call), call.q.dtype
    q, k, v, w = call.q.to(dtype) * call.scale, call.k.to(dtype), call.v.to(dtype), call.w.to(dtype)
    H, K, V, M = k.shape[2], k.shape[3], v.shape[3], w.shape[3]
    q = q.unflatten(2, (H, -1))  # [B, T, H, R, K]

    lanes, final_k, final_v, final_z = [], [], [], []
    for n, (b, start, stop) in enumerate(sequence_bounds(q.shape[0], q.shape[1], call.cu_seqlens)):
        Kt = q.new_zeros(H, K, M) if call.initial_k is None else call.initial_k[n].to(dtype)
        Vt = q.new_zeros(H, M, V) if call.initial_v is None else call.initial_v[n].to(dtype)
        log_z = q.new_full((H, M), -torch.inf) if call.initial_log_z is None else call.initial_log_z[n].to(dtype)
        rows = []
        for t in range(start, stop):
            silent = w[b, t].isneginf()  # alpha = 0: nothing is written
            logit = w[b, t].masked_fill(silent, 0.0)
            # z_t = sum_{j<=t} alpha_j with alpha = exp(w), kept as a logarithm
            previous, log_z = log_z, torch.where(silent, log_z, torch.logaddexp(log_z, logit))
            # phi_t = alpha_t / z_t
            phi = torch.where(silent, 0.0, (logit - log_z.masked_fill(silent, 0.0)).exp())
            if call.normalise:
                # the running average: what is there shrinks by z_{t-1} / z_t
                stays = torch.where(silent, 1.0, (previous - log_z.masked_fill(silent, 0.0)).exp())
                Kt, Vt = Kt * stays[:, None, :], stays[:, :, None] * Vt
            # K~_t = K~_{t-1} + phi_t (x) k_t,   V~_t = V~_{t-1} + phi_t (x) v_t
            Kt = Kt + k[b, t, :, :, None] * phi[:, None, :]
            Vt = Vt + phi[:, :, None] * v[b, t, :, None, :]
            # o_t = V~_t^T softmax(K~_t q_t)
            rows.append((q[b, t] @ Kt).softmax(-1) @ Vt)
        lanes.append(torch.stack(rows) if rows else (q[b, :0] @ Kt).softmax(-1) @ Vt)
        final_k.append(Kt)
        final_v.append(Vt)
        final_z.append(log_z)
    o, last_k = _assemble(lanes, final_k, q, V, out_dtype, (H, K, M))
    last_v = torch.stack(final_v) if final_v else q.new_zeros(0, H, M, V)
    return o, last_k, last_v, torch.stack(final_z) if final_z else q.new_zeros(0, H, M)


@_operation
def selective_scan(call: ScanCall) -> Tensors:
    """Outputs [B, T, E] and final states [N, E, S] of Mamba's selective scan, token by token."""
    if call.check:
        refuse_rates(call.A, call.dt)
    dtype, out_dtype, shape = sums_dtype(call), call.u.dtype, call.u.shape
    u, dt, A, B, C = (x.to(dtype) for x in (call.u, call.dt, call.A, call.B, call.C))

    lanes, final = [], []
    for n, (b, start, stop) in enumerate(sequence_bounds(shape[0], shape[1], call.cu_seqlens)):
        h = torch.zeros_like(A) if call.initial is None else call.initial[n].to(dtype)
        for t in range(start, stop):
            # h_t = exp(dt_t A) h_{t-1} + dt_t u_t (x) B_t
            h = (dt[b, t, :, None] * A).exp() * h + (dt[b, t] * u[b, t])[:, None] * B[b, t]
            # y_t = h_t C_t
            lanes.append(h @ C[b, t])
        final.append(h)
    y = torch.stack(lanes).reshape(shape) if lanes else u.new_zeros(shape)
    return y.to(out_dtype), torch.stack(final) if final else A.new_zeros(0, *A.shape)


@_operation
def window_attention(call: WindowCall) -> Tensors:
    """Outputs [B, T, HQ, V] of softmax attention to the last tokens and to sinks, and log-sum-exps [B, T, HQ]."""
    if call.check:
        refuse_positions(call.position)
    dtype, P = sums_dtype(call), call.past
    q, k, v = call.q.to(dtype) * call.scale, call.k.to(dtype), call.v.to(dtype)
    H, V = v.shape[2:]
    shape = q.shape[:3]
    q = q.unflatten(2, (H, -1))  # [B, T, H, R, K]

    outputs, sums = [], []
    for n, (b, start, stop) in enumerate(sequence_bounds(q.shape[0], q.shape[1], call.cu_seqlens)):
        before = P if call.cu_seqlens is None else (n + 1) * P  # keys of this row that are not of queries up to here
        position = P if call.position is None else int(call.position[n])
        first = start + before - min(P, position)
        for t in range(start, stop):
            # s_j = q_t . k_j for the last `window` tokens j, t among them
            seen = slice(max(first, t + before + 1 - call.window), t + before + 1)
            s, values = torch.einsum("hrk,jhk->hrj", q[b, t], k[b, seen]), v[b, seen]
            if call.sink_q is not None and call.sink_k is not None and call.sink_v is not None:
                # and for the sinks that have left the window
                left = min(max(position + t - start - call.window + 1, 0), call.sink_k.shape[1])
                asked = call.sink_q[b, t].to(dtype).unflatten(0, (H, -1)) * call.scale
                s = torch.cat([s, torch.einsum("hrk,jhk->hrj", asked, call.sink_k[n, :left].to(dtype))], -1)
                values = torch.cat([values, call.sink_v[n, :left].to(dtype)])
            # o_t = sum_j exp(s_j) v_j / sum_j exp(s_j)
            outputs.append(torch.einsum("hrj,jhv->hrv", s.softmax(-1), values))
            sums.append(s.logsumexp(-1))
    if not outputs:
        return call.q.new_zeros(*shape, V), q.new_zeros(shape)
    return torch.stack(outputs).reshape(*shape, V).to(call.q.dtype), torch.stack(sums).reshape(shape)


@_operation
def joined_slots(call: JoinedSlotsCall) -> Tensors:
    """Outputs [B, T, HQ, V] of slots in one softmax with what is near, and final memories K~, V~, n."""
    if call.check:
        refuse_gates(g=call.g)
        refuse_strengths(call.s)
    dtype, out_dtype = sums_dtype(call), call.q.dtype
    q, k, v = call.q.to(dtype) * call.scale, call.k.to(dtype), call.v.to(dtype)
    g, s = call.g.to(dtype), call.s.to(dtype)
    H, K, V, M = k.shape[2], k.shape[3], v.shape[3], g.shape[3]
    q = q.unflatten(2, (H, -1))  # [B, T, H, R, K]
    near, near_lse = call.near.to(dtype).unflatten(2, (H, -1)), call.near_lse.to(dtype).unflatten(2, (H, -1))
    numbers = (x.to(dtype).unflatten(0, (H, -1))[..., None] for x in (call.slot_scale, call.slot_mass, call.slot_bias))
    t_, c, b_ = numbers  # [H, R, 1]

    lanes, finals = [], []
    for n, (b, start, stop) in enumerate(sequence_bounds(q.shape[0], q.shape[1], call.cu_seqlens)):
        Kt = q.new_zeros(H, K, M) if call.initial_k is None else call.initial_k[n].to(dtype)
        Vt = q.new_zeros(H, M, V) if call.initial_v is None else call.initial_v[n].to(dtype)
        mass = q.new_zeros(H, M) if call.initial_mass is None else call.initial_mass[n].to(dtype)
        rows = []
        for t in range(start, stop):
            a, w = g[b, t].exp(), s[b, t]
            # K~ = a K~ + s (x) k,   V~ = a V~ + s (x) v,   n = a n + s
            Kt = Kt * a[:, None, :] + k[b, t, :, :, None] * w[:, None, :]
            Vt = a[:, :, None] * Vt + w[:, :, None] * v[b, t, :, None, :]
            mass = a * mass + w
            # l = e^t q . K~ / n + c log n + b, and -inf while n = 0
            empty = mass <= EMPTY
            some = torch.where(empty, 1.0, mass)[:, None]
            x = (t_.exp() * (q[b, t] @ Kt) / some + c * some.log() + b_).masked_fill(empty[:, None], -torch.inf)
            # o = [near e^near_lse + sum of V~ e^l / n] / the sum of the same exponentials
            p = torch.cat([near_lse[b, t, :, :, None], x], -1).softmax(-1)
            rows.append(p[..., :1] * near[b, t] + (p[..., 1:] / some) @ Vt)
        lanes.append(torch.stack(rows) if rows else near[b, :0])
        finals.append((Kt, Vt, mass))
    o = torch.cat(lanes).reshape(call.near.shape) if lanes else near.new_zeros(call.near.shape)
    if not finals:
        return o.to(out_dtype), *(q.new_zeros(shape) for shape in call.result_shapes()[1:])
    return o.to(out_dtype), *(torch.stack(part) for part in zip(*finals, strict=True))


def _assemble(
    lanes: list[Tensor], final: list[Tensor], q: Tensor, V: int, dtype: torch.dtype, state_shape: tuple[int, int, int]
) -> tuple[Tensor, Tensor]:
    """Outputs of the single sequences laid back into [B, T, HQ, V], and their states stacked."""
    B, T, H, R, _ = q.shape
    o = torch.cat(lanes).reshape(B, T, H * R, V) if lanes else q.new_zeros(B, T, H * R, V)
    states = torch.stack(final) if final else q.new_zeros(0, *state_shape)
    return o.to(dtype), states
