"""How an engine that computes forward and backward by itself becomes part of torch: custom operators with autograd and
fake kernels.

As opaque operators the hand-written backward is used by autograd, and torch.compile leaves them whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from gsa.errors import GSAError, raised_by
from gsa.ops.layout import sequence_count
from gsa.ops.state import SlotState, compute_dtype

Shape = tuple[int, ...]


class Kernels(Protocol):
    """What an engine brings along; `keep` says what forward leaves for backward: "nothing", "marks" or "states"."""

    def gla_forward(
        self,
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

    def gla_backward(
        self,
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

    def gsa_forward(
        self,
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

    def gsa_backward(
        self,
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

    def kept_shape(
        self, q: Tensor, v: Tensor, cu_seqlens: Tensor | None, keep: str, heads: int, rows: int, columns: int
    ) -> Shape:
        """Of the states [rows, columns] kept by forward; from shapes alone, without reading cu_seqlens."""


class Operators(NamedTuple):
    """The engine as the rest of the package sees it, with the signatures of gsa.ops.reference."""

    gated_linear_attention: Callable[..., tuple[Tensor, Tensor]]
    gated_slot_attention: Callable[..., tuple[Tensor, SlotState]]


_GLA = "Tensor q, Tensor k, Tensor v, Tensor? gk, Tensor? gv, Tensor? initial, Tensor? cu_seqlens"
_GSA = "Tensor q, Tensor k, Tensor v, Tensor g, Tensor? s, Tensor? initial_k, Tensor? initial_v, Tensor? cu_seqlens"


def register(name: str, kernels: Kernels) -> Operators:
    """Registers gsa::{name}_gla, gsa::{name}_gsa and their backward operators."""
    gla, gsa = _register_gla(name, kernels), _register_gsa(name, kernels)

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
        keep = what_to_keep(name, "gated_linear_attention", recompute, q, k, v, gk, gv, initial_state)
        o, final, _ = gla(q, k, v, gk, gv, initial_state, cu_seqlens, scale, keep)
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
        keep = what_to_keep(name, "gated_slot_attention", recompute, q, k, v, g, s, initial_k, initial_v)
        o, final_k, final_v, *_ = gsa(q, k, v, g, s, initial_k, initial_v, cu_seqlens, scale, readout, keep)
        return o, SlotState(final_k, final_v)

    return Operators(gated_linear_attention, gated_slot_attention)


def what_to_keep(engine: str, operation: str, recompute: bool, *inputs: Tensor | None) -> str:
    """What the forward pass must leave for a backward pass, if there can be one."""
    if not torch.compiler.is_compiling() and torch.autograd.forward_ad._current_level >= 0:
        # The operators know backward mode only, and would pass on no derivative at all.
        raise GSAError(f"{operation}: the {engine} engine has no forward-mode derivative; use backend='reference'")
    if not torch.is_grad_enabled() or not any(x is not None and x.requires_grad for x in inputs):
        return "nothing"
    return "marks" if recompute else "states"


def define(name: str, operation: str, inputs: str, outputs: int, compute: Callable[..., Any]) -> Any:
    """Registers `compute` as an operator; it runs at full precision whatever autocast says, and returns tensors."""

    def run(*args: Any) -> tuple[Tensor, ...]:
        first = args[0]
        with torch.autocast(first.device.type, enabled=False), raised_by(operation):
            results = compute(*args)
        return tuple(first.new_empty(0) if x is None else x for x in results)

    returns = ", ".join(["Tensor"] * outputs)
    return torch.library.custom_op(f"gsa::{name}", run, mutates_args=(), schema=f"({inputs}) -> ({returns})")


def laid_out_like(x: Tensor, gradient: Tensor) -> Tensor:
    """The gradient of x as torch.empty_like(x) would lie, which is what compiled code expects."""
    if x.is_contiguous() or x.shape[-1] <= 1:
        return gradient
    like = torch.empty_like(x)
    return gradient if like.stride() == gradient.stride() else like.copy_(gradient)


def _like(x: Tensor | None, q: Tensor) -> Tensor:
    return q.new_empty(0) if x is None else torch.empty_like(x)


def _register_gla(name: str, kernels: Kernels) -> Any:
    operation = "gated_linear_attention"
    forward = define(f"{name}_gla", operation, f"{_GLA}, float scale, str keep", 3, kernels.gla_forward)
    backward = define(
        f"{name}_gla_backward",
        operation,
        f"Tensor do, Tensor? dfinal, {_GLA}, Tensor kept, float scale, str keep",
        6,
        kernels.gla_backward,
    )

    @forward.register_fake
    def _(q, k, v, gk, gv, initial, cu_seqlens, scale, keep):  # type: ignore[no-untyped-def]
        dtype, H, K, V = compute_dtype(q.dtype), k.shape[2], k.shape[3], v.shape[3]
        return (
            q.new_empty(*q.shape[:3], V),
            q.new_empty((sequence_count(q, cu_seqlens), H, K, V), dtype=dtype),
            q.new_empty(kernels.kept_shape(q, v, cu_seqlens, keep, H, K, V), dtype=dtype),
        )

    @backward.register_fake
    def _(do, dfinal, q, k, v, gk, gv, initial, cu_seqlens, kept, scale, keep):  # type: ignore[no-untyped-def]
        dinitial = q.new_empty((sequence_count(q, cu_seqlens), k.shape[2], k.shape[3], v.shape[3]), dtype=kept.dtype)
        return *map(torch.empty_like, (q, k, v)), _like(gk, q), _like(gv, q), dinitial

    def setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *tensors, ctx.scale, ctx.keep = inputs
        ctx.save_for_backward(*tensors, output[2])
        ctx.set_materialize_grads(False)
        ctx.shape = output[0].shape

    def differentiate(
        ctx: Any, do: Tensor | None, dfinal: Tensor | None, _: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        q, k, v, gk, gv, initial, cu_seqlens, kept = ctx.saved_tensors
        do = q.new_zeros(ctx.shape) if do is None else do
        dq, dk, dv, dgk, dgv, dinitial = backward(
            do, dfinal, q, k, v, gk, gv, initial, cu_seqlens, kept, ctx.scale, ctx.keep
        )
        given = (dgk if gk is not None else None, dgv if gv is not None else None)
        return dq, dk, dv, *given, None if initial is None else dinitial, None, None, None

    forward.register_autograd(differentiate, setup_context=setup)
    return forward


def _register_gsa(name: str, kernels: Kernels) -> Any:
    operation = "gated_slot_attention"
    forward = define(f"{name}_gsa", operation, f"{_GSA}, float scale, str readout, str keep", 6, kernels.gsa_forward)
    backward = define(
        f"{name}_gsa_backward",
        operation,
        f"Tensor do, Tensor? dfinal_k, Tensor? dfinal_v, {_GSA}, "
        "Tensor slots, Tensor kept_k, Tensor kept_v, float scale, str readout, str keep",
        7,
        kernels.gsa_backward,
    )

    @forward.register_fake
    def _(q, k, v, g, s, initial_k, initial_v, cu_seqlens, scale, readout, keep):  # type: ignore[no-untyped-def]
        dtype, H, K, V, M = compute_dtype(q.dtype), k.shape[2], k.shape[3], v.shape[3], g.shape[3]
        N = sequence_count(q, cu_seqlens)
        return (
            q.new_empty(*q.shape[:3], V),
            q.new_empty((N, H, K, M), dtype=dtype),
            q.new_empty((N, H, M, V), dtype=dtype),
            q.new_empty((0,) if keep == "nothing" else (*q.shape[:3], M), dtype=dtype),
            q.new_empty(kernels.kept_shape(q, v, cu_seqlens, keep, H, K, M), dtype=dtype),
            q.new_empty(kernels.kept_shape(q, v, cu_seqlens, keep, H, M, V), dtype=dtype),
        )

    @backward.register_fake
    def _(do, dfk, dfv, q, k, v, g, s, ik, iv, cu_seqlens, slots, kept_k, kept_v, scale, readout, keep):  # type: ignore[no-untyped-def]
        N, H, K, V, M = sequence_count(q, cu_seqlens), k.shape[2], k.shape[3], v.shape[3], g.shape[3]
        states = (q.new_empty(shape, dtype=kept_k.dtype) for shape in ((N, H, K, M), (N, H, M, V)))
        return *map(torch.empty_like, (q, k, v, g)), _like(s, q), *states

    def setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *tensors, ctx.scale, ctx.readout, ctx.keep = inputs
        ctx.save_for_backward(*tensors, *output[3:])
        ctx.set_materialize_grads(False)
        ctx.shape = output[0].shape

    def differentiate(
        ctx: Any, do: Tensor | None, dfinal_k: Tensor | None, dfinal_v: Tensor | None, *_: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        q, k, v, g, s, initial_k, initial_v, *rest = ctx.saved_tensors
        do = q.new_zeros(ctx.shape) if do is None else do
        dq, dk, dv, dg, ds, dk0, dv0 = backward(
            do, dfinal_k, dfinal_v, q, k, v, g, s, initial_k, initial_v, *rest, ctx.scale, ctx.readout, ctx.keep
        )
        given = tuple(None if x is None else dx for x, dx in ((s, ds), (initial_k, dk0), (initial_v, dv0)))
        return dq, dk, dv, dg, *given, None, None, None, None

    forward.register_autograd(differentiate, setup_context=setup)
    return forward
