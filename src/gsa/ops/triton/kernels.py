"""The kernels put together: gated linear attention and gated slot attention, forward and backward.

Gated slot attention is two passes of gated linear attention. They share what is written to the slots; between them lie
the slot scores.

Shape letters: B batch, T time, H key/value heads, K, V widths, M slots, N sequences.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from gsa.ops.operators import Shape, laid_out_like
from gsa.ops.triton.backward_pass import Gradients, backward
from gsa.ops.triton.call import Call, early
from gsa.ops.triton.forward_pass import Pass
from gsa.ops.triton.jit.readout import differentiate_readout
from gsa.ops.triton.launch import launch
from gsa.ops.triton.plan import power_of_two

ENTRIES_AT_ONCE = 2048


def kept_shape(
    q: Tensor, v: Tensor, cu_seqlens: Tensor | None, keep: str, heads: int, rows: int, columns: int
) -> Shape:
    """Of the states [rows, columns] that forward keeps."""
    return Call(q, v, cu_seqlens, heads).kept_shape(keep, rows, columns)


def _scaled_before(q: Tensor, scale: float) -> tuple[Tensor, float, float]:
    """Queries, the scale for the kernels to apply, and the factor that the gradient of q is still to be multiplied by.

    Triton passes numbers to kernels in fp32. In fp64 the queries are therefore scaled here, and the kernels get 1.
    """
    return (q * scale, 1.0, scale) if q.dtype == torch.float64 else (q, scale, 1.0)


def gla_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gk: Tensor | None,
    gv: Tensor | None,
    initial: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    keep: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """o [B, T, HQ, V], final states [N, H, K, V], kept states."""
    q, scale, _ = _scaled_before(q, scale)
    x = _linear_pass(q, k, v, gk, gv, cu_seqlens, scale)
    return x.forward(_dense(initial), keep, q.new_empty(*q.shape[:3], v.shape[3]))


def _linear_pass(
    q: Tensor, k: Tensor, v: Tensor, gk: Tensor | None, gv: Tensor | None, cu_seqlens: Tensor | None, scale: float
) -> Pass:
    call = Call(q, v, cu_seqlens, k.shape[2])
    keys = early(call, k.contiguous(), _dense(gk), k.shape[3])
    values = early(call, v.contiguous(), _dense(gv), v.shape[3])
    return Pass(call, q.contiguous(), keys, values, scale)


def _dense(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def _like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def gla_backward(
    do: Tensor,
    dfinal: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gk: Tensor | None,
    gv: Tensor | None,
    initial: Tensor | None,
    cu_seqlens: Tensor | None,
    kept: Tensor,
    scale: float,
    keep: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor]:
    """Gradients of q, k, v, gk, gv and the initial states."""
    queries, scale, after = _scaled_before(q, scale)
    x = _linear_pass(queries, k, v, gk, gv, cu_seqlens, scale)
    dq, dk, dv = map(_like, (q, k, v))
    dgk, dgv = (None if g is None else _like(g) for g in (gk, gv))
    grads = Gradients(dq, dk, dv, dgk, dgv)
    dinitial = backward(x, do.contiguous(), _dense(dfinal), _dense(initial), kept, keep, grads)
    dq = dq if after == 1 else dq * after
    dgk, dgv = (None if g is None or dg is None else laid_out_like(g, dg) for g, dg in ((gk, dgk), (gv, dgv)))
    return laid_out_like(q, dq), laid_out_like(k, dk), laid_out_like(v, dv), dgk, dgv, dinitial


def _slot_passes(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    s: Tensor | None,
    slots: Tensor,
    cu_seqlens: Tensor | None,
    scale: float,
    readout: str,
) -> tuple[Pass, Pass]:
    """Queries find their slots, with the gate on the value side; slot weights read the values, with it on the other."""
    call = Call(q, v, cu_seqlens, k.shape[2])
    writes = early(call, _dense(s), g.contiguous(), g.shape[3])
    keys, values = (early(call, x.contiguous(), None, x.shape[3]) for x in (k, v))
    find = Pass(call, q.contiguous(), keys, writes, scale)
    return find, Pass(call, slots, writes, values, 1.0, readout)


def gsa_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    s: Tensor | None,
    initial_k: Tensor | None,
    initial_v: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    readout: str,
    keep: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """o [B, T, HQ, V], both final memories, slot scores [B, T, HQ, M] and kept states of both passes."""
    q, scale, _ = _scaled_before(q, scale)
    slots = Call(q, v, cu_seqlens, k.shape[2]).late(g.shape[3])
    find, fetch = _slot_passes(q, k, v, g, s, slots, cu_seqlens, scale, readout)
    _, final_k, kept_k = find.forward(_dense(initial_k), keep, slots)
    o, final_v, kept_v = fetch.forward(_dense(initial_v), keep, q.new_empty(*q.shape[:3], v.shape[3]))
    return o, final_k, final_v, slots.new_empty(0) if keep == "nothing" else slots, kept_k, kept_v


def gsa_backward(
    do: Tensor,
    dfinal_k: Tensor | None,
    dfinal_v: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    s: Tensor | None,
    initial_k: Tensor | None,
    initial_v: Tensor | None,
    cu_seqlens: Tensor | None,
    slots: Tensor,
    kept_k: Tensor,
    kept_v: Tensor,
    scale: float,
    readout: str,
    keep: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor, Tensor]:
    """Gradients of q, k, v, g, s and both initial memories."""
    queries, scale, after = _scaled_before(q, scale)
    find, fetch = _slot_passes(queries, k, v, g, s, slots, cu_seqlens, scale, readout)
    call, M = fetch.call, g.shape[3]
    dweights, dgate = call.late(M), call.empty(*g.shape)
    dwrite = None if s is None else call.empty(*s.shape)
    dq, dk, dv, dg, ds = *map(_like, (q, k, v, g)), None if s is None else _like(s)
    grads = Gradients(dweights, dwrite, dv, dgate, None)
    dinitial_v = backward(fetch, do.contiguous(), _dense(dfinal_v), _dense(initial_v), kept_v, keep, grads)

    dslots = torch.empty_like(slots)
    rows, BM = call.tokens * call.H * call.R, power_of_two(M)
    at_once = max(1, min(16, ENTRIES_AT_ONCE // BM))
    launch(
        differentiate_readout,
        -(-rows // at_once),
        4,
        1,
        slots=slots,
        dweights=dweights,
        dslots=dslots,
        scale=scale,
        rows=rows,
        M=M,
        READOUT=readout,
        ROWS=at_once,
        BM=BM,
    )
    find = replace(find, scale=1.0)  # dslots has it already
    grads = Gradients(dq, dk, ds, None, dg, dwrite, dgate)
    dinitial_k = backward(find, dslots, _dense(dfinal_k), _dense(initial_k), kept_k, keep, grads)
    dq = dq if after == 1 else dq * after
    dq, dk, dv, dg = map(laid_out_like, (q, k, v, g), (dq, dk, dv, dg))
    ds = None if s is None or ds is None else laid_out_like(s, ds)
    return dq, dk, dv, dg, ds, dinitial_k, dinitial_v
