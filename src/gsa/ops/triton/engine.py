"""The engine `triton`: kernels for NVIDIA's and AMD's GPUs.

It has no selective scan, no windows of attention, no joined slots and no matrix-vector products.
"""

from gsa.ops.bounded_memory import ThroughSlots
from gsa.ops.calls import GATED_LINEAR_ATTENTION, GATED_SLOT_ATTENTION
from gsa.ops.operators import Operator
from gsa.ops.step_operators import StepOperator
from gsa.ops.triton import linear_attention, slot_attention
from gsa.ops.triton.step import step

__all__ = [
    "attention_with_bounded_memory",
    "gated_linear_attention",
    "gated_slot_attention",
    "gated_slot_attention_step",
]

gated_linear_attention = Operator("triton", linear_attention, GATED_LINEAR_ATTENTION)
gated_slot_attention = Operator("triton", slot_attention, GATED_SLOT_ATTENTION)
gated_slot_attention_step = StepOperator("triton", step)
attention_with_bounded_memory = ThroughSlots("triton", slot_attention)
