"""The kernels for the states that segments begin with.

Segments are worked on in parallel. Each first sums up what it adds to the state by itself, then the sums are carried
from segment to segment, and then every segment knows the state it begins with. Backward in time the same is done for
the gradient of the state, which queries and output gradients add to.

Keys, values, queries and output gradients come weighted to the border of their chunk: see
gsa.ops.triton.jit.chunk_gates. All that is done about gates here is the decay of the state over a whole chunk.

Shape letters: C tokens of a chunk, BK, BV sides of a tile of the state, held as [BV, BK]; K, V, H, R as always.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gsa.ops.triton.jit.tiles import fills, load_rows, product, scaled


@triton.jit
def tile_of(program, H, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, TRANSPOSED: tl.constexpr):
    """What this program works on: segment, head, tile of keys, tile of values, and the offsets of the tile in a state.

    A state is stored as [K, V], or TRANSPOSED as [V, K].
    """
    blocks_v: tl.constexpr = (V + BV - 1) // BV
    blocks: tl.constexpr = blocks_v * ((K + BK - 1) // BK)
    block_k, block_v = program % blocks // blocks_v, program % blocks_v
    keys, values = block_k * BK + tl.arange(0, BK), block_v * BV + tl.arange(0, BV)
    segment = (program // (H * blocks)).to(tl.int64)
    tile = keys[None, :] + values[:, None] * K if TRANSPOSED else keys[None, :] * V + values[:, None]
    return segment, program // blocks % H, block_k, block_v, keys, values, tile


@triton.jit
def load_tile(pointers, keys, values, K: tl.constexpr, V: tl.constexpr):
    """Entries of a state [BV, BK], zero outside of it."""
    if fills(keys, K) and fills(values, V):
        tile = tl.load(pointers)
    else:
        tile = tl.load(pointers, mask=(keys < K)[None, :] & (values < V)[:, None], other=0.0)
    return tile


@triton.jit
def store_tile(pointers, tile, keys, values, K: tl.constexpr, V: tl.constexpr):
    """The reverse of `load_tile`."""
    tile = tile.to(pointers.dtype.element_ty)
    if fills(keys, K) and fills(values, V):
        tl.store(pointers, tile)
    else:
        tl.store(pointers, tile, mask=(keys < K)[None, :] & (values < V)[:, None])


@triton.jit
def decayed(S, decay_k, decay_v, place, keys, values, K: tl.constexpr, V: tl.constexpr):
    """S [BV, BK] decayed by the log gates in row `place` of decay_k [chunks * H, K] and decay_v [chunks * H, V]."""
    if decay_k is not None:
        S *= tl.exp(tl.load(decay_k + place * K + keys, mask=keys < K, other=0.0))[None, :]
    if decay_v is not None:
        S *= tl.exp(tl.load(decay_v + place * V + values, mask=values < V, other=0.0))[:, None]
    return S


@triton.jit
def walk_segments(
    x,
    y,
    decay_k,
    decay_v,
    end,
    segments,
    scale,
    H,
    R,
    K: tl.constexpr,
    V: tl.constexpr,
    REVERSE: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    P: tl.constexpr,
    F: tl.constexpr,
):
    """What every segment adds to the state [segments, H, K, V].

    Forward, x are keys and y values; in REVERSE, x are queries and y output gradients, times `scale`. `decay_k`
    [chunks, H, K] and `decay_v` [chunks, H, V] are log decays of chunks.
    """
    segment, h, _, _, keys, values, tile = tile_of(tl.program_id(0), H, K, V, BK, BV, False)
    start = tl.load(segments + 4 * segment + 1)
    length = (tl.load(segments + 4 * segment + 2) - start).to(tl.int32)
    chunk = tl.load(segments + 4 * segment + 3)
    S = tl.zeros([BV, BK], F)
    for step in range(0, length, C):
        first = (length - 1) // C * C - step if REVERSE else step
        t = start + first
        held = tl.minimum(length - first, C)
        place = (chunk + first // C) * H + h
        S = decayed(S, decay_k, decay_v, place, keys, values, K, V)
        for r in range(R):
            head = h * R + r
            left = load_rows(x + (t * H * R + head) * K, H * R * K, keys, K, held, C)
            right = load_rows(y + (t * H * R + head) * V, H * R * V, values, V, held, C)
            if REVERSE:
                right = scaled(right, scale)
            S = product(tl.trans(right), left, P, S)
    store_tile(end + (segment * H + h) * (K * V) + tile, S, keys, values, K, V)


@triton.jit
def join_segments(
    states,
    decay_k,
    decay_v,
    begin,
    end,
    segments,
    firsts,
    H,
    K: tl.constexpr,
    V: tl.constexpr,
    REVERSE: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    F: tl.constexpr,
):
    """Turns what segments add to the state into the states they begin with, in place; the last goes to `end`.

    The segments of sequence n are those from firsts[n] to firsts[n + 1].
    """
    sequence, h, _, _, keys, values, tile = tile_of(tl.program_id(0), H, K, V, BK, BV, False)
    S = tl.zeros([BV, BK], F)
    if begin is not None:
        S += load_tile(begin + (sequence * H + h) * (K * V) + tile, keys, values, K, V)
    first = tl.load(firsts + sequence)
    last = tl.load(firsts + sequence + 1) - 1
    for step in range(first, last + 1):
        segment = first + last - step if REVERSE else step
        pointers = states + (segment * H + h) * (K * V) + tile
        added = load_tile(pointers, keys, values, K, V)
        store_tile(pointers, S, keys, values, K, V)
        length = tl.load(segments + 4 * segment + 2) - tl.load(segments + 4 * segment + 1)
        chunk = tl.load(segments + 4 * segment + 3)
        for i in range((length + C - 1) // C):
            S = decayed(S, decay_k, decay_v, (chunk + i) * H + h, keys, values, K, V)
        S += added
    store_tile(end + (sequence * H + h) * (K * V) + tile, S, keys, values, K, V)
