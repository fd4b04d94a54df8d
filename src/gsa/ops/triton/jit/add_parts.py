"""The kernel that adds up the parts of a result that several tiles have left, [parts, entries]."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add_parts(parts, out, entries, count, BLOCK: tl.constexpr):
    """out [entries] is the sum of the parts, always in the same order."""
    entry = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(parts + entry, mask=entry < entries, other=0.0)
    for _ in range(1, count):
        parts += entries  # step by step, because a multiple of `entries` may not fit into 32 bits
        total += tl.load(parts + entry, mask=entry < entries, other=0.0)
    tl.store(out + entry, total.to(out.dtype.element_ty), mask=entry < entries)
