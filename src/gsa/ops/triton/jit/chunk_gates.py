"""The kernels for gates inside chunks: one program for one chunk of one head (and a block of features).

They do all that concerns gates, except the decay of a state over a whole chunk: queries and output gradients are
weighted to the beginning of their chunk, keys and values to its end, and the products of pairs of tokens in one chunk
are gated here. So gates cost time in proportion to the features of the gated side and not to the size of the state; for
slots that is little.

Shape letters: C tokens of a chunk, X features of the gated side, BX of a block; H, R as always. A late tensor (queries,
output gradients) has H * R heads, an early one (keys, values) has H.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gsa.ops.triton.jit.decay import (
    early_gradient,
    gates_after,
    late_gradient,
    load_gates,
    mix,
    one_minus_exp,
    scores,
    sum_before,
)
from gsa.ops.triton.jit.readout import slot_weights, softmax_scale
from gsa.ops.triton.jit.tiles import load_rows, load_square, load_sum, product, scaled, store_rows, store_square


@triton.jit
def weigh_chunks(
    y,
    g,
    weighted,
    decay,
    chunks,
    H,
    X: tl.constexpr,
    GX: tl.constexpr,
    FROM_GATE: tl.constexpr,
    C: tl.constexpr,
    BX: tl.constexpr,
    F: tl.constexpr,
):
    """Early y (or 1 - exp(g)) weighted to the end of its chunk, and the log decay of chunks [chunks, H, X]."""
    blocks: tl.constexpr = (X + BX - 1) // BX
    program = tl.program_id(0)
    chunk = (program // (H * blocks)).to(tl.int64)
    h = program // blocks % H
    columns = program % blocks * BX + tl.arange(0, BX)
    t = tl.load(chunks + 2 * chunk)
    held = tl.load(chunks + 2 * chunk + 1).to(tl.int32)
    gates = g + (t * H + h) * GX
    gate, _ = load_gates(gates, H * GX, columns, X, held, GX != X, C, F)
    if FROM_GATE:
        early = one_minus_exp(gate)
    else:
        early = load_rows(y + (t * H + h) * X, H * X, columns, X, held, C).to(F)
    early *= tl.exp(gates_after(gates, H * GX, columns, X, held, GX != X, C, F))
    store_rows(weighted + (t * H + h) * X, H * X, columns, X, held, early, C)
    tl.store(decay + (chunk * H + h) * X + columns, tl.sum(gate, 0), mask=columns < X)


@triton.jit
def score_chunks(
    x,
    y,
    g,
    weighted,
    pairs,
    chunks,
    H,
    R,
    X: tl.constexpr,
    GX: tl.constexpr,
    FROM_GATE: tl.constexpr,
    READOUT: tl.constexpr,
    C: tl.constexpr,
    BX: tl.constexpr,
    P: tl.constexpr,
    F: tl.constexpr,
):
    """Products of late x with early y [tokens, H * R, C]; if gated, also x weighted to the beginning of its chunk.

    GX is the width of the gate: X, 1 for one gate for the head, or 0 for none.
    """
    program = tl.program_id(0)
    chunk, head = (program // (H * R)).to(tl.int64), program % (H * R)
    h = head // R
    t = tl.load(chunks + 2 * chunk)
    held = tl.load(chunks + 2 * chunk + 1).to(tl.int32)
    late_from = x + (t * H * R + head) * X
    top, total = 0.0, 0.0
    if READOUT == "softmax":
        top, total = softmax_scale(late_from, H * R * X, held, X, BX, C, F)
    A = tl.zeros([C, C], F)
    for first in range(0, X, BX):
        columns = first + tl.arange(0, BX)
        late = load_rows(late_from, H * R * X, columns, X, held, C)
        if GX == 0:
            early = load_rows(y + (t * H + h) * X, H * X, columns, X, held, C)
            A = product(late, tl.trans(early), P, A)
        else:
            gate, until = load_gates(g + (t * H + h) * GX, H * GX, columns, X, held, GX != X, C, F)
            if FROM_GATE:
                early = one_minus_exp(gate)
            else:
                early = load_rows(y + (t * H + h) * X, H * X, columns, X, held, C).to(F)
            late = slot_weights(late.to(F), columns, X, top, total, READOUT, F)
            A += scores(late, early, gate, until, held, C, P, F)
            to = weighted + (t * H * R + head) * X
            store_rows(to, H * R * X, columns, X, held, late * tl.exp(until), C)
    if GX == 0:
        A = tl.where(tl.arange(0, C)[:, None] >= tl.arange(0, C)[None, :], A, 0.0)
    store_square(pairs + (t * H * R + head) * C, H * R * C, held, A, C)


@triton.jit
def mix_chunks(
    read,
    pairs,
    y,
    g,
    out,
    chunks,
    scale,
    tokens,
    count,
    H,
    R,
    X: tl.constexpr,
    FROM_GATE: tl.constexpr,
    C: tl.constexpr,
    BX: tl.constexpr,
    P: tl.constexpr,
    F: tl.constexpr,
):
    """Outputs [tokens, H * R, X] where values y are gated: `pairs` times `scale` mixed with values, plus `read`.

    `read` is what was read from states, in parts [count, tokens, H * R, X].
    """
    blocks: tl.constexpr = (X + BX - 1) // BX
    program = tl.program_id(0)
    columns = program % blocks * BX + tl.arange(0, BX)
    head = program // blocks % (H * R)
    chunk = (program // (H * R * blocks)).to(tl.int64)
    h = head // R
    t = tl.load(chunks + 2 * chunk)
    held = tl.load(chunks + 2 * chunk + 1).to(tl.int32)
    gate, until = load_gates(g + (t * H + h) * X, H * X, columns, X, held, False, C, F)
    if FROM_GATE:
        early = one_minus_exp(gate)
    else:
        early = load_rows(y + (t * H + h) * X, H * X, columns, X, held, C).to(F)
    place, part = t * H * R + head, (t * 0 + tokens) * H * X  # in 64 bits, as t is
    A = scaled(load_square(pairs + place * C, H * R * C, held, C), scale)
    found = load_sum(read + place * X, part * R, count, H * R * X, columns, X, held, C, F) * tl.exp(until)
    found += mix(A, early, gate, until, held, C, P, F)
    store_rows(out + place * X, H * R * X, columns, X, held, found, C)


@triton.jit
def finish_chunks(
    x,
    y,
    g,
    pairs,
    dx_read,
    dy_read,
    crossing,
    before_dy,
    before_dg,
    dx,
    dy,
    dg,
    chunks,
    scale,
    tokens,
    all_chunks,
    dx_count,
    dy_count,
    H,
    R,
    X: tl.constexpr,
    GX: tl.constexpr,
    FROM_GATE: tl.constexpr,
    READOUT: tl.constexpr,
    C: tl.constexpr,
    BX: tl.constexpr,
    P: tl.constexpr,
    F: tl.constexpr,
):
    """The gradients of a gated side: of late x (not stored without dx), of early y and of the gate g.

    From the products of the other side, `pairs` [tokens, H * R, C] times `scale`; and from parts of: the gradients
    dx_read and dy_read of x and y weighted to the borders, and what crosses a whole chunk [all_chunks, H, X]. To dy and
    dg those of another pass are added, if given; with FROM_GATE, dy goes on to dg. A gate of the head gets a part from
    every block of features: dg [blocks, tokens, H, 1].
    """
    blocks: tl.constexpr = (X + BX - 1) // BX
    program = tl.program_id(0)
    block = program % blocks
    columns = block * BX + tl.arange(0, BX)
    h = program // blocks % H
    chunk = (program // (H * blocks)).to(tl.int64)
    t = tl.load(chunks + 2 * chunk)
    held = tl.load(chunks + 2 * chunk + 1).to(tl.int32)
    part = (t * 0 + tokens) * H * X  # in 64 bits, as t is
    gates = g + (t * H + h) * GX
    gate, until = load_gates(gates, H * GX, columns, X, held, GX != X, C, F)
    if FROM_GATE:
        early = one_minus_exp(gate)
    else:
        early = load_rows(y + (t * H + h) * X, H * X, columns, X, held, C).to(F)
    d_early = tl.zeros([C, BX], F)
    d_gate = tl.zeros([C, BX], F)
    for i in range(dy_count):
        crossed = crossing + ((i * all_chunks + chunk) * H + h) * X + columns
        d_gate += tl.load(crossed, mask=columns < X, other=0.0)[None, :]

    for r in range(R):
        place = t * H * R + h * R + r
        top, total = 0.0, 0.0
        if READOUT == "softmax":
            top, total = softmax_scale(x + place * X, H * R * X, held, X, BX, C, F)
        late = load_rows(x + place * X, H * R * X, columns, X, held, C).to(F)
        late = slot_weights(late, columns, X, top, total, READOUT, F)
        A = scaled(load_square(pairs + place * C, H * R * C, held, C), scale)
        # What is written and read here.
        found, found_gate = early_gradient(A, late, early, gate, until, held, C, P, F)
        d_early += found
        d_gate += found_gate
        d_late, found_gate = late_gradient(A, late, early, gate, until, held, C, P, F)
        d_gate += found_gate
        # What was written before the chunk and is read here.
        found = load_sum(dx_read + place * X, part * R, dx_count, H * R * X, columns, X, held, C, F) * tl.exp(until)
        d_gate += tl.cumsum(late * found, 0, reverse=True)
        if dx is not None:
            store_rows(dx + place * X, H * R * X, columns, X, held, d_late + found, C)

    # What is written here and read after the chunk.
    found = load_sum(dy_read + (t * H + h) * X, part, dy_count, H * X, columns, X, held, C, F)
    found *= tl.exp(gates_after(gates, H * GX, columns, X, held, GX != X, C, F))
    d_early += found
    d_gate += sum_before(early * found, C, P)
    if before_dy is not None:
        d_early += load_rows(before_dy + (t * H + h) * X, H * X, columns, X, held, C)
    if FROM_GATE:
        d_gate -= tl.exp(gate) * d_early
    else:
        store_rows(dy + (t * H + h) * X, H * X, columns, X, held, d_early, C)
    if before_dg is not None:
        d_gate += load_rows(before_dg + (t * H + h) * X, H * X, columns, X, held, C)
    if GX == X:
        store_rows(dg + (t * H + h) * X, H * X, columns, X, held, d_gate, C)
    else:
        rows = tl.arange(0, C)
        to = dg + (block.to(tl.int64) * tokens + t) * H + h + rows * H
        tl.store(to, tl.sum(d_gate, 1).to(dg.dtype.element_ty), mask=rows < held)
