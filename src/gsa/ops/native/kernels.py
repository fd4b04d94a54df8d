"""Calls of the compiled operator: tensors to pointers. What reaches C++ was checked before, by gsa.ops.api and here.

The names and their order mirror csrc/native.h.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, byref, c_double, c_int32, c_int64, c_void_p
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from gsa.errors import GSAError, OutOfMemory
from gsa.ops.layout import sequence_bounds, sequence_count
from gsa.ops.native.library import library
from gsa.ops.native.results import empty, empty_like
from gsa.ops.operators import laid_out_like
from gsa.ops.readout import READOUTS
from gsa.ops.state import SlotState, compute_dtype

CHUNK = 64
"""Tokens in a chunk; csrc/operator.h has the same."""
MARK_CHUNKS = 4
"""The forward pass keeps a state at every so many chunks; the backward pass computes those between them again."""

MOST_FEATURES, MOST_QUERIES = 1 << 24, 1 << 16
"""So that no index in C++ overflows."""

_DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
READOUT_CODES = {name: code for code, name in enumerate(("softmax", "identity", "swish", "relu", "relu2"))}
assert READOUT_CODES.keys() == READOUTS.keys()


class CallTensor(Structure):
    _fields_ = [
        ("data", c_void_p),
        ("batch", c_int64),
        ("time", c_int64),
        ("head", c_int64),
        ("type", c_int32),
        ("width", c_int32),
    ]


class CallShape(Structure):
    _fields_ = [
        ("sequences", c_int64),
        ("rows", POINTER(c_int64)),
        ("starts", POINTER(c_int64)),
        ("stops", POINTER(c_int64)),
        ("heads", c_int32),
        ("queries", c_int32),
        ("mark_chunks", c_int32),
        ("threads", c_int32),
        ("wide", c_int32),
        ("scale", c_double),
    ]


def tensor_fields(kind: Any, names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


class _LinearAttention(Structure):
    _fields_ = [
        ("shape", CallShape),
        *tensor_fields(CallTensor, "q k v gk gv o"),
        *tensor_fields(c_void_p, "initial final kept"),
        *tensor_fields(CallTensor, "d_o dq dk dv dgk dgv"),
        *tensor_fields(c_void_p, "dfinal dinitial"),
    ]


class _SlotAttention(Structure):
    _fields_ = [
        ("shape", CallShape),
        ("readout", c_int32),
        *tensor_fields(CallTensor, "q k v g s o slots"),
        *tensor_fields(c_void_p, "initial_k initial_v final_k final_v kept_k kept_v"),
        *tensor_fields(CallTensor, "d_o dq dk dv dg ds"),
        *tensor_fields(c_void_p, "dfinal_k dfinal_v dinitial_k dinitial_v"),
    ]


class _Step(Structure):
    _fields_ = [
        ("batch", c_int64),
        ("places", c_void_p),
        *tensor_fields(c_int32, "heads queries readout threads wide"),
        ("scale", c_double),
        *tensor_fields(CallTensor, "q k v g s o"),
        *tensor_fields(c_void_p, "before_k before_v after_k after_v"),
    ]


@lru_cache(None)
def _compiled() -> ctypes.CDLL:
    lib = library()
    lib.gsa_linear_attention.argtypes = [POINTER(_LinearAttention), ctypes.c_int]
    lib.gsa_slot_attention.argtypes = [POINTER(_SlotAttention), ctypes.c_int]
    lib.gsa_slot_attention_step.argtypes = [POINTER(_Step)]
    sizes = (c_int64 * 3)()
    lib.gsa_operator_sizes(sizes)
    expected = [ctypes.sizeof(x) for x in (_LinearAttention, _SlotAttention, _Step)]
    assert list(sizes) == expected, f"csrc/native.h has structures of {list(sizes)} bytes, these are of {expected}"
    return lib


def _plain(x: Tensor) -> Tensor:
    """x with its numbers in memory as they are; nothing else may reach C++."""
    if x.device.type != "cpu":
        raise GSAError(f"the native engine runs on the CPU, got a tensor on {x.device}")
    return x.resolve_neg() if x.is_neg() else x


def _check_heads(queries: int) -> None:
    if queries > MOST_QUERIES:
        raise GSAError(f"q has {queries} heads per head of k, the native engine takes at most {MOST_QUERIES}")


class Call:
    """A structure being filled; holds the tensors whose memory it points to."""

    def __init__(self, struct: Any):
        self.struct = struct
        self.alive: list[Any] = []

    def tensors(self, **tensors: Tensor | None) -> None:
        """Tensors [B, T, heads, width], or [B, heads, width] for a step; copied if their last dimension has gaps."""
        for name, x in tensors.items():
            if x is None:
                continue
            x = _plain(x)
            if x.shape[-1] > 1 and x.stride(-1) != 1:
                x = x.contiguous()
            if x.shape[-1] > MOST_FEATURES:
                raise GSAError(f"{name} has heads of {x.shape[-1]}, the native engine takes at most {MOST_FEATURES}")
            self.alive.append(x)
            strides = x.stride()
            time = strides[1] if x.dim() == 4 else 0
            setattr(
                self.struct,
                name,
                CallTensor(x.data_ptr(), strides[0], time, strides[-2], _DTYPES[x.dtype], x.shape[-1]),
            )

    def states(self, dtype: torch.dtype, **states: Tensor | None) -> None:
        """Dense states of the dtype that sums are carried in."""
        for name, x in states.items():
            if x is None:
                continue
            x = _plain(x).to(dtype).contiguous()
            self.alive.append(x)
            setattr(self.struct, name, x.data_ptr())

    def shape(self, q: Tensor, k: Tensor, cu_seqlens: Tensor | None, scale: float, keep: str) -> None:
        if cu_seqlens is None:
            bounds = _rows(q.shape[0], q.shape[1])
        else:
            found = sequence_bounds(q.shape[0], q.shape[1], cu_seqlens)
            bounds = tuple((c_int64 * len(found))(*column) for column in zip(*found, strict=True)) or _rows(0, 0)
        self.alive.append(bounds)
        _check_heads(q.shape[2] // k.shape[2])
        self.struct.shape = CallShape(
            len(bounds[0]),
            *bounds,
            k.shape[2],
            q.shape[2] // k.shape[2],
            _mark_chunks(keep),
            torch.get_num_threads(),
            q.dtype == torch.float64,
            scale,
        )

    def run(self, function: Any, *arguments: int) -> None:
        if function(byref(self.struct), *arguments):
            raise OutOfMemory("the native engine could not get its working memory")


@lru_cache(64)
def _rows(B: int, T: int) -> tuple[Any, ...]:
    """Rows, starts and stops of a batch that is not packed."""
    kind = c_int64 * B
    return kind(*range(B)), kind(), kind(*[T] * B)


def _mark_chunks(keep: str) -> int:
    return 1 if keep == "states" else MARK_CHUNKS


def kept_shape(
    q: Tensor, v: Tensor, cu_seqlens: Tensor | None, keep: str, heads: int, rows: int, columns: int
) -> tuple[int, ...]:
    """Of the states [rows, columns] that forward keeps, from shapes alone."""
    span = CHUNK * _mark_chunks(keep)
    if keep == "nothing":
        count = 0
    elif cu_seqlens is None:
        count = q.shape[0] * -(-q.shape[1] // span)
    else:
        count = q.shape[1] // span + cu_seqlens.shape[0] - 1
    return (count, heads, rows, columns)


def gla_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gk: Tensor | None,
    gv: Tensor | None,
    initial: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    keep: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """o [B, T, HQ, V], final states [N, H, K, V], kept states."""
    dtype, H, K, V = compute_dtype(q.dtype), k.shape[2], k.shape[3], v.shape[3]
    o = empty((*q.shape[:3], V), q.dtype)
    final = empty((sequence_count(q, cu_seqlens), H, K, V), dtype)
    kept = empty(kept_shape(q, v, cu_seqlens, keep, H, K, V), dtype)
    call = Call(_LinearAttention())
    call.shape(q, k, cu_seqlens, scale, keep)
    call.tensors(q=q, k=k, v=v, gk=gk, gv=gv, o=o)
    call.states(dtype, initial=initial, final=final, kept=kept)
    call.run(_compiled().gsa_linear_attention, 0)
    return o, final, kept


def gla_backward(
    do: Tensor,
    dfinal: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gk: Tensor | None,
    gv: Tensor | None,
    initial: Tensor | None,
    cu_seqlens: Tensor | None,
    kept: Tensor,
    scale: float,
    keep: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor]:
    """Gradients of q, k, v, gk, gv and the initial states."""
    dtype, H = compute_dtype(q.dtype), k.shape[2]
    dq, dk, dv = map(empty_like, (q, k, v))
    dgk, dgv = (None if x is None else empty_like(x) for x in (gk, gv))
    dinitial = empty((sequence_count(q, cu_seqlens), H, k.shape[3], v.shape[3]), dtype)
    call = Call(_LinearAttention())
    call.shape(q, k, cu_seqlens, scale, keep)
    call.tensors(q=q, k=k, v=v, gk=gk, gv=gv, d_o=do, dq=dq, dk=dk, dv=dv, dgk=dgk, dgv=dgv)
    call.states(dtype, kept=kept, dfinal=dfinal, dinitial=dinitial)
    call.run(_compiled().gsa_linear_attention, 1)
    dgk = None if gk is None or dgk is None else laid_out_like(gk, dgk)
    dgv = None if gv is None or dgv is None else laid_out_like(gv, dgv)
    return laid_out_like(q, dq), laid_out_like(k, dk), laid_out_like(v, dv), dgk, dgv, dinitial


def gsa_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    s: Tensor | None,
    initial_k: Tensor | None,
    initial_v: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    readout: str,
    keep: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """o [B, T, HQ, V], both final memories, slot scores [B, T, HQ, M] and kept states of both passes."""
    dtype, H, K, V, M = compute_dtype(q.dtype), k.shape[2], k.shape[3], v.shape[3], g.shape[3]
    N = sequence_count(q, cu_seqlens)
    o = empty((*q.shape[:3], V), q.dtype)
    slots = empty((0,) if keep == "nothing" else (*q.shape[:3], M), dtype)
    final_k, final_v = empty((N, H, K, M), dtype), empty((N, H, M, V), dtype)
    kept_k = empty(kept_shape(q, v, cu_seqlens, keep, H, K, M), dtype)
    kept_v = empty(kept_shape(q, v, cu_seqlens, keep, H, M, V), dtype)
    call = Call(_SlotAttention(readout=READOUT_CODES[readout]))
    call.shape(q, k, cu_seqlens, scale, keep)
    call.tensors(q=q, k=k, v=v, g=g, s=s, o=o, slots=None if keep == "nothing" else slots)
    call.states(dtype, initial_k=initial_k, initial_v=initial_v, final_k=final_k, final_v=final_v)
    call.states(dtype, kept_k=kept_k, kept_v=kept_v)
    call.run(_compiled().gsa_slot_attention, 0)
    return o, final_k, final_v, slots, kept_k, kept_v


def gsa_backward(
    do: Tensor,
    dfinal_k: Tensor | None,
    dfinal_v: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    s: Tensor | None,
    initial_k: Tensor | None,
    initial_v: Tensor | None,
    cu_seqlens: Tensor | None,
    slots: Tensor,
    kept_k: Tensor,
    kept_v: Tensor,
    scale: float,
    readout: str,
    keep: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor, Tensor]:
    """Gradients of q, k, v, g, s and both initial memories."""
    dtype, H, K, V, M = compute_dtype(q.dtype), k.shape[2], k.shape[3], v.shape[3], g.shape[3]
    N = sequence_count(q, cu_seqlens)
    dq, dk, dv, dg = map(empty_like, (q, k, v, g))
    ds = None if s is None else empty_like(s)
    dinitial_k, dinitial_v = empty((N, H, K, M), dtype), empty((N, H, M, V), dtype)
    call = Call(_SlotAttention(readout=READOUT_CODES[readout]))
    call.shape(q, k, cu_seqlens, scale, keep)
    call.tensors(q=q, k=k, v=v, g=g, s=s, slots=slots, d_o=do, dq=dq, dk=dk, dv=dv, dg=dg, ds=ds)
    call.states(dtype, kept_k=kept_k, kept_v=kept_v, dfinal_k=dfinal_k, dfinal_v=dfinal_v)
    call.states(dtype, dinitial_k=dinitial_k, dinitial_v=dinitial_v)
    call.run(_compiled().gsa_slot_attention, 1)
    ds = None if s is None or ds is None else laid_out_like(s, ds)
    dq, dk, dv, dg = map(laid_out_like, (q, k, v, g), (dq, dk, dv, dg))
    return dq, dk, dv, dg, ds, dinitial_k, dinitial_v


def gsa_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    s: Tensor | None,
    before: SlotState,
    after: SlotState,
    scale: float,
    readout: str,
) -> Tensor:
    """o [B, HQ, V] for one token per row; fills `after`, dense and of the dtype sums are carried in, maybe `before`."""
    dtype = compute_dtype(q.dtype)
    assert all(x.is_contiguous() and x.dtype == dtype for x in after)
    _check_heads(q.shape[1] // k.shape[1])
    o = torch.empty((*q.shape[:2], v.shape[2]), dtype=q.dtype, device="cpu")
    call = Call(
        _Step(
            q.shape[0],
            None,
            k.shape[1],
            q.shape[1] // k.shape[1],
            READOUT_CODES[readout],
            torch.get_num_threads(),
            dtype == torch.float64,
            scale,
        )
    )
    call.tensors(q=q, k=k, v=v, g=g, s=s, o=o)
    call.states(dtype, before_k=before.k, before_v=before.v, after_k=after.k, after_v=after.v)
    call.run(_compiled().gsa_slot_attention_step)
    return o
