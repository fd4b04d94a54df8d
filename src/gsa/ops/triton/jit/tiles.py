"""Tiles of tensors: loaded, stored, multiplied.

Shape letters: C tokens of a chunk, X features of a tile. Rows of tiles are tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl


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
def tile_mask(columns, width: tl.constexpr, held, C: tl.constexpr):
    """The first `held` tokens and `width` features of [C, X]."""
    mask = (tl.arange(0, C) < held)[:, None]
    if not fills(columns, width):
        mask = mask & (columns < width)[None, :]
    return mask


@triton.jit
def load_rows(start, stride, columns, width: tl.constexpr, held, C: tl.constexpr):
    """The tile [C, X] that begins at `start`; zero after `held` tokens and `width` features."""
    pointers = start + tl.arange(0, C)[:, None] * stride + columns[None, :]
    return tl.load(pointers, mask=tile_mask(columns, width, held, C), other=0.0)


@triton.jit
def store_rows(start, stride, columns, width: tl.constexpr, held, tile, C: tl.constexpr):
    """The reverse of `load_rows`."""
    pointers = start + tl.arange(0, C)[:, None] * stride + columns[None, :]
    tl.store(pointers, tile.to(start.dtype.element_ty), mask=tile_mask(columns, width, held, C))


@triton.jit
def load_square(start, stride, held, C: tl.constexpr):
    """Products of the tokens of a chunk with each other [C, C]."""
    return load_rows(start, stride, tl.arange(0, C), C, held, C)


@triton.jit
def store_square(start, stride, held, tile, C: tl.constexpr):
    """The reverse of `load_square`."""
    store_rows(start, stride, tl.arange(0, C), C, held, tile, C)


@triton.jit
def load_sum(start, part, count, stride, columns, width: tl.constexpr, held, C: tl.constexpr, F: tl.constexpr):
    """The sum of `count` tiles [C, X], each `part` entries after the one before."""
    total = load_rows(start, stride, columns, width, held, C).to(F)
    for _ in range(1, count):
        start += part
        total += load_rows(start, stride, columns, width, held, C).to(F)
    return total
