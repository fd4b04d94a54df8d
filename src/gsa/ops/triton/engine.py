"""The engine `triton`: the GPU kernels, as operators with the signatures of gsa.ops.reference."""

from gsa.ops.operators import register
from gsa.ops.triton import kernels

gated_linear_attention, gated_slot_attention = register("triton", kernels)
