"""Everything that Python and csrc/ must agree on: structures, codes and constants.

The structures mirror csrc/native.h: names, fields and their order are the same. `difference` compares all of it with
what a library says of itself (csrc/layout.cpp), so that one built from other sources is never called.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from ctypes import POINTER, Structure, c_char_p, c_double, c_float, c_int32, c_int64, c_void_p, sizeof
from typing import Any

import torch

from gsa.errors import GSAError

CHUNK = 64
"""Tokens in a chunk of the operator."""
SCAN_CHUNK, SCAN_PADDING = 64, 16
"""Of the selective scan: tokens between two states that are kept, and what channels are padded to."""
BLOCK_ROWS, BLOCK_COLUMNS = 16, 32
"""Of a block of quantised weights."""
MAX_COLUMNS = 16
"""Columns of activations in one call of matrix-vector products."""
MAX_TOKENS = 64
"""Tokens in one call of decoding, for which weights are read once."""

STATUS_CODES = {"done": 0, "no_memory": 1, "bad_gates": 2}
"""What the functions of the operator return."""
DTYPE_CODES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
READOUT_CODES = {"softmax": 0, "identity": 1, "swish": 2, "relu": 3, "relu2": 4}
WEIGHT_CODES = {"fp32": 0, "bf16": 1, "int8": 2, "int4": 3}
INPUT_CODES = {"plain": 0, "rms_norm": 1, "swiglu": 2}
"""What becomes of activations before a product."""
ACTIVATION_CODES = {"fp32": 0, "int8": 1, "int8-portable": 2}
"""The last computes what int8 does, as on a machine without the instruction for it; for tests."""
COMPUTE_CODES = {"bf16": 0, "int8": 1, "bf16-portable": 2, "int8-portable": 3}
"""What products with many columns are computed in; the portable ones without the processor's units, for tests."""
CACHE_BLOCK = 128
"""Positions in a block of an attention's cache."""
MEMORY_BLOCK = 32
"""Columns in a block of a memory of constant size."""
FUNCTION_CODES = {
    "none": 0,
    "swish": 1,
    "relu": 2,
    "relu2": 3,
    "gelu": 4,
    "sigmoid": 5,
    "elu1": 6,
    "softplus": 7,
}
"""Functions that decoding has compiled, entry by entry."""
GATE_CODES = {"none": 0, "forget": 1, "write": 2}
ROUTER_CODES = {"none": 0, "sigmoid": 1, "softmax": 2}
MEMORY_CODES = {"slots": 0, "linear": 1, "scan": 2, "cache": 3, "hybrid": 4}
"""What a layer remembers with."""
ROWS_CODES = {"rms_norm": 0, "swiglu": 1, "skip_gate": 2, "softplus": 3}
"""Functions of rows."""
NORM_CODES = {"none": 0, "full": 1, "heads": 2}
"""Of a mixer's outputs: none, over all of them, over those of a head."""


def int32(name: str, value: int) -> int:
    """A count that C++ holds in 32 bits; ctypes would cut off what is more."""
    if not 0 <= value < 1 << 31:
        raise GSAError(f"the native engine counts {name} in 32 bits, and {value} is too many")
    return value


