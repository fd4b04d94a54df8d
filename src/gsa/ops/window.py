"""Softmax attention in a sliding window, and to sinks: arguments checked, an engine chosen, one call.

Shape letters: B batch, T time, H key/value heads, HQ query heads (a multiple of H), K key width of a head, V value
width, P keys before the first query, S sinks, N sequences (B, or the number of packed ones).
"""

from __future__ import annotations

import torch
from torch import Tensor

from gsa.ops.calls import WindowCall
from gsa.ops.checks import Checker
from gsa.ops.registry import find

Sinks = tuple[Tensor, Tensor, Tensor]


def window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window: int,
    scale: float | None = None,
    sinks: Sinks | None = None,
    position: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
    check: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """Outputs o [B, T, HQ, V] of attention to the last `window` tokens, and log-sum-exps lse [B, T, HQ] of its scores.

        s_j = scale * q_t . k_j,   lse_t = log sum_j exp(s_j),   o_t = sum_j exp(s_j - lse_t) v_j,   t - window < j <= t

    Both have gradients, so that the softmax can be joined with that over something else. q [B, T, HQ, K];
    k [B, P + T, H, K] and v [B, P + T, H, V], where P keys come before the first query, and the last T are those of the
    queries. `scale` None means K**-0.5. `position` [N] says how many tokens of each sequence came before its first
    query, P by default: where it is less than P, only the last so many of the P keys are there. `sinks` are the first
    S tokens of each sequence, which are seen for ever once they have left the window: the queries [B, T, HQ, K] that
    ask for them, their keys [N, S, H, K] and values [N, S, H, V]. With `cu_seqlens` [N+1], B is 1, the queries of N
    sequences lie end to end, and so do their keys [1, N P + T, H, .], each sequence with its own P before. lse is fp32
    (fp64 for fp64 inputs). Negative positions are refused on a CPU, with `check=True` on a GPU too, where that waits
    for the device, and with `check=False` nowhere.

    >>> q, k, v = torch.randn(2, 100, 4, 16), torch.randn(2, 100, 2, 16), torch.randn(2, 100, 2, 16)
    >>> o, lse = window_attention(q, k, v, window=8, sinks=(q, k[:, :3], v[:, :3]))
    >>> o.shape, lse.shape
    (torch.Size([2, 100, 4, 16]), torch.Size([2, 100, 4]))
    """
    checker = Checker("window_attention")
    q, k, v = checker.one_dtype(q, k, v)
    checker.qkv(q, k, v, past=True)
    if isinstance(window, bool) or not isinstance(window, int) or not 1 <= window < 2**62:
        raise checker.fail(f"window must be a whole number from 1, got {window!r}")
    N, T, keys = checker.sequences(q, cu_seqlens), q.shape[1], k.shape[1]
    beginnings = 1 if cu_seqlens is None else max(N, 1)
    # While something traces, sizes may be unknown; they are what was checked elsewhere.
    if not torch.compiler.is_compiling() and (keys < T or (keys - T) % beginnings):
        wanted = "P + T" if cu_seqlens is None else f"{N} P + T"
        raise checker.fail(f"k has {keys} time steps, expected {wanted} for {T} queries")
    if position is not None:
        if not isinstance(position, Tensor) or position.dim() != 1 or position.dtype not in (torch.int32, torch.int64):
            got = [position.dtype, *position.shape] if isinstance(position, Tensor) else type(position).__name__
            raise checker.fail(f"position must be an int32 or int64 tensor [N], got {got}")
        checker.same("sequences", "position", position.shape[0], "q", N)
        if position.device != q.device:
            raise checker.fail(f"position is on {position.device}, q is on {q.device}")
    call = WindowCall(
        q,
        k,
        v,
        *_sinks(checker, sinks, q, k, v, N),
        position,
        cu_seqlens,
        window,
        checker.scale(scale, k.shape[3]),
        "marks",
        checker.by_value(check, q),
    )
    o, lse = find("window_attention", backend, q.device)(call)
    return o, lse


def _sinks(
    checker: Checker, sinks: Sinks | None, q: Tensor, k: Tensor, v: Tensor, N: int
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Queries, keys and values of sinks in the dtype of the others; none if there are no sinks."""
    if sinks is None:
        return None, None, None
    if not isinstance(sinks, tuple) or len(sinks) != 3:
        raise checker.fail(f"sinks must be their queries, keys and values (q, k, v), got {type(sinks).__name__}")
    sink_q, sink_k, sink_v = sinks
    checker.tensor("the queries of sinks", sink_q, "B, T, HQ, K", q)
    checker.tensor("the keys of sinks", sink_k, "N, S, H, K", q)
    checker.tensor("the values of sinks", sink_v, "N, S, H, V", q)
    S = sink_k.shape[1]
    for name, x, shape in (
        ("queries", sink_q, tuple(q.shape)),
        ("keys", sink_k, (N, S, *k.shape[2:])),
        ("values", sink_v, (N, S, *v.shape[2:])),
    ):
        if tuple(x.shape) != shape:
            raise checker.fail(f"the {name} of sinks must have the shape {list(shape)}, got {list(x.shape)}")
    if S == 0:
        return None, None, None
    names = ("the queries of sinks", "the keys of sinks", "the values of sinks")
    found = (checker.converted(name, x, q.dtype) for name, x in zip(names, sinks, strict=True))
    return tuple(found)  # type: ignore[return-value]
