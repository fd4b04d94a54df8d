"""How an engine's one-token step becomes part of torch: as operators, with a new state and in place."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from gsa.errors import raised_by
from gsa.ops.calls import StepCall, sums_dtype
from gsa.ops.memory import refuse_shared
from gsa.ops.operators import needs_operator, schema_of
from gsa.ops.state import SlotState

OPERATION = "gated_slot_attention_step"


class StepKernel(Protocol):
    """What an engine brings along."""

    def __call__(self, call: StepCall, *, inplace: bool) -> tuple[Tensor, SlotState]:
        """The output [B, HQ, V] and the state after it, contiguous and in the dtype that sums are carried in. In place,
        that is the call's own state, which must already be both."""


class StepOperator:
    """A step of an engine: gsa::{engine}_step with a new state, gsa::{engine}_step_ in place. It has no derivative."""

    def __init__(self, engine: str, kernel: StepKernel):
        self.kernel = kernel
        fields, name = schema_of(StepCall), f"gsa::{engine}_step"
        self.new = torch.library.custom_op(
            name, self._new, mutates_args=(), schema=f"({fields}) -> (Tensor, Tensor, Tensor)"
        )
        changed = fields.replace("Tensor memory_k", "Tensor(a!) memory_k").replace(
            "Tensor memory_v", "Tensor(b!) memory_v"
        )
        self.in_place = torch.library.custom_op(
            f"{name}_", self._in_place, mutates_args=("memory_k", "memory_v"), schema=f"({changed}) -> Tensor"
        )
        self.new.register_fake(self._fake_new)
        self.in_place.register_fake(self._fake_in_place)

    def __call__(self, call: StepCall, *, inplace: bool) -> tuple[Tensor, SlotState]:
        """The output [B, HQ, V] and the state after it. In place, the state must be dense."""
        direct = not needs_operator(*call)  # without torch's operator a step is three times as fast
        if inplace:
            o = self._in_place(*call) if direct else self.in_place(*call)
            return o, SlotState(call.memory_k, call.memory_v)
        o, memory_k, memory_v = self._new(*call) if direct else self.new(*call)
        return o, SlotState(memory_k, memory_v)

    def _new(self, *fields: Any) -> tuple[Tensor, Tensor, Tensor]:
        with raised_by(OPERATION):
            o, state = self.kernel(StepCall(*fields), inplace=False)
        return o, *state

    def _in_place(self, *fields: Any) -> Tensor:
        call = StepCall(*fields)
        with raised_by(OPERATION):
            refuse_shared(*call.written_and_read())
            o, state = self.kernel(call, inplace=True)
        # Autograd would not notice the change otherwise.
        torch.autograd.graph.increment_version([x for x in state if not x.is_inference()])
        return o

    @staticmethod
    def _fake_new(*fields: Any) -> tuple[Tensor, Tensor, Tensor]:
        call = StepCall(*fields)
        memory_k, memory_v = (x.new_empty(x.shape, dtype=sums_dtype(call)) for x in (call.memory_k, call.memory_v))
        return StepOperator._fake_in_place(*fields), memory_k, memory_v

    @staticmethod
    def _fake_in_place(*fields: Any) -> Tensor:
        call = StepCall(*fields)
        return call.q.new_empty(*call.q.shape[:2], call.v.shape[2])
