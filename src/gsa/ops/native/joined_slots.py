"""Gated slots in one softmax with what else a token sees, by the compiled kernels."""

from __future__ import annotations

from ctypes import POINTER, c_int
from functools import lru_cache
from typing import Any

import torch

from gsa.ops.calls import Gradients, JoinedSlotsCall, Shape, Tensors, sums_dtype
from gsa.ops.gates import refuse_gates, refuse_strengths
from gsa.ops.native.arguments import Arguments, kept_states
from gsa.ops.native.library import declare
from gsa.ops.native.results import empty, empty_like
from gsa.ops.native.structs import GsaJoinedSlots

PARTS = ("k", "v", "mass")
"""Of the memory, in the order of results and of what is saved."""


def saved_shapes(call: JoinedSlotsCall) -> tuple[Shape, ...]:
    """Of the slot scores, and of the kept states [K, M], [M, V] and [M] of every head."""
    count, (H, K), V, M = kept_states(call), call.k.shape[2:], call.v.shape[3], call.g.shape[3]
    scores = (0,) if call.save == "nothing" else (*call.q.shape[:3], M)
    return scores, (count * H * K * M,), (count * H * M * V,), (count * H * M,)


def forward(call: JoinedSlotsCall) -> tuple[Tensors, Tensors]:
    """Outputs [B, T, HQ, V] and the final memories; slot scores [B, T, HQ, M] and kept states."""
    dtype, (o_shape, *final_shapes) = sums_dtype(call), call.result_shapes()
    o, finals = empty(o_shape, call.q.dtype), [empty(shape, dtype) for shape in final_shapes]
    scores, *kept = (empty(shape, dtype) for shape in saved_shapes(call))
    arguments = _arguments(call)
    arguments.tensors(o=o, slots=None if call.save == "nothing" else scores)
    arguments.states(dtype, **_named("initial", (call.initial_k, call.initial_v, call.initial_mass)))
    arguments.results(**_named("final", finals), **_named("kept", kept))
    if not arguments.run(_compiled(), 0) and call.check:
        refuse_gates(g=call.g)
    if call.check:
        refuse_strengths(call.s)
    return (o, *finals), (scores, *kept)


def backward(call: JoinedSlotsCall, saved: Tensors, gradients: Gradients) -> Gradients:
    """Gradients of q, k, v, g, s, what is near and its log-sum-exps, the heads' numbers, and the initial memories."""
    (scores, *kept), (do, *dfinals), dtype = saved, gradients, sums_dtype(call)
    dq, dk, dv, dg, ds, dnear = map(empty_like, (call.q, call.k, call.v, call.g, call.s, call.near))
    dnear_lse = empty(tuple(call.near_lse.shape), dtype)
    _, *shapes = call.result_shapes()
    dinitials = [empty(shape, dtype) for shape in shapes]
    # Of each sequence by itself, since several threads add to them.
    heads = [torch.zeros(shapes[0][0], call.q.shape[2], dtype=dtype) for _ in range(3)]
    arguments = _arguments(call)
    arguments.tensors(slots=scores, d_o=do, dq=dq, dk=dk, dv=dv, dg=dg, ds=ds)
    arguments.tensors(d_near=dnear, d_near_lse=dnear_lse[..., None])
    arguments.states(dtype, **_named("kept", kept), **_named("dfinal", dfinals))
    arguments.results(**_named("dinitial", dinitials), dslot_scale=heads[0], dslot_mass=heads[1], dslot_bias=heads[2])
    arguments.run(_compiled(), 1)
    return dq, dk, dv, dg, ds, dnear, dnear_lse, *(x.sum(0) for x in heads), *dinitials


def _named(prefix: str, tensors: Any) -> dict[str, Any]:
    return {f"{prefix}_{part}": x for part, x in zip(PARTS, tensors, strict=True)}


def _arguments(call: JoinedSlotsCall) -> Arguments:
    """The inputs, as C++ takes them."""
    dtype = sums_dtype(call)
    arguments = Arguments(GsaJoinedSlots())
    arguments.shape(call.q, call.k.shape[2], call.cu_seqlens, call.scale, call.save)
    arguments.tensors(q=call.q, k=call.k, v=call.v, g=call.g, s=call.s)
    arguments.tensors(near=call.near, near_lse=call.near_lse[..., None])
    arguments.states(dtype, slot_scale=call.slot_scale, slot_mass=call.slot_mass, slot_bias=call.slot_bias)
    return arguments


@lru_cache(None)
def _compiled() -> Any:
    return declare("gsa_joined_slots", POINTER(GsaJoinedSlots), c_int)
