"""The kernel for gradients of keys and values: a segment, with a tile of the state's gradient in registers.

A program owns one tile of one head and walks backward over the chunks of one segment. The states before the chunks were
stored by gsa.ops.triton.jit.segment_outputs, while it computed the gradients of queries. The gradient of keys is a sum
over tiles of values, and that of values a sum over tiles of keys: each program writes its part.

Shape letters: C tokens of a chunk, BK, BV sides of a tile; K, V, H, R as always. States are held as [BV, BK].
"""

from __future__ import annotations

import triton
import triton.language as tl

from gsa.ops.triton.jit.segment_states import decayed, load_tile, store_tile, tile_of
from gsa.ops.triton.jit.tiles import load_rows, load_square, product, scaled, store_rows


@triton.jit
def differentiate_segments(
    do,
    q,
    k,
    v,
    pairs,
    dpairs,
    dk,
    dv,
    read,
    crossing_k,
    crossing_v,
    decay_k,
    decay_v,
    states,
    begin,
    end,
    segments,
    scale,
    tokens,
    chunks,
    H,
    R,
    K: tl.constexpr,
    V: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    WHOLE: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    P: tl.constexpr,
    F: tl.constexpr,
):
    """Gradients, in parts: dk [tiles of values, tokens, H, K], dv [tiles of keys, tokens, H, V].

    do, q, k, v come weighted to the border of their chunk. On a gated side the gradients are weighted to it as well,
    and what stays inside of chunks is added later, by `finish_chunks`. On a side without gates it is added here, from
    `pairs` [tokens, H * R, C], the products of queries and keys, and `dpairs`, those of output gradients and values.

    The gradients of gates need two more results: what crosses a whole chunk, in parts `crossing_k` [tiles of values,
    chunks, H, K] and `crossing_v` [tiles of keys, chunks, H, V]; and what output gradients read from the state, in
    parts `read` [tiles of values, tokens, H * R, K].

    Keys and values may change places, and q and do with them: the sums are the same. States are then TRANSPOSED, and
    `read` is the output, which the gradient of a gate of values needs.
    """
    segment, h, block_k, block_v, keys, values, tile = tile_of(tl.program_id(0), H, K, V, BK, BV, TRANSPOSED)
    sequence = tl.load(segments + 4 * segment)
    start = tl.load(segments + 4 * segment + 1)
    length = (tl.load(segments + 4 * segment + 2) - start).to(tl.int32)
    chunk = tl.load(segments + 4 * segment + 3)
    part_k, part_v = block_k.to(tl.int64) * tokens * H, block_v.to(tl.int64) * tokens * H
    dS = tl.zeros([BV, BK], F)
    if begin is not None:
        dS += load_tile(begin + ((sequence if WHOLE else segment) * H + h) * (K * V) + tile, keys, values, K, V)

    for step in range(0, length, C):
        first = (length - 1) // C * C - step
        t = start + first
        held = tl.minimum(length - first, C)
        place = (chunk + first // C) * H + h
        early = load_rows(k + (t * H + h) * K, H * K, keys, K, held, C)
        value = load_rows(v + (t * H + h) * V, H * V, values, V, held, C)
        # What was written here and is read after the chunk.
        d_early = product(value, dS, P)
        if decay_k is not None:
            store_rows(dk + (part_v + t * H + h) * K, H * K, keys, K, held, d_early, C)
        d_value = product(dS, tl.trans(early), P)
        if decay_v is not None:
            store_rows(dv + (part_k + t * H + h) * V, H * V, values, V, held, tl.trans(d_value), C)
        dS = decayed(dS, decay_k, decay_v, place, keys, values, K, V)
        if crossing_k is not None or crossing_v is not None:
            S = load_tile(states + place * (K * V) + tile, keys, values, K, V)
        if crossing_k is not None:
            across = tl.sum(S.to(F) * dS, 0)
            tl.store(crossing_k + (block_v.to(tl.int64) * chunks * H + place) * K + keys, across, mask=keys < K)
        if crossing_v is not None:
            across = tl.sum(S.to(F) * dS, 1)
            tl.store(crossing_v + (block_k.to(tl.int64) * chunks * H + place) * V + values, across, mask=values < V)

        for r in range(R):
            token = t * H * R + h * R + r
            late = load_rows(q + token * K, H * R * K, keys, K, held, C)
            d_out = load_rows(do + token * V, H * R * V, values, V, held, C)
            if read is not None:
                found = scaled(product(d_out, S, P), scale)
                store_rows(read + (part_v * R + token) * K, H * R * K, keys, K, held, found, C)
            if decay_k is None:
                if block_v == 0:  # one of all tiles of values adds it
                    dA = scaled(load_square(dpairs + token * C, H * R * C, held, C), scale)
                    d_early = product(tl.trans(dA), late, P, d_early)
            if decay_v is None:
                if block_k == 0:
                    A = scaled(load_square(pairs + token * C, H * R * C, held, C), scale)
                    d_value = product(tl.trans(d_out), A, P, d_value)
            dS = product(scaled(tl.trans(d_out), scale), late, P, dS)

        if decay_k is None:
            store_rows(dk + (part_v + t * H + h) * K, H * K, keys, K, held, d_early, C)
        if decay_v is None:
            store_rows(dv + (part_k + t * H + h) * V, H * V, values, V, held, tl.trans(d_value), C)

    if WHOLE:
        store_tile(end + (sequence * H + h) * (K * V) + tile, dS, keys, values, K, V)
