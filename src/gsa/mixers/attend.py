"""Causal softmax attention through torch's scaled_dot_product_attention: whole, windowed, continued, packed. Windows of
many tokens go through the native engine where it runs, in about half the time.

Shape letters: B batch, T queries, S keys, H key/value heads, HQ query heads, K width of a head, W window.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from gsa.ops import window_attention
from gsa.ops.registry import engine_name
from gsa.ops.state import compute_dtype

QUERIES = 512
"""Queries taken at a time where a mask or scores against all keys are held in memory."""
MANY = 16
"""Queries from which on a window is worth a call of the native engine."""


def attend(q: Tensor, k: Tensor, v: Tensor, window: int | None, seen: Tensor | None = None) -> Tensor:
    """Outputs [B, T, HQ, K] of queries [B, T, HQ, K] that are the last T of the S tokens of k and v [B, S, H, K].

    Of the S places, a row uses only the last `seen` [B]; None if it uses all.
    """
    T, S = q.shape[1], k.shape[1]
    exporting = torch.compiler.is_exporting()  # one graph for every length: sizes must decide nothing
    if window is not None and not exporting and window >= S:
        window = None
    if T == 0:
        return q.new_zeros(q.shape)
    if window is None and S == T and seen is None:
        return _sdpa(q, k, v, causal=True)
    if window is not None and _compiled(q, T):
        return window_attention(q, k, v, window=window, position=None if seen is None else seen - T, check=False)[0]
    if window is not None and window < T:
        return _blocks(q, k, v, window, seen)
    if not exporting and T > QUERIES:  # a mask for some queries at a time
        parts = [slice(begin, min(begin + QUERIES, T)) for begin in range(0, T, QUERIES)]
        ends = [S - T + part.stop for part in parts]
        seens = [None if seen is None else seen - (S - end) for end in ends]
        pieces = [
            attend(q[:, part], k[:, :end], v[:, :end], window, count)
            for part, end, count in zip(parts, ends, seens, strict=True)
        ]
        return torch.cat(pieces, 1)
    distance = torch.arange(S - T, S, device=q.device)[:, None] - torch.arange(S, device=q.device)
    allowed = distance >= 0
    if window is not None:
        allowed = allowed & (distance < window)
    allowed = allowed[None]
    if seen is not None:
        allowed = allowed & (torch.arange(S, device=q.device) >= S - seen[:, None])[:, None]
    return _sdpa(q, k, v, mask=allowed[:, None])


def _compiled(q: Tensor, tokens: int) -> bool:
    """Whether the native engine does a window. Exported graphs are for any machine, and keep to torch's operators."""
    exporting = torch.compiler.is_exporting()
    return not exporting and tokens >= MANY and engine_name("auto", q.device, "window_attention") == "native"


