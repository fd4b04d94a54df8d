"""One pass of gated linear attention backward, as launches of kernels.

Shape letters: B batch, T time, H key/value heads, K, V widths of the pass, C tokens of a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gsa.ops.triton import plan
from gsa.ops.triton.call import Early, add
from gsa.ops.triton.forward_pass import Pass
from gsa.ops.triton.jit.chunk_gates import finish_chunks
from gsa.ops.triton.jit.segment_gradients import differentiate_segments
from gsa.ops.triton.launch import launch


@dataclass
class GradientBuffers:
    """Where a pass writes its gradients; None where there is none, and for 1 - exp(g), which adds to the gate's."""

    q: Tensor
    k: Tensor | None
    v: Tensor | None
    gk: Tensor | None
    gv: Tensor | None
    before_early: Tensor | None = None
    """The gradient of the same write strengths from the other pass, to be added."""
    before_gate: Tensor | None = None
    """The gradient of the same gates from the other pass, to be added."""


@dataclass
class _Side:
    """The keys' or the values' side of the state."""

    late: Tensor
    """Queries, or output gradients [B, T, HQ, X], weighted to the beginning of their chunk."""
    pairs: Tensor
    """Their products with keys, or values [B, T, HQ, C]."""
    early: Early
    grad: Tensor
    """Where the gradient of keys, or values, is written: in parts [parts, B, T, H, X], or whole [B, T, H, X]."""
    crossing: Tensor | None
    """If gated: the gate's gradient from what crosses whole chunks, in parts [parts, chunks, H, X]."""


def backward(
    x: Pass, do: Tensor, dfinal: Tensor | None, initial: Tensor | None, kept: Tensor, save: str, grads: GradientBuffers
) -> Tensor:
    """The gradient of the initial states; the others go where `grads` says."""
    call, whole = x.call, x.call.segments.whole
    by_key, by_value = x.k.g is not None, x.v.g is not None
    late, pairs = x.score(x.q, x.k, x.readout)
    d_late, dpairs = x.score(do, x.v, "none")
    # The same pass with keys and values in each other's place.
    swapped = Pass(call, d_late, x.v, x.k, x.scale, transposed=True)

    # Queries' gradients are read from the states just as outputs are. The same kernel stores states for the gates.
    begin: Tensor | None = initial
    if not whole:
        begin = kept
        if save == "states":
            begin = x.states(call.segments.table.shape[0])
            x.join(initial, begin, x.states(call.N))
    states: Tensor | None = kept if save == "states" else None
    if states is None and (by_key or by_value):
        shape = call.kept_shape("states", x.K, x.V)
        states = do.new_empty(shape, dtype=plan.stored_states(call.dtype))
    count = swapped.tiling("read").over_k(x.V)
    dq = call.empty(count, *x.q.shape) if by_key else call.parts(count, grads.q)
    swapped.read(d_late, None if by_key else dpairs, begin, None, None if save == "states" else states, dq)

    begin, dinitial = dfinal, x.states(call.N)
    if not whole:
        begin = x.states(call.segments.table.shape[0])
        x.join(dfinal, begin, dinitial, late, d_late)
    # The kernel computes what a gate needs for the side of keys only, so gated values are passed as its keys.
    ours = swapped if by_value else x
    tiles = ours.tiling("differentiate")
    over = (tiles.over_k(ours.K), tiles.over_v(ours.V))
    over_k, over_v = over[::-1] if by_value else over
    keys = _side(x, late, pairs, x.k, over_v, grads.k)
    values = _side(x, d_late, dpairs, x.v, over_k, grads.v)
    read = call.empty(over_k, *do.shape) if by_value else None
    mine, other = (values, keys) if by_value else (keys, values)
    ours.launch_tiles(
        differentiate_segments,
        tiles,
        call.segments.table.shape[0],
        q=mine.late,
        do=other.late,
        k=mine.early.weighted,
        v=other.early.weighted,
        pairs=mine.pairs,
        dpairs=other.pairs,
        dk=mine.grad,
        dv=other.grad,
        read=read,
        crossing_k=mine.crossing,
        crossing_v=other.crossing,
        states=states,
        begin=begin,
        end=dinitial if whole else None,
        scale=x.factor,
        tokens=call.tokens,
        chunks=call.segments.chunks.shape[0],
        R=call.R,
        TRANSPOSED=ours.transposed,
        WHOLE=whole,
        **call.products,
    )
    if by_key:
        _finish(x, keys, x.q, dpairs, dq, x.readout, grads.q, grads.k, grads.gk, grads)
    else:
        add(dq, grads.q)
        add(keys.grad, _given(grads.k))
    if by_value:
        _finish(x, values, do, pairs, _given(read), "none", None, grads.v, grads.gv, grads)
    else:
        add(values.grad, _given(grads.v))
    return dinitial


def _side(x: Pass, late: Tensor, pairs: Tensor, early: Early, count: int, grad: Tensor | None) -> _Side:
    call = x.call
    if early.g is None:
        return _Side(late, pairs, early, call.parts(count, _given(grad)), None)
    crossing = call.empty(count, call.segments.chunks.shape[0], call.H, late.shape[3])
    return _Side(late, pairs, early, call.empty(count, *early.weighted.shape), crossing)


def _given(x: Tensor | None) -> Tensor:
    assert x is not None
    return x


def _finish(
    x: Pass,
    side: _Side,
    late: Tensor,
    pairs: Tensor,
    dlate: Tensor,
    readout: str,
    out_late: Tensor | None,
    out_early: Tensor | None,
    out_gate: Tensor | None,
    grads: GradientBuffers,
) -> None:
    """Gradients of a gated side: of raw `late`, of what is early, and of the gate.

    From `pairs` of the other side, `dlate` in parts, and the parts that `differentiate_segments` has written.
    """
    call, width, g, dg, crossing = x.call, late.shape[3], _given(side.early.g), _given(out_gate), _given(side.crossing)
    tiles = plan.chunk_tiling(call.target, call.dtype, width, "finish")
    blocks = -(-width // tiles.width)
    parts = dg if g.shape[3] == width else call.parts(blocks, dg)
    launch(
        finish_chunks,
        call.segments.chunks.shape[0] * call.H * blocks,
        tiles.warps,
        tiles.stages,
        x=late,
        y=side.early.raw,
        g=g,
        pairs=pairs,
        dx_read=dlate,
        dy_read=side.grad,
        crossing=crossing,
        before_dy=grads.before_early,
        before_dg=grads.before_gate,
        dx=out_late,
        dy=out_early,
        dg=parts,
        chunks=call.segments.chunks,
        scale=x.factor,
        tokens=call.tokens,
        all_chunks=crossing.shape[1],
        dx_count=dlate.shape[0],
        dy_count=side.grad.shape[0],
        H=call.H,
        R=call.R,
        X=width,
        GX=g.shape[3],
        FROM_GATE=side.early.raw is None,
        READOUT=readout,
        BX=tiles.width,
        **call.products,
    )
    add(parts, dg)
