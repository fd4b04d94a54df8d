"""One token by the compiled kernels, as operators: with a new state, and in place."""

from __future__ import annotations

import torch
from torch import Tensor

from gsa.ops.native.kernels import gsa_step
from gsa.ops.native.results import empty
from gsa.ops.state import SlotState, compute_dtype

_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor g, Tensor? s"


def step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    s: Tensor | None,
    state: SlotState,
    scale: float,
    readout: str,
    inplace: bool,
) -> tuple[Tensor, SlotState]:
    """The output and the state after it. In place, the state must be dense."""
    # Compilers need an operator they can see through; without one, a step is three times as fast.
    if inplace:
        run = _in_place if torch.compiler.is_compiling() else _step_in_place
        return run(q, k, v, g, s, state.k, state.v, scale, readout), state
    run_new = _new if torch.compiler.is_compiling() else _step_new
    o, memory_k, memory_v = run_new(q, k, v, g, s, state.k, state.v, scale, readout)
    return o, SlotState(memory_k, memory_v)


def _step_new(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    s: Tensor | None,
    memory_k: Tensor,
    memory_v: Tensor,
    scale: float,
    readout: str,
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = compute_dtype(q.dtype)
    after = SlotState(*(empty(tuple(x.shape), dtype) for x in (memory_k, memory_v)))
    return gsa_step(q, k, v, g, s, SlotState(memory_k, memory_v), after, scale, readout), *after


def _step_in_place(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    s: Tensor | None,
    memory_k: Tensor,
    memory_v: Tensor,
    scale: float,
    readout: str,
) -> Tensor:
    state = SlotState(memory_k, memory_v)
    return gsa_step(q, k, v, g, s, state, state, scale, readout)


_new = torch.library.custom_op(
    "gsa::native_step",
    _step_new,
    mutates_args=(),
    schema=f"({_INPUTS}, Tensor memory_k, Tensor memory_v, float scale, str readout) -> (Tensor, Tensor, Tensor)",
)
_in_place = torch.library.custom_op(
    "gsa::native_step_",
    _step_in_place,
    mutates_args=("memory_k", "memory_v"),
    schema=f"({_INPUTS}, Tensor(a!) memory_k, Tensor(b!) memory_v, float scale, str readout) -> Tensor",
)


@_new.register_fake
def _(q, k, v, g, s, memory_k, memory_v, scale, readout):  # type: ignore[no-untyped-def]
    states = (x.new_empty(x.shape, dtype=compute_dtype(q.dtype)) for x in (memory_k, memory_v))
    return q.new_empty(*q.shape[:2], v.shape[2]), *states


@_in_place.register_fake
def _(q, k, v, g, s, memory_k, memory_v, scale, readout):  # type: ignore[no-untyped-def]
    return q.new_empty(*q.shape[:2], v.shape[2])
