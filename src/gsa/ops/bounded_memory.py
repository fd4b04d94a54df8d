"""ABC's gates: from write logits to what gated slot attention takes, exactly and for streams.

    z_t = z_{t-1} + exp(w_t),    phi_t = exp(w_t) / z_t,    1 - phi_t = z_{t-1} / z_t

z is carried as a logarithm and in fp64: it is a sum over the whole past, and the gates are small differences of it.

Shape letters: B batch, T time, H key/value heads, M slots, N sequences.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gsa.errors import raised_by
from gsa.ops.calls import GATED_SLOT_ATTENTION, BoundedMemoryCall, Kernels, SlotCall, Tensors, sums_dtype
from gsa.ops.gates import refuse_logits
from gsa.ops.memory import require_memory
from gsa.ops.operators import Operator
from gsa.ops.sequences import sequence_bounds, sequence_count
from gsa.ops.state import compute_dtype
from gsa.ops.transforms import Derivative, recorded

_OPERATION = "attention_with_bounded_memory"
_THROUGH_SLOTS = replace(GATED_SLOT_ATTENTION, name=_OPERATION, short="abc")
_INPUTS = "Tensor w, Tensor? log_z, Tensor? cu_seqlens, bool check"
_TOGETHER = 2**17
"""Gates that are computed at once: short rows are too many to go one by one, long ones would take too much memory."""


class ThroughSlots:
    """ABC for an engine that has gated slot attention: the write logits become the gates of that.

    It is an operator of its own, gsa::{engine}_abc, so that errors and profiles name what was called.
    """

    def __init__(self, engine: str, kernels: Kernels[SlotCall], *, direct: bool = False):
        self.slots = Operator(engine, kernels, _THROUGH_SLOTS, direct=direct)

    def __call__(self, call: BoundedMemoryCall) -> Tensors:
        """Outputs [B, T, HQ, V], final memories [N, H, K, M] and [N, H, M, V], final log z [N, H, M]."""
        self.slots.derivative.refuse_forward_mode()
        dtype = sums_dtype(call)
        if not recorded():
            with raised_by(_OPERATION):
                require_memory({"w": call.w, "initial_state.log_z": call.initial_log_z})
        w = call.w.double() if dtype == torch.float64 else call.w
        phi, forget, log_z = _derivative.forward(w, call.initial_log_z, call.cu_seqlens, call.check)
        slots = SlotCall(
            call.q,
            call.k,
            call.v,
            forget if call.normalise else torch.zeros_like(phi),
            phi,
            call.initial_k,
            call.initial_v,
            call.cu_seqlens,
            call.scale,
            "softmax",
            call.save,
            check=False,  # gates made of good logits are good
        )
        return *self.slots(slots), log_z.to(dtype)


@torch.library.custom_op("gsa::write_gates", mutates_args=(), schema=f"({_INPUTS}) -> (Tensor, Tensor, Tensor)")
def write_gates(
    w: Tensor, log_z: Tensor | None, cu_seqlens: Tensor | None, check: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """phi and log(1 - phi) [B, T, H, M] of write logits w [B, T, H, M], and the final log z [N, H, M].

    A logit of -inf writes nothing: phi = 0. At the first write, phi = 1 and log(1 - phi) = -inf.
    """
    with raised_by(_OPERATION):
        if check:
            refuse_logits(w, log_z)
        groups, count = _groups(w, cu_seqlens)
        dtype = compute_dtype(w.dtype)
        phi, forget = (torch.empty(w.shape, dtype=dtype, device=w.device) for _ in range(2))
        final = torch.empty((count, *w.shape[2:]), dtype=dtype, device=w.device)
        for group in groups:
            z, strength = _running(group.of(w), None if log_z is None else log_z[group.sequences])
            group.of(phi).copy_(strength)
            final[group.sequences] = z[-1]
            # For a small phi the difference of logarithms has lost digits; for one near 1, phi itself has.
            difference = (z[:-1] - z[1:]).masked_fill_(strength == 0, 0.0)
            group.of(forget).copy_(torch.where(strength < 0.5, torch.log1p(-strength), difference))
    return phi, forget, final


class _Group(NamedTuple):
    """R sequences of one length."""

    rows: slice
    """Of the batch."""
    times: slice
    sequences: slice

    def of(self, x: Tensor) -> Tensor:
        """A view [T, R, H, M] of their part of x [B, T, H, M]."""
        return x[self.rows, self.times].transpose(0, 1)


def _groups(w: Tensor, cu_seqlens: Tensor | None) -> tuple[list[_Group], int]:
    """All sequences, in groups that are computed together, and their number; checks the values of cu_seqlens."""
    B, T, H, M = w.shape
    if cu_seqlens is not None:
        bounds = sequence_bounds(B, T, cu_seqlens)
        one = [_Group(slice(0, 1), slice(start, stop), slice(n, n + 1)) for n, (_, start, stop) in enumerate(bounds)]
        return one, len(one)
    size = max(_TOGETHER // max(T * H * M, 1), 1)
    rows = [slice(begin, min(begin + size, B)) for begin in range(0, B, size)]
    return [_Group(some, slice(0, T), some) for some in rows], B


def _running(w: Tensor, log_z: Tensor | None) -> tuple[Tensor, Tensor]:
    """log z before the first token and after each [T + 1, R, H, M], and phi [T, R, H, M]; fp64."""
    begin = w.new_full((1, *w.shape[1:]), -torch.inf) if log_z is None else log_z[None]
    z = torch.cat((begin.double(), w.double())).logcumsumexp(0)
    return z, (w.double() - z[1:]).exp_().masked_fill_(w.isneginf(), 0.0)


@torch.library.custom_op(
    "gsa::write_gates_backward",
    mutates_args=(),
    schema=f"(Tensor? dphi, Tensor? dforget, Tensor? dfinal, {_INPUTS}) -> (Tensor, Tensor)",
)
def _write_gates_backward(
    dphi: Tensor | None,
    dforget: Tensor | None,
    dfinal: Tensor | None,
    w: Tensor,
    log_z: Tensor | None,
    cu_seqlens: Tensor | None,
    check: bool,
) -> tuple[Tensor, Tensor]:
    with raised_by(_OPERATION):
        require_memory({"w": w, "initial_state.log_z": log_z, "cu_seqlens": cu_seqlens})
        groups, count = _groups(w, cu_seqlens)
        dw = torch.zeros_like(w)
        dlog_z = torch.zeros((count, *w.shape[2:]), dtype=compute_dtype(w.dtype), device=w.device)
        for group in groups:
            own = group.of(w)
            z, phi = _running(own, None if log_z is None else log_z[group.sequences])
            entries = torch.cat((z[:1], own.double()))  # what z sums: its initial value, then the writes
            direct, dz = torch.zeros_like(z), torch.zeros_like(z)
            if dphi is not None:  # d log phi_t = d w_t - d log z_t
                through = group.of(dphi) * phi
                direct[1:] += through
                dz[1:] -= through
            # d log(1 - phi_t) = phi_t (d log z_{t-1} - d w_t); the first write has no such term
            if dforget is not None:
                through = (group.of(dforget) * phi).masked_fill_(z[:-1].isneginf(), 0.0)
                direct[1:] -= through
                dz[:-1] += through
            if dfinal is not None:
                dz[-1] += dfinal[group.sequences]
            # d entries_j = sum_{t>=j} dz_t exp(entries_j - z_t), where every exponent is at most 0
            grad = direct + _weighted_tail(dz.clamp(min=0), z, entries) - _weighted_tail((-dz).clamp(min=0), z, entries)
            dlog_z[group.sequences] = grad[0]
            group.of(dw).copy_(grad[1:])
    return dw, dlog_z


def _weighted_tail(d: Tensor, z: Tensor, entries: Tensor) -> Tensor:
    """sum_{t>=j} d_t exp(entries_j - z_t) for d >= 0, in logarithms."""
    terms = torch.where(z.isneginf(), -torch.inf, d.log() - z)
    tail = terms.flip(0).logcumsumexp(0).flip(0)
    return torch.where(entries.isneginf() | tail.isneginf(), 0.0, (tail + entries).exp())


def _shapes(w: Tensor, cu_seqlens: Tensor | None) -> tuple[tuple[int, ...], torch.dtype]:
    """Shape of log z, and the dtype of gates and states."""
    return (sequence_count(w, cu_seqlens), *w.shape[2:]), compute_dtype(w.dtype)


@write_gates.register_fake
def _(w: Tensor, log_z: Tensor | None, cu_seqlens: Tensor | None, check: bool) -> tuple[Tensor, Tensor, Tensor]:
    state, dtype = _shapes(w, cu_seqlens)
    return w.new_empty(w.shape, dtype=dtype), w.new_empty(w.shape, dtype=dtype), w.new_empty(state, dtype=dtype)


@_write_gates_backward.register_fake
def _(
    dphi: Any, dforget: Any, dfinal: Any, w: Tensor, log_z: Tensor | None, cu_seqlens: Tensor | None, check: bool
) -> tuple[Tensor, Tensor]:
    state, dtype = _shapes(w, cu_seqlens)
    return torch.empty_like(w), w.new_empty(state, dtype=dtype)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[:3])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    w, log_z, cu_seqlens = ctx.saved_tensors
    dw, dlog_z = _derivative.backward(*grads, w, log_z, cu_seqlens, False)
    return dw, None if log_z is None else dlog_z, None, None


_derivative = Derivative(_OPERATION, None, write_gates, _write_gates_backward, _setup, _backward)
