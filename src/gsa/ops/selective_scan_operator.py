"""How an engine's selective scan becomes part of torch: custom operators with autograd and fake kernels.

Shape letters: B batch, T time, E channels, S states of a channel, N sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from gsa.errors import raised_by
from gsa.ops.layout import sequence_count
from gsa.ops.operators import Shape, define, what_to_keep
from gsa.ops.state import compute_dtype


class ScanKernels(Protocol):
    """What an engine brings along; `keep` says whether forward leaves "marks" for backward, or "nothing"."""

    def forward(
        self,
        u: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        initial: Tensor | None,
        cu_seqlens: Tensor | None,
        keep: str,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """y [B, T, E], final states [N, E, S], kept states."""

    def backward(
        self,
        dy: Tensor,
        dfinal: Tensor | None,
        u: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        initial: Tensor | None,
        cu_seqlens: Tensor | None,
        kept: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Gradients of u, dt, A, B, C and the initial states."""

    def kept_shape(self, u: Tensor, A: Tensor, cu_seqlens: Tensor | None, keep: str) -> Shape:
        """Of the states kept by forward; from shapes alone, without reading cu_seqlens."""


_OPERATION = "selective_scan"
_INPUTS = "Tensor u, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? initial, Tensor? cu_seqlens"


def register_selective_scan(
    name: str, kernels: ScanKernels, traced: Callable[..., bool] = lambda *tensors: True
) -> Callable[..., tuple[Tensor, Tensor]]:
    """Registers gsa::{name}_scan and its backward; comes back with the signature of gsa.ops.reference.

    Calls without a graph that are not `traced` go past torch's operators, which take longer than a token.
    """
    operator = _register(name, kernels)

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
        keep = what_to_keep(name, _OPERATION, True, u, dt, A, B, C, initial_state)
        if keep == "marks" or traced(u, dt, A, B, C, initial_state, cu_seqlens):
            y, final, _ = operator(u, dt, A, B, C, initial_state, cu_seqlens, keep)
        else:
            with raised_by(_OPERATION):
                y, final, _ = kernels.forward(u, dt, A, B, C, initial_state, cu_seqlens, keep)
        return y, final

    return selective_scan


def _register(name: str, kernels: ScanKernels) -> Any:
    forward = define(f"{name}_scan", _OPERATION, f"{_INPUTS}, str keep", 3, kernels.forward)
    backward = define(
        f"{name}_scan_backward",
        _OPERATION,
        f"Tensor dy, Tensor? dfinal, {_INPUTS}, Tensor kept",
        6,
        kernels.backward,
    )

    @forward.register_fake
    def _(u, dt, A, B, C, initial, cu_seqlens, keep):  # type: ignore[no-untyped-def]
        dtype = compute_dtype(u.dtype)
        return (
            u.new_empty(u.shape),
            u.new_empty((sequence_count(u, cu_seqlens), *A.shape), dtype=dtype),
            u.new_empty(kernels.kept_shape(u, A, cu_seqlens, keep), dtype=dtype),
        )

    @backward.register_fake
    def _(dy, dfinal, u, dt, A, B, C, initial, cu_seqlens, kept):  # type: ignore[no-untyped-def]
        dinitial = u.new_empty((sequence_count(u, cu_seqlens), *A.shape), dtype=kept.dtype)
        return *map(torch.empty_like, (u, dt, A, B, C)), dinitial

    def setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(*inputs[:-1], output[2])
        ctx.set_materialize_grads(False)

    def differentiate(
        ctx: Any, dy: Tensor | None, dfinal: Tensor | None, _: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        u, dt, A, B, C, initial, cu_seqlens, kept = ctx.saved_tensors
        dy = u.new_zeros(u.shape) if dy is None else dy
        *gradients, dinitial = backward(dy, dfinal, u, dt, A, B, C, initial, cu_seqlens, kept)
        return *gradients, None if initial is None else dinitial, None, None

    forward.register_autograd(differentiate, setup_context=setup)
    return forward
