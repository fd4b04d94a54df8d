"""The kernels between the passes: one adds up what tiles have left, one goes back through the readout.

Shape letters: M slots, BM slots of a tile. What is added lies as [parts, entries].
"""

from __future__ import annotations

import triton
import triton.language as tl

from gsa.ops.triton.gates import readout, readout_gradient


@triton.jit
def add_parts(parts, out, entries, count, BLOCK: tl.constexpr):
    """out [entries] is the sum of the parts, always in the same order."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(parts + at, mask=at < entries, other=0.0)
    for _ in range(1, count):
        parts += entries  # not a multiple of it, which 32 bits may not hold
        total += tl.load(parts + at, mask=at < entries, other=0.0)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=at < entries)


@triton.jit
def differentiate_readout(
    slots, dweights, dslots, scale, rows, M: tl.constexpr, READOUT: tl.constexpr, ROWS: tl.constexpr, BM: tl.constexpr
):
    """Gradient of slot scores [rows, M] from that of slot weights, times `scale`."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BM)
    at = row[:, None] * M + column[None, :]
    mask = (row < rows)[:, None] & (column < M)[None, :]
    x = tl.load(slots + at, mask=mask, other=0.0)
    dp = tl.load(dweights + at, mask=mask, other=0.0)
    tl.store(dslots + at, readout_gradient(x, readout(x, M, READOUT), dp, READOUT) * scale, mask=mask)
