"""How slot scores become slot weights, and the way back; with one kernel, for gradients between the two passes.

Triton has no sigmoid that is safe for every score, so there is one here.

Shape letters: M slots, BM slots of a tile; C tokens of a chunk, X features of a tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gsa.ops.triton.jit.tiles import load_rows


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)), without overflow."""
    e = tl.exp(-tl.abs(x))
    return tl.where(x >= 0, 1.0, e) / (1.0 + e)


@triton.jit
def readout(x, M, READOUT: tl.constexpr):
    """Slot weights [rows, BM] from slot scores, fp32 or fp64; columns from M on, which are no slots, weigh nothing."""
    slots = (tl.arange(0, x.shape[1]) < M)[None, :]
    if READOUT == "softmax":
        x = tl.where(slots, x, float("-inf"))
        p = tl.exp(x - tl.max(x, 1)[:, None])
        p = p / tl.sum(p, 1)[:, None]
    else:
        x = tl.where(slots, x, 0.0)
        if READOUT == "identity":
            p = x
        elif READOUT == "swish":
            p = x * sigmoid(x)
        elif READOUT == "relu":
            p = tl.maximum(x, 0.0)
        else:
            tl.static_assert(READOUT == "relu2")
            p = tl.maximum(x, 0.0)
            p = p * p
    return p


@triton.jit
def readout_gradient(x, p, dp, READOUT: tl.constexpr):
    """The gradient of the scores x, given their weights p = readout(x) and the gradient of those.

    Columns that are no slots come out as zero if dp is zero there (and whatever finite dp is, for softmax).
    """
    if READOUT == "softmax":
        dx = p * (dp - tl.sum(p * dp, 1)[:, None])
    elif READOUT == "identity":
        dx = dp
    elif READOUT == "swish":
        y = sigmoid(x)
        dx = dp * (y + p * (1.0 - y))
    elif READOUT == "relu":
        dx = tl.where(x > 0, dp, 0.0)
    else:
        tl.static_assert(READOUT == "relu2")
        dx = 2.0 * tl.maximum(x, 0.0) * dp
    return dx


@triton.jit
def softmax_scale(start, stride, held, X: tl.constexpr, BX: tl.constexpr, C: tl.constexpr, F: tl.constexpr):
    """What softmax subtracts from the rows of [C, X], and what it divides by: [C] each."""
    top = tl.full([C], float("-inf"), F)
    for first in range(0, X, BX):
        x = _load_scores(start, stride, first, held, X, BX, C, F)
        top = tl.maximum(top, tl.max(x, 1))
    total = tl.zeros([C], F)
    for first in range(0, X, BX):
        x = _load_scores(start, stride, first, held, X, BX, C, F)
        total += tl.sum(tl.exp(x - top[:, None]), 1)
    return top, total


@triton.jit
def _load_scores(start, stride, first, held, X: tl.constexpr, BX: tl.constexpr, C: tl.constexpr, F: tl.constexpr):
    columns = first + tl.arange(0, BX)
    x = load_rows(start, stride, columns, X, held, C).to(F)
    return tl.where((columns < X)[None, :], x, float("-inf"))


@triton.jit
def slot_weights(x, columns, width, top, total, READOUT: tl.constexpr, F: tl.constexpr):
    """Queries [C, X] as they are, or slot scores turned into weights; `top` and `total` are from `softmax_scale`."""
    if READOUT == "softmax":
        x = tl.where((columns < width)[None, :], tl.exp(x.to(F) - top[:, None]) / total[:, None], 0.0)
    elif READOUT != "none":
        x = readout(x.to(F), x.shape[1], READOUT)
    return x


@triton.jit
def differentiate_readout(
    slots, dweights, dslots, scale, rows, M: tl.constexpr, READOUT: tl.constexpr, ROWS: tl.constexpr, BM: tl.constexpr
):
    """Gradient of slot scores [rows, M] from that of slot weights, times `scale`."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BM)
    offsets = row[:, None] * M + column[None, :]
    mask = (row < rows)[:, None] & (column < M)[None, :]
    x = tl.load(slots + offsets, mask=mask, other=0.0)
    dp = tl.load(dweights + offsets, mask=mask, other=0.0)
    tl.store(dslots + offsets, readout_gradient(x, readout(x, M, READOUT), dp, READOUT) * scale, mask=mask)
