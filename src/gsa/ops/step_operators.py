"""How an engine's one-token step becomes part of torch: as operators, with a new state and in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from gsa.errors import GSAError
from gsa.ops.state import SlotState, compute_dtype

_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor g, Tensor? s"


class Compute(Protocol):
    """What an engine brings along."""

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        s: Tensor | None,
        before: SlotState,
        after: SlotState,
        scale: float,
        readout: str,
    ) -> Tensor:
        """o [B, HQ, V]; fills `after`, dense and of the dtype sums are carried in, which may be `before` itself."""


class Step(Protocol):
    """What the rest of the package calls."""

    def __call__(
        self,
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


def traced(*tensors: Tensor | None) -> bool:
    """Whether someone other than the device's arithmetic looks at these tensors."""
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._get_tracing_state() is not None
        or any(x is not None and type(x) not in (Tensor, torch.nn.Parameter) for x in tensors)
    )


def register_step(name: str, compute: Compute, empty: Callable[[Tensor, torch.dtype], Tensor]) -> Step:
    """Registers gsa::{name}_step and gsa::{name}_step_; `empty` makes room for a new memory beside an old one."""

    def step_new(
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
        after = SlotState(empty(memory_k, dtype), empty(memory_v, dtype))
        return compute(q, k, v, g, s, SlotState(memory_k, memory_v), after, scale, readout), *after

    def step_in_place(
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
        if memory_k.data_ptr() < memory_v.data_ptr() + memory_v.nbytes and memory_v.data_ptr() < (
            memory_k.data_ptr() + memory_k.nbytes
        ):
            raise GSAError("gated_slot_attention_step: state.k and state.v share memory and cannot be updated in place")
        o = compute(q, k, v, g, s, state, state, scale, readout)
        changed = [x for x in state if not x.is_inference()]
        torch.autograd.graph.increment_version(changed)  # or autograd would not notice
        return o

    new = torch.library.custom_op(
        f"gsa::{name}_step",
        step_new,
        mutates_args=(),
        schema=f"({_INPUTS}, Tensor memory_k, Tensor memory_v, float scale, str readout) -> (Tensor, Tensor, Tensor)",
    )
    in_place = torch.library.custom_op(
        f"gsa::{name}_step_",
        step_in_place,
        mutates_args=("memory_k", "memory_v"),
        schema=f"({_INPUTS}, Tensor(a!) memory_k, Tensor(b!) memory_v, float scale, str readout) -> Tensor",
    )

    @new.register_fake
    def _(q, k, v, g, s, memory_k, memory_v, scale, readout):  # type: ignore[no-untyped-def]
        states = (x.new_empty(x.shape, dtype=compute_dtype(q.dtype)) for x in (memory_k, memory_v))
        return q.new_empty(*q.shape[:2], v.shape[2]), *states

    @in_place.register_fake
    def _(q, k, v, g, s, memory_k, memory_v, scale, readout):  # type: ignore[no-untyped-def]
        return q.new_empty(*q.shape[:2], v.shape[2])

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
        # Whoever traces needs an operator to see; without one, a step is three times as fast.
        direct = not traced(q, k, v, g, s, *state)
        if inplace:
            run = step_in_place if direct else in_place
            return run(q, k, v, g, s, state.k, state.v, scale, readout), state
        run_new = step_new if direct else new
        o, memory_k, memory_v = run_new(q, k, v, g, s, state.k, state.v, scale, readout)
        return o, SlotState(memory_k, memory_v)

    return step
