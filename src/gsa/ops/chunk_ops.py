"""The chunk engine as the rest of the package sees it: custom operators with autograd and fake kernels.

As opaque operators the hand-written backward is used by autograd, and torch.compile leaves them whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gsa.errors import GSAError, raised_by
from gsa.ops import chunk
from gsa.ops.scan import kept_shape
from gsa.ops.scratch import trim_scratch
from gsa.ops.state import SlotState, compute_dtype


def _keep(operation: str, recompute: bool, *inputs: Tensor | None) -> str:
    """What the forward pass must leave for a backward pass, if there can be one."""
    if not torch.compiler.is_compiling() and torch.autograd.forward_ad._current_level >= 0:
        # The operators know backward mode only, and would pass on no derivative at all.
        raise GSAError(f"{operation}: the chunk engine has no forward-mode derivative; use backend='reference'")
    if not torch.is_grad_enabled() or not any(x is not None and x.requires_grad for x in inputs):
        return "nothing"
    return "marks" if recompute else "states"


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
    keep = _keep("gated_linear_attention", recompute, q, k, v, gk, gv, initial_state)
    o, final, _ = _gla(q, k, v, gk, gv, initial_state, cu_seqlens, scale, keep)
    return o, final


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
    initial_k, initial_v = (None, None) if initial_state is None else initial_state
    keep = _keep("gated_slot_attention", recompute, q, k, v, g, s, initial_k, initial_v)
    o, final_k, final_v, *_ = _gsa(q, k, v, g, s, initial_k, initial_v, cu_seqlens, scale, readout, keep)
    return o, SlotState(final_k, final_v)


_GLA = "Tensor q, Tensor k, Tensor v, Tensor? gk, Tensor? gv, Tensor? initial, Tensor? cu_seqlens"
_GSA = "Tensor q, Tensor k, Tensor v, Tensor g, Tensor? s, Tensor? initial_k, Tensor? initial_v, Tensor? cu_seqlens"


def _operator(name: str, operation: str, inputs: str, outputs: int, compute: Callable[..., Any]) -> Any:
    """Registers `compute` as an operator; it runs at full precision whatever autocast says, and returns tensors."""

    def run(*args: Any) -> tuple[Tensor, ...]:
        first = args[0]
        try:
            with torch.autocast(first.device.type, enabled=False), raised_by(operation):
                results = compute(*args)
        finally:
            trim_scratch()
        return tuple(first.new_empty(0) if x is None else x for x in results)

    returns = ", ".join(["Tensor"] * outputs)
    return torch.library.custom_op(f"gsa::{name}", run, mutates_args=(), schema=f"({inputs}) -> ({returns})")


_gla = _operator("chunk_gla", "gated_linear_attention", f"{_GLA}, float scale, str keep", 3, chunk.gla_forward)
_gla_grad = _operator(
    "chunk_gla_backward",
    "gated_linear_attention",
    f"Tensor do, Tensor? dfinal, {_GLA}, Tensor kept, float scale, str keep",
    6,
    chunk.gla_backward,
)
_gsa = _operator(
    "chunk_gsa", "gated_slot_attention", f"{_GSA}, float scale, str readout, str keep", 6, chunk.gsa_forward
)
_gsa_grad = _operator(
    "chunk_gsa_backward",
    "gated_slot_attention",
    f"Tensor do, Tensor? dfinal_k, Tensor? dfinal_v, {_GSA}, "
    "Tensor slots, Tensor kept_k, Tensor kept_v, float scale, str readout, str keep",
    7,
    chunk.gsa_backward,
)


def _sequences(q: Tensor, cu_seqlens: Tensor | None) -> int:
    return q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1


def _like(x: Tensor | None, q: Tensor) -> Tensor:
    return q.new_empty(0) if x is None else torch.empty_like(x)


@_gla.register_fake
def _(q, k, v, gk, gv, initial, cu_seqlens, scale, keep):  # type: ignore[no-untyped-def]
    dtype, H, K, V = compute_dtype(q.dtype), k.shape[2], k.shape[3], v.shape[3]
    kept = kept_shape(chunk.plan_for(q, v, cu_seqlens), keep, H, K, V)
    return (
        q.new_empty(*q.shape[:3], V),
        q.new_empty((_sequences(q, cu_seqlens), H, K, V), dtype=dtype),
        q.new_empty(kept, dtype=dtype),
    )


@_gla_grad.register_fake
def _(do, dfinal, q, k, v, gk, gv, initial, cu_seqlens, kept, scale, keep):  # type: ignore[no-untyped-def]
    dinitial = q.new_empty((_sequences(q, cu_seqlens), k.shape[2], k.shape[3], v.shape[3]), dtype=kept.dtype)
    return *map(torch.empty_like, (q, k, v)), _like(gk, q), _like(gv, q), dinitial


@_gsa.register_fake
def _(q, k, v, g, s, initial_k, initial_v, cu_seqlens, scale, readout, keep):  # type: ignore[no-untyped-def]
    dtype, H, K, V, M = compute_dtype(q.dtype), k.shape[2], k.shape[3], v.shape[3], g.shape[3]
    N, plan = _sequences(q, cu_seqlens), chunk.plan_for(q, v, cu_seqlens)
    return (
        q.new_empty(*q.shape[:3], V),
        q.new_empty((N, H, K, M), dtype=dtype),
        q.new_empty((N, H, M, V), dtype=dtype),
        q.new_empty((0,) if keep == "nothing" else (*q.shape[:3], M), dtype=dtype),
        q.new_empty(kept_shape(plan, keep, H, K, M), dtype=dtype),
        q.new_empty(kept_shape(plan, keep, H, M, V), dtype=dtype),
    )


@_gsa_grad.register_fake
def _(do, dfk, dfv, q, k, v, g, s, ik, iv, cu_seqlens, slots, kept_k, kept_v, scale, readout, keep):  # type: ignore[no-untyped-def]
    N, H, K, V, M = _sequences(q, cu_seqlens), k.shape[2], k.shape[3], v.shape[3], g.shape[3]
    states = (q.new_empty(shape, dtype=kept_k.dtype) for shape in ((N, H, K, M), (N, H, M, V)))
    return *map(torch.empty_like, (q, k, v, g)), _like(s, q), *states


def _setup_gla(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.scale, ctx.keep = inputs
    ctx.save_for_backward(*tensors, output[2])
    ctx.set_materialize_grads(False)
    ctx.shape = output[0].shape


def _backward_gla(ctx: Any, do: Tensor | None, dfinal: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, gk, gv, initial, cu_seqlens, kept = ctx.saved_tensors
    do = q.new_zeros(ctx.shape) if do is None else do
    dq, dk, dv, dgk, dgv, dinitial = _gla_grad(
        do, dfinal, q, k, v, gk, gv, initial, cu_seqlens, kept, ctx.scale, ctx.keep
    )
    given = (dgk if gk is not None else None, dgv if gv is not None else None)
    return dq, dk, dv, *given, None if initial is None else dinitial, None, None, None


def _setup_gsa(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.scale, ctx.readout, ctx.keep = inputs
    ctx.save_for_backward(*tensors, *output[3:])
    ctx.set_materialize_grads(False)
    ctx.shape = output[0].shape


def _backward_gsa(
    ctx: Any, do: Tensor | None, dfinal_k: Tensor | None, dfinal_v: Tensor | None, *_: Tensor | None
) -> tuple[Tensor | None, ...]:
    q, k, v, g, s, initial_k, initial_v, *rest = ctx.saved_tensors
    do = q.new_zeros(ctx.shape) if do is None else do
    dq, dk, dv, dg, ds, dk0, dv0 = _gsa_grad(
        do, dfinal_k, dfinal_v, q, k, v, g, s, initial_k, initial_v, *rest, ctx.scale, ctx.readout, ctx.keep
    )
    given = tuple(None if x is None else dx for x, dx in ((s, ds), (initial_k, dk0), (initial_v, dv0)))
    return dq, dk, dv, dg, *given, None, None, None, None


_gla.register_autograd(_backward_gla, setup_context=_setup_gla)
_gsa.register_autograd(_backward_gsa, setup_context=_setup_gsa)