def _fields(kind: Any, names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


class GsaTensor(Structure):
    _fields_ = [("data", c_void_p), *_fields(c_int64, "batch time head"), *_fields(c_int32, "type width")]


class GsaShape(Structure):
    _fields_ = [
        ("sequences", c_int64),
        *_fields(POINTER(c_int64), "rows starts stops"),
        *_fields(c_int32, "heads queries mark_chunks threads wide"),
        ("scale", c_double),
    ]


class GsaLinearAttention(Structure):
    _fields_ = [
        ("shape", GsaShape),
        *_fields(GsaTensor, "q k v gk gv o"),
        *_fields(c_void_p, "initial final kept"),
        *_fields(GsaTensor, "d_o dq dk dv dgk dgv"),
        *_fields(c_void_p, "dfinal dinitial"),
    ]


class GsaSlotAttention(Structure):
    _fields_ = [
        ("shape", GsaShape),
        ("readout", c_int32),
        *_fields(GsaTensor, "q k v g s o slots"),
        *_fields(c_void_p, "initial_k initial_v final_k final_v kept_k kept_v"),
        *_fields(GsaTensor, "d_o dq dk dv dg ds"),
        *_fields(c_void_p, "dfinal_k dfinal_v dinitial_k dinitial_v"),
    ]


class GsaWindowAttention(Structure):
    _fields_ = [
        ("shape", GsaShape),
        ("window", c_int64),
        *_fields(POINTER(c_int64), "shifts firsts befores"),
        ("sinks", c_int32),
        *_fields(GsaTensor, "q k v o sink_q sink_k sink_v lse"),
        *_fields(GsaTensor, "d_o d_lse dq dk dv dsink_q dsink_k dsink_v"),
    ]


class GsaJoinedSlots(Structure):
    _fields_ = [
        ("shape", GsaShape),
        *_fields(GsaTensor, "q k v g s o slots near near_lse"),
        *_fields(c_void_p, "slot_scale slot_mass slot_bias"),
        *_fields(c_void_p, "initial_k initial_v initial_mass"),
        *_fields(c_void_p, "final_k final_v final_mass"),
        *_fields(c_void_p, "kept_k kept_v kept_mass"),
        *_fields(GsaTensor, "d_o dq dk dv dg ds d_near d_near_lse"),
        *_fields(c_void_p, "dslot_scale dslot_mass dslot_bias"),
        *_fields(c_void_p, "dfinal_k dfinal_v dfinal_mass"),
        *_fields(c_void_p, "dinitial_k dinitial_v dinitial_mass"),
    ]


class GsaStep(Structure):
    _fields_ = [
        ("batch", c_int64),
        ("state_of", c_void_p),
        *_fields(c_int32, "heads queries readout threads wide check"),
        ("scale", c_double),
        *_fields(GsaTensor, "q k v g s o"),
        *_fields(c_void_p, "before_k before_v after_k after_v"),
    ]


class GsaSelectiveScan(Structure):
    _fields_ = [
        ("shape", GsaShape),
        *_fields(GsaTensor, "u dt A B C y"),
        *_fields(c_void_p, "initial final kept"),
        *_fields(GsaTensor, "d_y du d_dt dA dB dC"),
        *_fields(c_void_p, "dfinal dinitial"),
    ]


class GsaRows(Structure):
    _fields_ = [
        ("rows", c_int64),
        *_fields(c_int32, "function width threads wide"),
        ("epsilon", c_double),
        *_fields(GsaTensor, "x y z out"),
        ("weight", c_void_p),
        *_fields(GsaTensor, "d_out dx dy dz"),
        ("dweight", c_void_p),
    ]


class GsaCrossEntropy(Structure):
    _fields_ = [
        ("rows", c_int64),
        *_fields(c_int32, "threads wide gradient"),
        ("logits", GsaTensor),
        *_fields(c_void_p, "labels losses"),
    ]


class GsaDraw(Structure):
    _fields_ = [
        ("logits", c_void_p),
        *_fields(c_double, "temperature top_p min_p chance repetition presence frequency"),
        *_fields(c_int64, "top_k known"),
        *_fields(c_void_p, "known_ids counts"),
        ("biased", c_int64),
        *_fields(c_void_p, "biased_ids biases"),
        ("token", c_int64),
    ]


class GsaConvolution(Structure):
    _fields_ = [
        ("shape", GsaShape),
        *_fields(c_int32, "taps function"),
        *_fields(GsaTensor, "x y"),
        *_fields(c_void_p, "weight bias past"),
        *_fields(GsaTensor, "d_y dx"),
        *_fields(c_void_p, "dweight dbias dpast"),
    ]


class GsaMatrix(Structure):
    _fields_ = [*_fields(c_int64, "format N K group"), *_fields(c_void_p, "weight scale zero")]


class GsaStepConvolution(Structure):
    _fields_ = [
        *_fields(c_void_p, "weight bias past"),
        ("channels", c_int64),
        *_fields(c_int32, "size function"),
    ]


class GsaGate(Structure):
    _fields_ = [
        *_fields(c_void_p, "log_bound log_rest log_z"),
        *_fields(c_double, "temperature clamp"),
        ("write", c_int64),
        *_fields(c_int32, "kind normalise"),
    ]


class GsaProduct(Structure):
    _fields_ = [
        ("matrix", GsaMatrix),
        ("bias", c_void_p),
        *_fields(c_int64, "input output"),
        ("convolution", GsaStepConvolution),
        ("gate", GsaGate),
        ("function", c_int32),
    ]


class GsaHeads(Structure):
    _fields_ = [
        *_fields(c_int64, "q k v o"),
        *_fields(c_void_p, "map query_norm key_norm frequencies positions"),
        ("scale", c_double),
        ("epsilon", c_float),
        *_fields(c_int32, "heads queries key_width value_width"),
    ]


class GsaRouter(Structure):
    _fields_ = [
        *_fields(c_int64, "logits gates"),
        ("rates", c_void_p),
        ("temperature", c_double),
        *_fields(c_int32, "kind chosen"),
    ]


class GsaMemory(Structure):
    _fields_ = [
        *_fields(c_int64, "decay write"),
        *_fields(c_void_p, "constant_decay constant_write keys values"),
        ("router", GsaRouter),
        *_fields(c_int32, "slots readout own"),
    ]


class GsaCache(Structure):
    _fields_ = [*_fields(c_void_p, "caches capacities begins"), ("window", c_int64)]


class GsaHybrid(Structure):
    _fields_ = [
        *_fields(c_int64, "sink_query slot_query left inverse log_mass"),
        *_fields(c_void_p, "router_weight query_weight router_bias rates fades scale mass_power bias"),
        *_fields(c_void_p, "sink_keys sink_values mass"),
        *_fields(c_double, "temperature least"),
        *_fields(c_int32, "sinks bf16 own_positions"),
    ]


class GsaScan(Structure):
    _fields_ = [
        *_fields(c_int64, "u dt B C gate y"),
        *_fields(c_void_p, "A skip memory"),
        *_fields(c_int32, "channels states"),
    ]


class GsaOutput(Structure):
    _fields_ = [
        ("matrix", GsaMatrix),
        *_fields(c_int64, "o gate"),
        ("norm", c_void_p),
        ("epsilon", c_float),
        *_fields(c_int32, "norm_kind function"),
    ]


class GsaMlp(Structure):
    _fields_ = [*_fields(GsaMatrix, "gate up down"), ("norm", c_void_p), ("epsilon", c_float)]


class GsaBlock(Structure):
    _fields_ = [
        ("norm", c_void_p),
        ("products", POINTER(GsaProduct)),
        *_fields(c_int64, "product_count features"),
        ("heads", GsaHeads),
        ("memory", GsaMemory),
        ("cache", GsaCache),
        ("hybrid", GsaHybrid),
        ("scan", GsaScan),
        ("output", GsaOutput),
        ("mlp", GsaMlp),
        ("epsilon", c_float),
        ("kind", c_int32),
    ]


class GsaDecoder(Structure):
    _fields_ = [
        *_fields(c_int64, "width block_count"),
        ("blocks", POINTER(GsaBlock)),
        *_fields(GsaMatrix, "embeddings head"),
        ("norm", c_void_p),
        ("epsilon", c_float),
        ("activations", c_int32),
    ]


class GsaNumber(Structure):
    """A line of what a library says of itself."""

    _fields_ = [("name", c_char_p), ("value", c_int64)]


STRUCTURES = (
    GsaTensor,
    GsaShape,
    GsaLinearAttention,
    GsaSlotAttention,
    GsaWindowAttention,
    GsaJoinedSlots,
    GsaStep,
    GsaSelectiveScan,
    GsaRows,
    GsaCrossEntropy,
    GsaDraw,
    GsaConvolution,
    GsaMatrix,
    GsaStepConvolution,
    GsaGate,
    GsaRouter,
    GsaProduct,
    GsaHeads,
    GsaMemory,
    GsaCache,
    GsaHybrid,
    GsaScan,
    GsaOutput,
    GsaMlp,
    GsaBlock,
    GsaDecoder,
)


def expected() -> dict[str, int]:
    """Every number that a library must have, by the name that csrc/layout.cpp gives it."""
    numbers = {
        "CHUNK": CHUNK,
        "SCAN_CHUNK": SCAN_CHUNK,
        "SCAN_PADDING": SCAN_PADDING,
        "BLOCK_ROWS": BLOCK_ROWS,
        "BLOCK_COLUMNS": BLOCK_COLUMNS,
        "MAX_COLUMNS": MAX_COLUMNS,
        "MAX_TOKENS": MAX_TOKENS,
        "CACHE_BLOCK": CACHE_BLOCK,
        "MEMORY_BLOCK": MEMORY_BLOCK,
    }
    for struct in STRUCTURES:
        numbers[struct.__name__] = sizeof(struct)
        for name, *_ in struct._fields_:
            numbers[f"{struct.__name__}.{name}"] = getattr(struct, name).offset
    dtypes = {str(dtype).removeprefix("torch."): code for dtype, code in DTYPE_CODES.items()}
    codes: dict[str, Mapping[str, int]] = {
        "": dtypes,
        "STATUS_": STATUS_CODES,
        "READOUT_": READOUT_CODES,
        "WEIGHT_": WEIGHT_CODES,
        "INPUT_": INPUT_CODES,
        "ACTIVATIONS_": ACTIVATION_CODES,
        "COMPUTE_": COMPUTE_CODES,
        "FUNCTION_": FUNCTION_CODES,
        "NORM_": NORM_CODES,
        "GATE_": GATE_CODES,
        "ROUTER_": ROUTER_CODES,
        "MEMORY_": MEMORY_CODES,
        "ROWS_": ROWS_CODES,
    }
    for prefix, table in codes.items():
        numbers |= {prefix + name.upper().replace("-", "_"): code for name, code in table.items()}
    return numbers


def listed(numbers: Iterable[GsaNumber]) -> dict[str, int]:
    """The result of gsa_layout(), which ends with a number that has no name."""
    found = {}
    for number in numbers:
        if number.name is None:
            break
        found[number.name.decode()] = number.value
    return found


def difference(found: Mapping[str, int]) -> str | None:
    """How a library with these numbers differs from what Python expects, as a clause; None if it does not."""
    here = expected()
    if found == here:
        return None
    names = [name for name in {**here, **found} if found.get(name) != here.get(name)]
    first = names[0]
    clause = f"{first} is {found.get(first, 'missing')} there and {here.get(first, 'missing')} here"
    return clause if len(names) == 1 else f"{clause}, and {len(names) - 1} more"
