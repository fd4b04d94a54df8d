"""The engine `native`: compiled kernels, on CPUs."""

from gsa.ops.bounded_memory import ThroughSlots
from gsa.ops.calls import (
    GATED_LINEAR_ATTENTION,
    GATED_SLOT_ATTENTION,
    JOINED_SLOTS,
    SELECTIVE_SCAN,
    WINDOW_ATTENTION,
)
from gsa.ops.native import joined_slots as slots
from gsa.ops.native import linear_attention, slot_attention
from gsa.ops.native import selective_scan as scan
from gsa.ops.native import window_attention as window
from gsa.ops.native.linear import matvec
from gsa.ops.native.step import step
from gsa.ops.operators import Operator
from gsa.ops.step_operators import StepOperator

__all__ = [
    "attention_with_bounded_memory",
    "gated_linear_attention",
    "gated_slot_attention",
    "gated_slot_attention_step",
    "joined_slots",
    "matvec",
    "selective_scan",
    "window_attention",
]

gated_linear_attention = Operator("native", linear_attention, GATED_LINEAR_ATTENTION, direct=True)
gated_slot_attention = Operator("native", slot_attention, GATED_SLOT_ATTENTION, direct=True)
gated_slot_attention_step = StepOperator("native", step)
attention_with_bounded_memory = ThroughSlots("native", slot_attention, direct=True)
selective_scan = Operator("native", scan, SELECTIVE_SCAN, direct=True)
window_attention = Operator("native", window, WINDOW_ATTENTION, direct=True)
joined_slots = Operator("native", slots, JOINED_SLOTS, direct=True)