def _blocks(q: Tensor, k: Tensor, v: Tensor, window: int, seen: Tensor | None) -> Tensor:
    """The same for more queries than the window holds, in blocks of W queries against 2 W keys: linear in T."""
    B, T = q.shape[:2]
    S, W = k.shape[1], window
    filled = -T % W
    blocks = (T + filled) // W
    q = pad(q, (0, 0, 0, 0, 0, filled)).unflatten(1, (blocks, W)).flatten(0, 1)
    # The keys of block i are those at places i W - W to i W + W, counted from the first query.
    before = W - (S - T)
    k, v = (pad(x, (0, 0, 0, 0, before, filled)) for x in (k, v))
    k, v = (x.unfold(1, 2 * W, W).movedim(-1, 2).flatten(0, 1) for x in (k, v))  # [B blocks, 2 W, H, K]
    distance = torch.arange(W, 2 * W, device=q.device)[:, None] - torch.arange(2 * W, device=q.device)
    band = ((distance >= 0) & (distance < W))[None, None]
    places = torch.arange(2 * W, device=q.device) + torch.arange(blocks, device=q.device)[:, None] * W - before
    first = torch.zeros(1, device=q.device, dtype=torch.int64) if seen is None else S - seen
    valid = places >= first[:, None, None]  # [B or 1, blocks, 2 W]
    allowed = (band & valid[:, :, None]).expand(B, -1, -1, -1).flatten(0, 1)[:, None]
    # A filled-up query may see nothing; it looks at itself, so that no row of the softmax is empty.
    allowed = allowed | (distance == 0)
    o = _sdpa(q, k, v, mask=allowed)
    return o.unflatten(0, (B, blocks)).flatten(1, 2)[:, :T]


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
    """torch's attention on tensors with time before heads."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    o = scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=grouped)
    return o.transpose(1, 2)


@torch.library.custom_op("gsa::packed_attention", mutates_args=())
def _packed_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_queries: Tensor, cu_keys: Tensor, window: int | None
) -> Tensor:
    o = torch.empty_like(q, memory_format=torch.contiguous_format)
    for a, b in _pieces(cu_queries, cu_keys):
        o[a] = attend(q[a][None], k[b][None], v[b][None], window)[0]
    return o


@torch.library.custom_op("gsa::packed_attention_backward", mutates_args=())
def _packed_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, cu_queries: Tensor, cu_keys: Tensor, window: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Written by hand, since there is no autograd inside an operator; in blocks of queries, so memory stays linear."""
    dtype = compute_dtype(q.dtype)
    q_grad = torch.zeros_like(q, memory_format=torch.contiguous_format)
    k_grad, v_grad = (torch.zeros_like(x, dtype=dtype, memory_format=torch.contiguous_format) for x in (k, v))
    groups = q.shape[1] // k.shape[1]
    for queries, keys in _pieces(cu_queries, cu_keys):
        last = keys.stop - queries.stop  # from a query's place to its key's
        for begin in range(queries.start, queries.stop, QUERIES):
            a = slice(begin, min(begin + QUERIES, queries.stop))
            first = keys.start if window is None else max(a.start + last - window + 1, keys.start)
            b = slice(first, a.stop + last)
            distance = torch.arange(a.start + last, a.stop + last, device=q.device)[:, None]
            distance = distance - torch.arange(b.start, b.stop, device=q.device)
            hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
            queries_, grad_ = (x[a].to(dtype).unflatten(1, (-1, groups)).movedim(0, 2) for x in (q, grad))
            keys_, values_ = (x[b].to(dtype).movedim(0, 1)[:, None] for x in (k, v))  # [H, 1, S, K]
            scale = q.shape[-1] ** -0.5
            p = (queries_ @ keys_.mT * scale).masked_fill_(hidden, -torch.inf).softmax(-1)  # [H, groups, T, S]
            p_grad = grad_ @ values_.mT
            s_grad = p * (p_grad - (p_grad * p).sum(-1, keepdim=True)) * scale
            q_grad[a] = (s_grad @ keys_).movedim(2, 0).flatten(1, 2).to(q.dtype)
            k_grad[b] += (s_grad.mT @ queries_).sum(1).movedim(1, 0)
            v_grad[b] += (p.mT @ grad_).sum(1).movedim(1, 0)
    return q_grad, k_grad.to(k.dtype), v_grad.to(v.dtype)


@_packed_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, cu_queries: Tensor, cu_keys: Tensor, window: int | None) -> Tensor:
    return torch.empty_like(q, memory_format=torch.contiguous_format)


@_packed_attention_backward.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, cu_queries: Tensor, cu_keys: Tensor, window: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    return q, k, v


def _pieces(cu_queries: Tensor, cu_keys: Tensor) -> list[tuple[slice, slice]]:
    """Where each sequence that has queries lies among queries and among keys."""
    a, b = cu_queries.tolist(), cu_keys.tolist()
    return [(slice(a[n], a[n + 1]), slice(b[n], b[n + 1])) for n in range(len(a) - 1) if a[n + 1] > a[n]]


def _save(ctx: torch.autograd.function.FunctionCtx, inputs: tuple[object, ...], output: Tensor) -> None:
    *tensors, window = inputs
    ctx.save_for_backward(*tensors)  # type: ignore[arg-type]
    ctx.window = window  # type: ignore[attr-defined]


def _backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
    gradients = _packed_attention_backward(grad, *ctx.saved_tensors, ctx.window)  # type: ignore[attr-defined]
    return (*gradients, None, None, None)


_packed_attention.register_autograd(_backward, setup_context=_save)


def attend_packed(q: Tensor, k: Tensor, v: Tensor, cu_queries: Tensor, cu_keys: Tensor, window: int | None) -> Tensor:
    """The same for sequences end to end: q [T, HQ, K], k and v [S, H, K], borders [N+1] among queries and keys.

    One sequence after the other, each without a mask; the backward pass computes the attention again.
    """
    if window is not None and cu_queries is cu_keys and _compiled(q, q.shape[0]):
        return window_attention(q[None], k[None], v[None], window=window, cu_seqlens=cu_queries, check=False)[0][0]
    return _packed_attention(q, k, v, cu_queries, cu_keys, window)
