"""What the kernels are made of: products of tiles, and the decay between the tokens of a chunk.

With log gates g_t, token j reaches token i >= j with the weight w_ij = exp(g_{j+1} + ... + g_i), one per feature. While
the decay of a chunk is mild, w_ij splits into up_i * down_j, anchored half way, and everything is a product of tiles. A
chunk with stronger decay is halved: between its halves, w_ij splits at the middle into two factors that are at most
one, and so on inside the halves. Those factors are exponentials of sums of g, never of differences: they hold for
g = -inf and lose nothing to cancellation. Every program decides for its own chunk.

Shape letters: C tokens of a chunk, X features of a tile. Rows of tiles are tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gsa.ops.triton.gates import readout

# Nats of decay per token, on average over a chunk, up to which the split is taken: as in gsa.ops.chunk.decay.
SPLIT_LIMIT = tl.constexpr(1.0)


@triton.jit
def _halves(x):
    """x as the sum of two bf16 numbers: 16 bits of it, and its whole range."""
    x = x.to(tl.float32)
    high = x.to(tl.bfloat16)
    return high, (x - high.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def _dot(a, b, plus, P: tl.constexpr):
    if P == "emulated":  # Triton's interpreter would multiply the bits of bf16 numbers
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, plus)


@triton.jit
def product(a, b, P: tl.constexpr, plus=None):
    """The matrix product (`plus` another), summed in fp32 or fp64, of factors not rounded to the inputs' dtype.

    P says how matrix units get there: "split" for fp16 and bf16, where a factor that was computed goes in as two bf16
    numbers ("emulated": by the interpreter); "tf32x3" for fp32 on NVIDIA; "ieee" where fp32 or fp64 is taken as it is.
    """
    if P == "tf32x3" or P == "ieee":
        if a.dtype == tl.float64 or b.dtype == tl.float64:
            out = tl.dot(a.to(tl.float64), b.to(tl.float64), plus, out_dtype=tl.float64)
        else:
            out = tl.dot(a.to(tl.float32), b.to(tl.float32), plus, input_precision=P)
    elif a.dtype == b.dtype and a.dtype != tl.float32:
        out = _dot(a, b, plus, P)
    elif a.dtype == tl.bfloat16:
        high, low = _halves(b)
        out = _dot(a, high, _dot(a, low, plus, P), P)
    elif b.dtype == tl.bfloat16:
        high, low = _halves(a)
        out = _dot(high, b, _dot(low, b, plus, P), P)
    else:
        a_high, a_low = _halves(a)
        b_high, b_low = _halves(b)
        out = _dot(a_high, b_high, _dot(a_low, b_high, _dot(a_high, b_low, plus, P), P), P)
    return out


@triton.jit
def scaled(x, scale):
    """x in the dtype of sums, times `scale`; or as it is if that is None, for one."""
    if scale is not None:
        if x.dtype != tl.float64:
            x = x.to(tl.float32)
        x *= scale
    return x


@triton.jit
def fills(columns, width: tl.constexpr):
    """Whether blocks of so many columns fill the width exactly."""
    return width // columns.shape[0] * columns.shape[0] == width


@triton.jit
def _mask(columns, width: tl.constexpr, held, C: tl.constexpr):
    """The first `held` tokens and `width` features of [C, X]."""
    mask = (tl.arange(0, C) < held)[:, None]
    if not fills(columns, width):
        mask = mask & (columns < width)[None, :]
    return mask


@triton.jit
def load_rows(start, stride, columns, width: tl.constexpr, held, C: tl.constexpr):
    """The tile [C, X] that begins at `start`; zero after `held` tokens and `width` features."""
    at = start + tl.arange(0, C)[:, None] * stride + columns[None, :]
    return tl.load(at, mask=_mask(columns, width, held, C), other=0.0)


@triton.jit
def store_rows(start, stride, columns, width: tl.constexpr, held, tile, C: tl.constexpr):
    """The reverse of `load_rows`."""
    at = start + tl.arange(0, C)[:, None] * stride + columns[None, :]
    tl.store(at, tile.to(start.dtype.element_ty), mask=_mask(columns, width, held, C))


@triton.jit
def load_square(start, stride, held, C: tl.constexpr):
    """Products of the tokens of a chunk with each other [C, C]."""
    return load_rows(start, stride, tl.arange(0, C), C, held, C)


@triton.jit
def store_square(start, stride, held, tile, C: tl.constexpr):
    """The reverse of `load_square`."""
    store_rows(start, stride, tl.arange(0, C), C, held, tile, C)


@triton.jit
def load_gates(
    start, stride, columns, width: tl.constexpr, held, PER_HEAD: tl.constexpr, C: tl.constexpr, F: tl.constexpr
):
    """Log gates [C, X], and their sums up to and with each token [C, X]. One of the head stands for every feature."""
    at = start + tl.arange(0, C)[:, None] * stride + (columns * 0 if PER_HEAD else columns)[None, :]
    g = tl.load(at, mask=_mask(columns, width, held, C), other=0.0).to(F)
    return g, tl.cumsum(g, 0)


@triton.jit
def gates_after(
    start, stride, columns, width: tl.constexpr, held, PER_HEAD: tl.constexpr, C: tl.constexpr, F: tl.constexpr
):
    """Sums of the log gates after each token [C, X]. Not a difference, which has no answer for -inf."""
    following = tl.minimum(held - 1, C)
    g, _ = load_gates(start + stride, stride, columns, width, following, PER_HEAD, C, F)
    return tl.cumsum(g, 0, reverse=True)


@triton.jit
def _is_strong(total, held):
    """Whether the chunk decays too much for the split."""
    return tl.min(total, 0) < held * -SPLIT_LIMIT


@triton.jit
def _double(up_to, after, b, C: tl.constexpr):
    """Sums of gates inside blocks of 2b tokens, up to and with each token and after it, from those in blocks of b."""
    block = tl.arange(0, C)[:, None] // b
    # A token of the second half comes after all of the first, and the other way around.
    other_end = tl.broadcast_to((block ^ 1) * b + b - 1, up_to.shape)
    other = tl.gather(up_to, other_end, 0)
    return up_to + tl.where(block % 2 == 1, other, 0.0), after + tl.where(block % 2 == 1, 0.0, other)


@triton.jit
def _factors(up_to, after, b, C: tl.constexpr):
    """w_ij between the halves of blocks of 2b tokens: from the middle to i, from j to it; zero in the other half."""
    second = tl.arange(0, C)[:, None] // b % 2 == 1
    return tl.where(second, tl.exp(up_to), 0.0), tl.where(second, 0.0, tl.exp(after))


@triton.jit
def _share_block(b, C: tl.constexpr):
    """[C, C]: whether two tokens are in one block of b."""
    return tl.arange(0, C)[:, None] // b == tl.arange(0, C)[None, :] // b


@triton.jit
def scores(x, y, g, until, held, C: tl.constexpr, P: tl.constexpr, F: tl.constexpr):
    """Lower triangular [C, C]: sum over features of x_i w_ij y_j. `until` are the sums of g up to and with a token."""
    rows, columns = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    total = tl.sum(g, 0)
    if _is_strong(total, held):
        A = tl.where(rows == columns, tl.sum(x * y, 1)[:, None], 0.0)
        until, after = g, tl.zeros(g.shape, F)
        b = 1
        while b < C:
            up, down = _factors(until, after, b, C)
            A += tl.where(_share_block(2 * b, C), product(x * up, tl.trans(y * down), P), 0.0)
            until, after = _double(until, after, b, C)
            b *= 2
    else:
        middle = 0.5 * total[None, :]
        A = product(x * tl.exp(until - middle), tl.trans(y * tl.exp(middle - until)), P)
    return tl.where(rows >= columns, A, 0.0)


@triton.jit
def mix(A, y, g, until, held, C: tl.constexpr, P: tl.constexpr, F: tl.constexpr):
    """[C, X]: sum over j <= i of A_ij w_ij y_j."""
    total = tl.sum(g, 0)
    if _is_strong(total, held):
        out = tl.sum(tl.where(_share_block(1, C), A, 0.0), 1)[:, None] * y
        until, after = g, tl.zeros(g.shape, F)
        b = 1
        while b < C:
            up, down = _factors(until, after, b, C)
            out += product(tl.where(_share_block(2 * b, C), A, 0.0), y * down, P) * up
            until, after = _double(until, after, b, C)
            b *= 2
    else:
        middle = 0.5 * total[None, :]
        out = product(A, y * tl.exp(middle - until), P) * tl.exp(until - middle)
    return out


@triton.jit
def late_gradient(A, x, y, g, until, held, C: tl.constexpr, P: tl.constexpr, F: tl.constexpr):
    """Gradient of sum_ij A_ij x_i w_ij y_j for x [C, X], and the reads' share of that for g.

    The gradient of g_t sums the pairs with j < t <= i. In a strong chunk, each is counted where the halves of its block
    meet: for t behind the middle by its reader, before it by its writer. In a mild chunk it is a difference: all pairs
    that are read from t on, without those that are also written from t on.
    """
    total = tl.sum(g, 0)
    if _is_strong(total, held):
        dx, dg = tl.sum(tl.where(_share_block(1, C), A, 0.0), 1)[:, None] * y, tl.zeros(g.shape, F)
        until, after = g, tl.zeros(g.shape, F)
        b = 1
        while b < C:
            up, down = _factors(until, after, b, C)
            arriving = product(tl.where(_share_block(2 * b, C), A, 0.0), y * down, P) * up
            dx += arriving
            dg += _sum_where(_share_block(b, C), True, x * arriving, C, P)
            until, after = _double(until, after, b, C)
            b *= 2
    else:
        middle = 0.5 * total[None, :]
        dx = product(A, y * tl.exp(middle - until), P) * tl.exp(until - middle)
        dg = tl.cumsum(x * dx, 0, reverse=True)
    return dx, dg


@triton.jit
def early_gradient(A, x, y, g, until, held, C: tl.constexpr, P: tl.constexpr, F: tl.constexpr):
    """The same for y [C, X], and the writes' share of that for g."""
    total = tl.sum(g, 0)
    if _is_strong(total, held):
        dy, dg = tl.sum(tl.where(_share_block(1, C), A, 0.0), 1)[:, None] * x, tl.zeros(g.shape, F)
        until, after = g, tl.zeros(g.shape, F)
        b = 1
        while b < C:
            up, down = _factors(until, after, b, C)
            leaving = product(tl.trans(tl.where(_share_block(2 * b, C), A, 0.0)), x * up, P) * down
            dy += leaving
            dg += _sum_where(_share_block(b, C), False, y * leaving, C, P)
            until, after = _double(until, after, b, C)
            b *= 2
    else:
        middle = 0.5 * total[None, :]
        dy = product(tl.trans(A), x * tl.exp(until - middle), P) * tl.exp(middle - until)
        dg = -tl.cumsum(y * dy, 0, reverse=True)
    return dy, dg


@triton.jit
def _sum_where(chosen, FROM_HERE: tl.constexpr, x, C: tl.constexpr, P: tl.constexpr):
    """[C, X]: at t, the sum of the chosen rows from t on, or before t. As a product: no difference of sums would do."""
    rows, columns = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    chosen = chosen & ((columns >= rows) if FROM_HERE else (columns < rows))
    return product(tl.where(chosen, 1.0, 0.0).to(x.dtype if P == "tf32x3" or P == "ieee" else tl.bfloat16), x, P)


@triton.jit
def sum_before(x, C: tl.constexpr, P: tl.constexpr):
    """[C, X]: at t, the sum of the rows before t."""
    return _sum_where(_share_block(C, C), False, x, C, P)


@triton.jit
def load_sum(start, part, count, stride, columns, width: tl.constexpr, held, C: tl.constexpr, F: tl.constexpr):
    """The sum of `count` tiles [C, X], each `part` entries after the one before."""
    total = load_rows(start, stride, columns, width, held, C).to(F)
    for _ in range(1, count):
        start += part
        total += load_rows(start, stride, columns, width, held, C).to(F)
    return total


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
