"""ABC's gates: from write logits to what gated slot attention takes, exactly and for streams.

    z_t = z_{t-1} + exp(w_t),    phi_t = exp(w_t) / z_t

z is carried as a logarithm and in fp64: it is a sum over the whole past, and the gates are small differences of it.

Shape letters: B batch, T time, H key/value heads, M slots, N sequences.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gsa.ops.layout import sequence_bounds
from gsa.ops.state import compute_dtype


def forget_gate(phi: Tensor) -> Tensor:
    """log(z_{t-1} / z_t) = log(1 - phi), the gate of the running average; -inf at the first write."""
    first = phi >= 1
    return torch.where(first, -torch.inf, torch.log1p(-phi.masked_fill(first, 0.0)))


@torch.library.custom_op(
    "gsa::write_strength",
    mutates_args=(),
    schema="(Tensor w, Tensor? log_z, Tensor? cu_seqlens) -> (Tensor, Tensor)",
)
def write_strength(w: Tensor, log_z: Tensor | None, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """phi [B, T, H, M] and the final log z [N, H, M] of write logits w [B, T, H, M]; w = -inf writes nothing."""
    dtype, bounds = compute_dtype(w.dtype), sequence_bounds(w.shape[0], w.shape[1], cu_seqlens)
    phi = torch.empty(w.shape, dtype=dtype, device=w.device)
    final = torch.empty((len(bounds), *w.shape[2:]), dtype=dtype, device=w.device)
    for n, (b, start, stop) in enumerate(bounds):
        z = _running(w[b, start:stop], None if log_z is None else log_z[n])
        final[n] = z[-1]
        strength = (w[b, start:stop].double() - z[1:]).exp_()
        phi[b, start:stop] = strength.masked_fill_(z[1:].isneginf(), 0.0)
    return phi, final


def _running(w: Tensor, log_z: Tensor | None) -> Tensor:
    """log z before the first token and after each: [T + 1, H, M], fp64."""
    begin = w.new_full((1, *w.shape[1:]), -torch.inf) if log_z is None else log_z[None]
    return torch.cat((begin.double(), w.double())).logcumsumexp(0)


@torch.library.custom_op(
    "gsa::write_strength_backward",
    mutates_args=(),
    schema="(Tensor? dphi, Tensor? dfinal, Tensor w, Tensor? log_z, Tensor? cu_seqlens) -> (Tensor, Tensor)",
)
def _write_strength_backward(
    dphi: Tensor | None, dfinal: Tensor | None, w: Tensor, log_z: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    bounds = sequence_bounds(w.shape[0], w.shape[1], cu_seqlens)
    dw = torch.zeros_like(w)
    dlog_z = torch.zeros((len(bounds), *w.shape[2:]), dtype=compute_dtype(w.dtype), device=w.device)
    for n, (b, start, stop) in enumerate(bounds):
        z = _running(w[b, start:stop], None if log_z is None else log_z[n])
        entries = torch.cat((z[:1], w[b, start:stop].double()))  # what z sums: its initial value, then the writes
        dz = torch.zeros_like(z)
        direct = torch.zeros_like(z)
        if dphi is not None:
            strength = (entries[1:] - z[1:]).exp_().masked_fill_(z[1:].isneginf(), 0.0)
            direct[1:] = dphi[b, start:stop] * strength
            dz -= direct
        if dfinal is not None:
            dz[-1] += dfinal[n]
        # d entries_j = sum_{t>=j} dz_t exp(entries_j - z_t), where every exponent is at most 0
        grad = direct + _weighted_tail(dz.clamp(min=0), z, entries) - _weighted_tail((-dz).clamp(min=0), z, entries)
        dlog_z[n], dw[b, start:stop] = grad[0], grad[1:]
    return dw, dlog_z


def _weighted_tail(d: Tensor, z: Tensor, entries: Tensor) -> Tensor:
    """sum_{t>=j} d_t exp(entries_j - z_t) for d >= 0, in logarithms."""
    terms = torch.where(z.isneginf(), -torch.inf, d.log() - z)
    tail = terms.flip(0).logcumsumexp(0).flip(0)
    return torch.where(entries.isneginf() | tail.isneginf(), 0.0, (tail + entries).exp())


@write_strength.register_fake
def _(w: Tensor, log_z: Tensor | None, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    N, dtype = w.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1, compute_dtype(w.dtype)
    return torch.empty_like(w, dtype=dtype), w.new_empty((N, *w.shape[2:]), dtype=dtype)


@_write_strength_backward.register_fake
def _(dphi: Any, dfinal: Any, w: Tensor, log_z: Tensor | None, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    N = w.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return torch.empty_like(w), w.new_empty((N, *w.shape[2:]), dtype=compute_dtype(w.dtype))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dphi: Tensor | None, dfinal: Tensor | None) -> tuple[Tensor | None, ...]:
    w, log_z, cu_seqlens = ctx.saved_tensors
    dw, dlog_z = _write_strength_backward(dphi, dfinal, w, log_z, cu_seqlens)
    return dw, None if log_z is None else dlog_z, None


write_strength.register_autograd(_backward, setup_context=_setup)
