"""The kernel for outputs, and for gradients of queries: a segment, with a tile of the state in registers.

A program owns one tile of the state of one head and walks over the chunks of one segment, so that the state need
not be stored in between. Tiles that differ in their keys add up: each writes its part of the output.

Shape letters: C tokens of a chunk, BK, BV sides of a tile; K, V, H, R as always. The state is held as [BV, BK], which
is how matrix units can take it from registers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gsa.ops.triton.jit.segment_states import decayed, load_tile, store_tile, tile_of
from gsa.ops.triton.jit.tiles import load_rows, load_square, product, scaled, store_rows


@triton.jit
def read_segments(
    q,
    k,
    v,
    pairs,
    o,
    decay_k,
    decay_v,
    begin,
    end,
    states,
    segments,
    scale,
    tokens,
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
    """Outputs of the segments, in parts [tiles of keys, tokens, H * R, V]; states before chunks, if `states` is given.

    q, k, v come weighted to the border of their chunk. `pairs` [tokens, H * R, C] are the products of queries and keys
    of one chunk; without them (values are gated) what is read from the chunk itself is added later, by `mix_chunks`.
    `begin` are the states of sequences (WHOLE: every sequence is one segment, and its state goes to `end`) or of
    segments.

    With output gradients for q, values for k and keys for v this makes the gradients of queries; states are then
    TRANSPOSED.
    """
    segment, h, block_k, _, keys, values, tile = tile_of(tl.program_id(0), H, K, V, BK, BV, TRANSPOSED)
    sequence = tl.load(segments + 4 * segment)
    start = tl.load(segments + 4 * segment + 1)
    length = (tl.load(segments + 4 * segment + 2) - start).to(tl.int32)
    chunk = tl.load(segments + 4 * segment + 3)
    part = block_k.to(tl.int64) * tokens
    S = tl.zeros([BV, BK], F)
    if begin is not None:
        S += load_tile(begin + ((sequence if WHOLE else segment) * H + h) * (K * V) + tile, keys, values, K, V)

    for first in range(0, length, C):
        t = start + first
        held = tl.minimum(length - first, C)
        place = (chunk + first // C) * H + h
        if states is not None:
            store_tile(states + place * (K * V) + tile, S, keys, values, K, V)
        early = load_rows(k + (t * H + h) * K, H * K, keys, K, held, C)
        value = load_rows(v + (t * H + h) * V, H * V, values, V, held, C)
        for r in range(R):
            head = h * R + r
            token = t * H * R + head
            late = load_rows(q + token * K, H * R * K, keys, K, held, C)
            out = product(S, tl.trans(late), P)
            if pairs is not None:
                if block_k == 0:  # one of all tiles of keys adds it
                    A = load_square(pairs + token * C, H * R * C, held, C)
                    out = product(tl.trans(value), tl.trans(A), P, out)
            store_rows(o + (part * H * R + token) * V, H * R * V, values, V, held, scaled(tl.trans(out), scale), C)
        S = decayed(S, decay_k, decay_v, place, keys, values, K, V)
        S = product(tl.trans(value), early, P, S)

    if end is not None:
        store_tile(end + (sequence * H + h) * (K * V) + tile, S, keys, values, K, V)
