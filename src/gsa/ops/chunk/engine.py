"""The engine `chunk`: the chunkwise forms in torch, on any device."""

from gsa.ops.bounded_memory import ThroughSlots
from gsa.ops.calls import GATED_LINEAR_ATTENTION, GATED_SLOT_ATTENTION, SELECTIVE_SCAN, WINDOW_ATTENTION
from gsa.ops.chunk import linear_attention, slot_attention
from gsa.ops.chunk import selective_scan as scan
from gsa.ops.chunk import window_attention as window
from gsa.ops.operators import Operator
from gsa.ops.portable_matvec import matvec
from gsa.ops.portable_slots import ThroughLinear
from gsa.ops.portable_step import gated_slot_attention_step

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

gated_linear_attention = Operator("chunk", linear_attention, GATED_LINEAR_ATTENTION)
gated_slot_attention = Operator("chunk", slot_attention, GATED_SLOT_ATTENTION)
attention_with_bounded_memory = ThroughSlots("chunk", slot_attention)
selective_scan = Operator("chunk", scan, SELECTIVE_SCAN)
window_attention = Operator("chunk", window, WINDOW_ATTENTION)
joined_slots = ThroughLinear(gated_linear_attention)
