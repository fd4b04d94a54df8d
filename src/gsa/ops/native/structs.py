"""The structures of csrc/native.h: names and order mirror it."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_double, c_int32, c_int64, c_void_p
from functools import lru_cache
from typing import Any

from gsa.ops.native.library import library


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


class LinearAttention(Structure):
    _fields_ = [
        ("shape", CallShape),
        *tensor_fields(CallTensor, "q k v gk gv o"),
        *tensor_fields(c_void_p, "initial final kept"),
        *tensor_fields(CallTensor, "d_o dq dk dv dgk dgv"),
        *tensor_fields(c_void_p, "dfinal dinitial"),
    ]


class SlotAttention(Structure):
    _fields_ = [
        ("shape", CallShape),
        ("readout", c_int32),
        *tensor_fields(CallTensor, "q k v g s o slots"),
        *tensor_fields(c_void_p, "initial_k initial_v final_k final_v kept_k kept_v"),
        *tensor_fields(CallTensor, "d_o dq dk dv dg ds"),
        *tensor_fields(c_void_p, "dfinal_k dfinal_v dinitial_k dinitial_v"),
    ]


class Step(Structure):
    _fields_ = [
        ("batch", c_int64),
        ("places", c_void_p),
        *tensor_fields(c_int32, "heads queries readout threads wide"),
        ("scale", c_double),
        *tensor_fields(CallTensor, "q k v g s o"),
        *tensor_fields(c_void_p, "before_k before_v after_k after_v"),
    ]


class SelectiveScan(Structure):
    _fields_ = [
        ("shape", CallShape),
        *tensor_fields(CallTensor, "u dt A B C y"),
        *tensor_fields(c_void_p, "initial final kept"),
        *tensor_fields(CallTensor, "d_y du d_dt dA dB dC"),
        *tensor_fields(c_void_p, "dfinal dinitial"),
    ]


@lru_cache(None)
def compiled() -> ctypes.CDLL:
    lib = library()
    lib.gsa_linear_attention.argtypes = [POINTER(LinearAttention), ctypes.c_int]
    lib.gsa_slot_attention.argtypes = [POINTER(SlotAttention), ctypes.c_int]
    lib.gsa_slot_attention_step.argtypes = [POINTER(Step)]
    lib.gsa_selective_scan.argtypes = [POINTER(SelectiveScan), ctypes.c_int]
    sizes = (c_int64 * 3)()
    lib.gsa_operator_sizes(sizes)
    expected = [ctypes.sizeof(x) for x in (LinearAttention, SlotAttention, Step)]
    assert list(sizes) == expected, f"csrc/native.h has structures of {list(sizes)} bytes, these are of {expected}"
    return lib
