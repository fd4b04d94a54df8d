"""Gated slot attention and gated linear attention, exact for every gate, on any device."""

from gsa.errors import BackendUnavailable
from gsa.ops.api import attention_with_bounded_memory, gated_linear_attention, gated_slot_attention
from gsa.ops.joined_slots import joined_slots
from gsa.ops.registry import backends, use_backend
from gsa.ops.selective_scan import selective_scan
from gsa.ops.state import BoundedMemoryState, JoinedSlotState, SlotState
from gsa.ops.step import gated_slot_attention_step
from gsa.ops.window import window_attention

__all__ = [
    "BackendUnavailable",
    "BoundedMemoryState",
    "JoinedSlotState",
    "SlotState",
    "attention_with_bounded_memory",
    "backends",
    "gated_linear_attention",
    "gated_slot_attention",
    "gated_slot_attention_step",
    "joined_slots",
    "selective_scan",
    "use_backend",
    "window_attention",
]
