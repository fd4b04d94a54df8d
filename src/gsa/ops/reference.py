"""The paper's equations as a token loop: the definition every engine is compared with.

Nothing here is optimised. Gradients come from autograd; any dtype works; autocast does not reach in. All engines share
one signature: `recompute` is for those with a backward of their own, and changes nothing here.

Shape letters: B batch, T time, H key/value heads, R queries per key/value head (HQ = H * R),
K key width, V value width, M slots, N sequences; of the selective scan: E channels, S states of a channel.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from gsa.errors import raised_by
from gsa.ops.layout import sequence_bounds
from gsa.ops.readout import READOUTS
from gsa.ops.state import BoundedMemoryState, SlotState, compute_dtype

P = ParamSpec("P")
Result = TypeVar("Result")


def _operation(f: Callable[P, Result]) -> Callable[P, Result]:
    """f with its name in errors, and autocast off, which would round the matmuls of a token loop at every step."""

    @wraps(f)
    def run(*args: P.args, **kwargs: P.kwargs) -> Result:
        first = args[0]
        assert isinstance(first, Tensor)
        with torch.autocast(first.device.type, enabled=False), raised_by(f.__name__):
            return f(*args, **kwargs)

    return run


@_operation
def gated_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gk: Tensor | None,
    gv: Tensor | None,
    *,
    scale: float,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    recompute: bool = True,
) -> tuple[Tensor, Tensor]:
    """Outputs [B, T, HQ, V] and final states [N, H, K, V] of gated linear attention, token by token."""
    dtype, out_dtype = compute_dtype(q.dtype), q.dtype
    q, k, v = q.to(dtype) * scale, k.to(dtype), v.to(dtype)
    H, K, V = k.shape[2], k.shape[3], v.shape[3]
    q = q.unflatten(2, (H, -1))  # [B, T, H, R, K]
    decay_k = torch.ones_like(k) if gk is None else gk.to(dtype).exp()
    decay_v = torch.ones_like(v) if gv is None else gv.to(dtype).exp()

    lanes, final = [], []
    for n, (b, start, stop) in enumerate(sequence_bounds(q.shape[0], q.shape[1], cu_seqlens)):
        S = q.new_zeros(H, K, V) if initial_state is None else initial_state[n].to(dtype)
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
def gated_slot_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    s: Tensor | None,
    *,
    scale: float,
    readout: str,
    initial_state: SlotState | None,
    cu_seqlens: Tensor | None,
    recompute: bool = True,
) -> tuple[Tensor, SlotState]:
    """Outputs [B, T, HQ, V] and final slot memories of gated slot attention (paper, eq. 5), token by token."""
    dtype, out_dtype = compute_dtype(q.dtype), q.dtype
    q, k, v, g = q.to(dtype) * scale, k.to(dtype), v.to(dtype), g.to(dtype)
    alpha = g.exp()
    write = -torch.expm1(g) if s is None else s.to(dtype)  # 1 - alpha
    f = READOUTS[readout].apply
    H, K, V, M = k.shape[2], k.shape[3], v.shape[3], g.shape[3]
    q = q.unflatten(2, (H, -1))  # [B, T, H, R, K]

    lanes, final_k, final_v = [], [], []
    for n, (b, start, stop) in enumerate(sequence_bounds(q.shape[0], q.shape[1], cu_seqlens)):
        if initial_state is None:
            Kt, Vt = q.new_zeros(H, K, M), q.new_zeros(H, M, V)
        else:
            Kt, Vt = initial_state.k[n].to(dtype), initial_state.v[n].to(dtype)
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
    return o, SlotState(last_k, torch.stack(final_v) if final_v else q.new_zeros(0, H, M, V))


@_operation
def attention_with_bounded_memory(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    *,
    normalise: bool,
    scale: float,
    initial_state: BoundedMemoryState | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, BoundedMemoryState]:
    """Outputs [B, T, HQ, V] and final states of ABC (paper, eq. 2 and 3), token by token."""
    dtype, out_dtype = compute_dtype(q.dtype), q.dtype
    q, k, v, w = q.to(dtype) * scale, k.to(dtype), v.to(dtype), w.to(dtype)
    H, K, V, M = k.shape[2], k.shape[3], v.shape[3], w.shape[3]
    q = q.unflatten(2, (H, -1))  # [B, T, H, R, K]

    lanes, final_k, final_v, final_z = [], [], [], []
    for n, (b, start, stop) in enumerate(sequence_bounds(q.shape[0], q.shape[1], cu_seqlens)):
        if initial_state is None:
            Kt, Vt, log_z = q.new_zeros(H, K, M), q.new_zeros(H, M, V), q.new_full((H, M), -torch.inf)
        else:
            Kt, Vt, log_z = (x[n].to(dtype) for x in initial_state)
        rows = []
        for t in range(start, stop):
            silent = w[b, t].isneginf()  # alpha = 0: nothing is written
            logit = w[b, t].masked_fill(silent, 0.0)
            # z_t = sum_{j<=t} alpha_j with alpha = exp(w), kept as a logarithm
            previous, log_z = log_z, torch.where(silent, log_z, torch.logaddexp(log_z, logit))
            # phi_t = alpha_t / z_t
            phi = torch.where(silent, 0.0, (logit - log_z.masked_fill(silent, 0.0)).exp())
            if normalise:
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
    return o, BoundedMemoryState(last_k, last_v, torch.stack(final_z) if final_z else q.new_zeros(0, H, M))


@_operation
def selective_scan(
    u: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Outputs [B, T, E] and final states [N, E, S] of Mamba's selective scan, token by token."""
    dtype, out_dtype, shape = compute_dtype(u.dtype), u.dtype, u.shape
    u, dt, A, B, C = (x.to(dtype) for x in (u, dt, A, B, C))

    lanes, final = [], []
    for n, (b, start, stop) in enumerate(sequence_bounds(shape[0], shape[1], cu_seqlens)):
        h = torch.zeros_like(A) if initial_state is None else initial_state[n].to(dtype)
        for t in range(start, stop):
            # h_t = exp(dt_t A) h_{t-1} + dt_t u_t (x) B_t
            h = (dt[b, t, :, None] * A).exp() * h + (dt[b, t] * u[b, t])[:, None] * B[b, t]
            # y_t = h_t C_t
            lanes.append(h @ C[b, t])
        final.append(h)
    y = torch.stack(lanes).reshape(shape) if lanes else u.new_zeros(shape)
    return y.to(out_dtype), torch.stack(final) if final else A.new_zeros(0, *A.shape)


def _assemble(
    lanes: list[Tensor], final: list[Tensor], q: Tensor, V: int, dtype: torch.dtype, state_shape: tuple[int, int, int]
) -> tuple[Tensor, Tensor]:
    """Outputs of the single sequences laid back into [B, T, HQ, V], and their states stacked."""
    B, T, H, R, _ = q.shape
    o = torch.cat(lanes).reshape(B, T, H * R, V) if lanes else q.new_zeros(B, T, H * R, V)
    states = torch.stack(final) if final else q.new_zeros(0, *state_shape)
    return o.to(dtype), states
