"""Tokens drawn by the compiled kernel, for many sequences in one call.

Shape letters: V vocabulary, N sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import addressof, c_int, c_int64, c_void_p
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from gsa.ops.memory import address
from gsa.ops.native.library import check_memory, declare
from gsa.ops.native.structs import GsaDraw


def draw(logits: Tensor, draws: Sequence[GsaDraw]) -> list[int]:
    """The tokens that come out by the scores [N, V], which are contiguous, finite and fp32; all else of a draw, and
    what it points to, is the caller's to set."""
    assert logits.dtype == torch.float32
    assert logits.is_contiguous()
    assert len(draws) == len(logits)
    count, width = logits.shape
    if not count:
        return []
    begin = address("logits", logits)
    for row, one in enumerate(draws):
        one.logits = begin + row * width * logits.itemsize
    addresses = (c_void_p * count)(*[addressof(one) for one in draws])
    check_memory(_compiled()(addresses, count, width, torch.get_num_threads()), "draw")
    return [one.token for one in draws]


@lru_cache(None)
def _compiled() -> Any:
    return declare("gsa_draw", c_void_p, c_int64, c_int64, c_int)
