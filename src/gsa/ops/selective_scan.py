"""Mamba's selective scan: arguments checked, an engine chosen, one call.

Shape letters: B batch, T time, E channels, S states of a channel, N sequences (B, or the number of packed ones). B and
C are also Mamba's names for what writes to the states and reads from them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gsa.ops.calls import ScanCall
from gsa.ops.checks import Checker
from gsa.ops.registry import find


def selective_scan(
    u: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
    check: bool | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Outputs y [B, T, E] of Mamba's selective scan, in the dtype of u, and the final states [N, E, S] if asked for.

        h_t[e, s] = exp(dt_t[e] A[e, s]) h_{t-1}[e, s] + dt_t[e] B_t[s] u_t[e],      y_t[e] = sum_s C_t[s] h_t[e, s]

    u and dt [B, T, E], A [E, S], B and C [B, T, S]. dt is at least 0, that is after the softplus, and 0 leaves the
    states as they are; A is at most 0. The skip D * u and the gate z are the caller's. 16 and 32 bits may be mixed;
    states are fp32, and everything is computed in it (fp64 if u is). With `cu_seqlens` [N+1], B is 1 and the sequences
    lie end to end. A above 0, dt below 0 and NaN are refused on a CPU, with `check=True` on a GPU too, where that waits
    for the device, and with `check=False` nowhere.

    >>> u, dt = torch.randn(2, 100, 8), torch.rand(2, 100, 8)
    >>> A, B, C = -torch.rand(8, 16), torch.randn(2, 100, 16), torch.randn(2, 100, 16)
    >>> y, state = selective_scan(u, dt, A, B, C, output_final_state=True)
    >>> y.shape, state.shape
    (torch.Size([2, 100, 8]), torch.Size([2, 8, 16]))
    """
    checker = _Checker("selective_scan")
    checker.flags(output_final_state=output_final_state)
    checker.inputs(u, dt, A, B, C)
    N = checker.sequences(u, cu_seqlens)
    if initial_state is not None:
        initial_state = checker.state("initial_state", initial_state, (N, *A.shape), "N, E, S", u)
    call = ScanCall(u, dt, A, B, C, initial_state, cu_seqlens, "marks", checker.by_value(check, u))
    y, state = find("selective_scan", backend, u.device)(call)
    return y, state if output_final_state else None


class _Checker(Checker):
    """The checks of this operation, in which u is what q is in the others."""

    def tensor(self, name: str, x: object, layout: str, like: Tensor | None = None) -> Tensor:
        found = super().tensor(name, x, layout)
        if like is not None and found.device != like.device:
            raise self.fail(f"{name} is on {found.device}, u is on {like.device}")
        return found

    def sequences(self, q: Tensor, cu_seqlens: Tensor | None) -> int:
        if isinstance(cu_seqlens, Tensor) and q.shape[0] != 1:
            raise self.fail(f"cu_seqlens packs sequences into a batch of 1, but u has {q.shape[0]} rows")
        return super().sequences(q, cu_seqlens)

    def inputs(self, u: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor) -> None:
        self.tensor("u", u, "B, T, E")
        self.tensor("dt", dt, "B, T, E", u)
        self.tensor("A", A, "E, S", u)
        self.tensor("B", B, "B, T, S", u)
        self.tensor("C", C, "B, T, S", u)
        for name, x in (("dt", dt), ("A", A), ("B", B), ("C", C)):
            if x.dtype == torch.float64 and u.dtype != torch.float64:
                raise self.fail(f"{name} is {x.dtype}, u is {u.dtype}; fp64 is computed only if u is fp64")
        for name, x in (("dt", dt), ("B", B), ("C", C)):
            self.same("rows", name, x.shape[0], "u", u.shape[0])
            self.same("time steps", name, x.shape[1], "u", u.shape[1])
        self.same("channels", "dt", dt.shape[2], "u", u.shape[2])
        self.same("channels", "A", A.shape[0], "u", u.shape[2])
        self.same("states", "B", B.shape[2], "A", A.shape[1])
        self.same("states", "C", C.shape[2], "A", A.shape[1])
        if A.numel() == 0:
            raise self.fail(f"A must have channels and states, got {list(A.shape)}")
