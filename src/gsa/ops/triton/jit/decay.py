"""What gates do between the tokens of a chunk, exactly: the counterpart of gsa.ops.chunk.decay.

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

from gsa.ops.triton.jit.tiles import product, tile_mask

# Nats of decay per token, on average over a chunk, up to which the split is taken: as in gsa.ops.chunk.decay.
SPLIT_LIMIT = tl.constexpr(1.0)
# Up to here 1 - exp(g) is computed by the series of expm1.
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
def load_gates(
    start, stride, columns, width: tl.constexpr, held, PER_HEAD: tl.constexpr, C: tl.constexpr, F: tl.constexpr
):
    """Log gates [C, X], and their sums up to and with each token [C, X]. One of the head stands for every feature."""
    pointers = start + tl.arange(0, C)[:, None] * stride + (columns * 0 if PER_HEAD else columns)[None, :]
    g = tl.load(pointers, mask=tile_mask(columns, width, held, C), other=0.0).to(F)
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
