"""The engine `chunk`: the chunkwise forms in torch, as operators with the signatures of gsa.ops.reference."""

from gsa.ops import chunk, selective_scan_chunk
from gsa.ops.operators import register
from gsa.ops.selective_scan_operator import register_selective_scan

gated_linear_attention, gated_slot_attention = register("chunk", chunk)
selective_scan = register_selective_scan("chunk", selective_scan_chunk)
