"""One token by the compiled kernels, as operators: with a new state, and in place."""

from __future__ import annotations

import torch
from torch import Tensor

from gsa.errors import GSAError
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
    # Whoever traces needs an operator to see; without one, a step is three times as fast.
    direct = not _traced(q, k, v, g, s, *state)
    if inplace:
        run = _step_in_place if direct else _in_place
        return run(q, k, v, g, s, state.k, state.v, scale, readout), state
    run_new = _step_new if direct else _new
    o, memory_k, memory_v = run_new(q, k, v, g, s, state.k, state.v, scale, readout)
    return o, SlotState(memory_k, memory_v)


def _traced(*tensors: Tensor | None) -> bool:
    """Whether someone other than this computer's arithmetic looks at these tensors."""
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._get_tracing_state() is not None
        or any(x is not None and type(x) not in (Tensor, torch.nn.Parameter) for x in tensors)
    )


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
    if memory_k.data_ptr() < memory_v.data_ptr() + memory_v.nbytes and memory_v.data_ptr() < (
        memory_k.data_ptr() + memory_k.nbytes
    ):
        raise GSAError("gated_slot_attention_step: state.k and state.v share memory and cannot be updated in place")
    o = gsa_step(q, k, v, g, s, state, state, scale, readout)
    changed = [x for x in state if not x.is_inference()]
    torch.autograd.graph.increment_version(changed)  # or autograd would not notice
    return o


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
