"""What the kernels compute entry by entry: write strengths from log gates, and how slot scores become weights.

Triton has neither expm1 nor a sigmoid that is safe everywhere; both must be right for every gate and every score.
"""

from __future__ import annotations

import triton
import triton.language as tl

_NEAR = tl.constexpr(0.5)


@triton.jit
def one_minus_exp(g):
    """1 - exp(g), to the last few bits for every g, be it -1e-30, 0 or -inf; fp32 or fp64."""
    # Where exp(g) is near 1 the difference would lose what exp rounds away; there the series of expm1 is used.
    near = tl.abs(g) <= _NEAR
    x = tl.where(near, g, 0.0)
    # 0.5**n / (n + 1)! is below a tenth of the rounding error after so many terms.
    TERMS: tl.constexpr = 15 if g.dtype == tl.float64 else 10
    series = x * 0.0 + 1.0
    for i in tl.static_range(TERMS - 1):
        series = 1.0 + series * (x * (1.0 / (TERMS - i)))
    return tl.where(near, -x * series, 1.0 - tl.exp(g))


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
