"""One token of gated slot attention by the compiled kernel."""

from __future__ import annotations

from ctypes import POINTER
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from gsa.errors import GSAError
from gsa.ops.calls import StepCall, sums_dtype
from gsa.ops.gates import refuse_gates
from gsa.ops.native.arguments import MAX_PRODUCT, Arguments, heads_and_queries
from gsa.ops.native.library import declare
from gsa.ops.native.results import empty
from gsa.ops.native.structs import READOUT_CODES, GsaStep
from gsa.ops.state import SlotState


def step(call: StepCall, *, inplace: bool) -> tuple[Tensor, SlotState]:
    """The output [B, HQ, V] for one token per row, and the state after it; in place, the call's own."""
    dtype, (B, HQ, _), (H, V) = sums_dtype(call), call.q.shape, call.v.shape[1:]
    before = SlotState(call.memory_k, call.memory_v)
    after = before if inplace else SlotState(*(empty(tuple(x.shape), dtype) for x in before))
    assert all(x.is_contiguous() and x.dtype == dtype for x in after)
    heads, queries = heads_and_queries(call.q, H)
    if queries * max(call.q.shape[2], V, call.g.shape[2]) > MAX_PRODUCT:
        raise GSAError(f"q has {queries} heads per head of k, too many for heads that wide and so many slots")
    o = torch.empty((B, HQ, V), dtype=call.q.dtype, device="cpu")
    arguments = Arguments(
        GsaStep(
            batch=B,
            heads=heads,
            queries=queries,
            readout=READOUT_CODES[call.readout],
            threads=torch.get_num_threads(),
            wide=dtype == torch.float64,
            check=call.check,
            scale=call.scale,
        )
    )
    arguments.tensors(q=call.q, k=call.k, v=call.v, g=call.g, s=call.s, o=o)
    arguments.states(dtype, before_k=before.k, before_v=before.v)
    arguments.results(after_k=after.k, after_v=after.v)
    if not arguments.run(_compiled()):
        refuse_gates(g=call.g)
        raise GSAError("g must be log gates, at most 0 (-inf is a full reset), but some are above 0 or NaN")
    return o, after


@lru_cache(None)
def _compiled() -> Any:
    return declare("gsa_slot_attention_step", POINTER(GsaStep))
