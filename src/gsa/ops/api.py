"""The operators: arguments checked, an engine chosen, one call.

Shape letters: B batch, T time, H key/value heads, HQ query heads (a multiple of H), K key width of a head, V value
width, M slots, N sequences (B, or the number of packed ones).

Arguments are checked here for kind, shape, dtype and device, whoever computes. The engine that reads the gates checks
them by value, too: above 0 they are not logarithms of a decay (probabilities, most likely), and a NaN would spread to
all that follows. On a CPU that costs next to nothing, and is done unless `check=False`. On a GPU the call would have to
wait until the device has an answer, which stops the flow of kernels, so it is done with `check=True` alone. Compiled
code is checked as well, but not with the reference engine, which a compiler takes apart.

All engines have a gradient, also under torch.func's grad, vjp, jacrev and vmap (which calls the engine once a sample).
Only the reference has forward-mode and second derivatives; the others raise an error that says so.
"""

from __future__ import annotations

from torch import Tensor

from gsa.ops.calls import BoundedMemoryCall, LinearCall, SlotCall
from gsa.ops.checks import Checker
from gsa.ops.registry import find
from gsa.ops.state import BoundedMemoryState, SlotState


def gated_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
    recompute: bool = True,
    check: bool | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Outputs [B, T, HQ, V] of gated linear attention, and the final states [N, H, K, V] if asked for.

        S_t = diag(exp gk_t) S_{t-1} diag(exp gv_t) + k_t (x) v_t,      o_t = S_t^T (scale * q_t)

    q [B, T, HQ, K], k [B, T, H, K], v [B, T, H, V]. The log gates are at most 0, and -inf is a full reset:
    gk [B, T, H, K], or [B, T, H, 1] for one decay per head; gv [B, T, H, V]. `scale` None means K**-0.5. States are
    fp32 (fp64 for fp64 inputs). With `cu_seqlens` [N+1], B is 1 and the sequences lie end to end. `recompute=False`
    keeps more for the backward pass instead of computing it again. Gates above 0 and NaN are refused on a CPU, with
    `check=True` on a GPU too, where that waits for the device, and with `check=False` nowhere.

    >>> q, k, v = torch.randn(3, 2, 100, 4, 16)
    >>> o, S = gated_linear_attention(q, k, v, gk=-torch.rand(2, 100, 4, 16), output_final_state=True)
    >>> o.shape, S.shape
    (torch.Size([2, 100, 4, 16]), torch.Size([2, 4, 16, 16]))
    """
    checker = Checker("gated_linear_attention")
    checker.flags(output_final_state=output_final_state, recompute=recompute)
    q, k, v = checker.one_dtype(q, k, v)
    checker.qkv(q, k, v)
    H, K, V = k.shape[2], k.shape[3], v.shape[3]
    if gk is not None:
        checker.gate("gk", gk, q, H, {"K": K, "1": 1})
    if gv is not None:
        checker.gate("gv", gv, q, H, {"V": V})
    N = checker.sequences(q, cu_seqlens)
    if initial_state is not None:
        initial_state = checker.state("initial_state", initial_state, (N, H, K, V), "N, H, K, V", q)
    by_value = checker.by_value(check, q)
    call = LinearCall(q, k, v, gk, gv, initial_state, cu_seqlens, checker.scale(scale, K), _save(recompute), by_value)
    o, state = find("gated_linear_attention", backend, q.device)(call)
    return o, state if output_final_state else None


def gated_slot_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    s: Tensor | None = None,
    *,
    scale: float | None = None,
    readout: str = "softmax",
    initial_state: SlotState | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
    recompute: bool = True,
    check: bool | None = None,
) -> tuple[Tensor, SlotState | None]:
    """Outputs [B, T, HQ, V] of gated slot attention, and the final SlotState if asked for.

        K~_t = diag(a_t) K~_{t-1} + s_t (x) k_t,    V~_t = diag(a_t) V~_{t-1} + s_t (x) v_t,    a_t = exp(g_t)
        o_t = V~_t^T readout(K~_t (scale * q_t))

    q [B, T, HQ, K], k [B, T, H, K], v [B, T, H, V], log forget gate g [B, T, H, M] (at most 0; -inf is a full reset),
    write strength s [B, T, H, M], by default 1 - exp(g). `scale` None means K**-0.5; the paper's layer passes 1.0.
    `readout` is softmax, identity, swish, relu or relu2. With `cu_seqlens` [N+1], B is 1 and the sequences lie end to
    end. `recompute=False` keeps more for the backward pass instead of computing it again. Gates above 0 and NaN are
    refused on a CPU, with `check=True` on a GPU too, where that waits for the device, and with `check=False` nowhere.

    >>> q, k, v = torch.randn(3, 2, 100, 4, 16)
    >>> g = torch.nn.functional.logsigmoid(torch.randn(2, 100, 4, 8)) / 8
    >>> o, state = gated_slot_attention(q, k, v, g, output_final_state=True)
    >>> o.shape, state.k.shape, state.v.shape
    (torch.Size([2, 100, 4, 16]), torch.Size([2, 4, 16, 8]), torch.Size([2, 4, 8, 16]))
    >>> gated_slot_attention(q, k, v, g.exp())  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    gsa.errors.GSAError: gated_slot_attention: g must be log gates, at most 0 (-inf is a full reset), but ...
    """
    checker = Checker("gated_slot_attention")
    checker.flags(output_final_state=output_final_state, recompute=recompute)
    q, k, v = checker.one_dtype(q, k, v)
    checker.qkv(q, k, v)
    checker.readout(readout)
    H, K, V = k.shape[2], k.shape[3], v.shape[3]
    checker.gate("g", g, q, H, None)
    M = g.shape[3]
    if s is not None:
        checker.gate("s", s, q, H, {"M": M})
    N = checker.sequences(q, cu_seqlens)
    if initial_state is not None:
        if not isinstance(initial_state, tuple) or len(initial_state) != 2:
            raise checker.fail(f"initial_state must be a SlotState(k, v), got {type(initial_state).__name__}")
        initial_state = SlotState(
            checker.state("initial_state.k", initial_state[0], (N, H, K, M), "N, H, K, M", q),
            checker.state("initial_state.v", initial_state[1], (N, H, M, V), "N, H, M, V", q),
        )
    begin_k, begin_v = (None, None) if initial_state is None else initial_state
    by_value = checker.by_value(check, q)
    call = SlotCall(
        q, k, v, g, s, begin_k, begin_v, cu_seqlens, checker.scale(scale, K), readout, _save(recompute), by_value
    )
    o, *memories = find("gated_slot_attention", backend, q.device)(call)
    return o, SlotState(*memories) if output_final_state else None


def attention_with_bounded_memory(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    *,
    normalise: bool = False,
    scale: float | None = None,
    initial_state: BoundedMemoryState | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
    recompute: bool = True,
    check: bool | None = None,
) -> tuple[Tensor, BoundedMemoryState | None]:
    """Outputs [B, T, HQ, V] of ABC, attention with bounded memory, and the final BoundedMemoryState if asked for.

        phi_t = exp(w_t) / sum_{j<=t} exp(w_j),    o_t = V~_t^T softmax(K~_t (scale * q_t))
        K~_t = c_t K~_{t-1} + phi_t (x) k_t,       V~_t = c_t V~_{t-1} + phi_t (x) v_t

    `normalise=False` is the paper's equation, c_t = 1: memory only grows. `normalise=True` is the running average that
    flash-linear-attention computes, c_t = 1 - phi_t. q [B, T, HQ, K], k [B, T, H, K], v [B, T, H, V], write logits
    w [B, T, H, M]; w = -inf writes nothing, inf and NaN are refused where gates would be. The rest is as in
    `gated_slot_attention`.

    >>> q, k, v = torch.randn(3, 1, 10, 2, 8)
    >>> o, state = attention_with_bounded_memory(q, k, v, torch.randn(1, 10, 2, 4), output_final_state=True)
    >>> state.log_z.shape
    torch.Size([1, 2, 4])
    """
    checker = Checker("attention_with_bounded_memory")
    checker.flags(normalise=normalise, output_final_state=output_final_state, recompute=recompute)
    q, k, v = checker.one_dtype(q, k, v)
    checker.qkv(q, k, v)
    H, K, V = k.shape[2], k.shape[3], v.shape[3]
    checker.gate("w", w, q, H, None)
    M = w.shape[3]
    N = checker.sequences(q, cu_seqlens)
    scale = checker.scale(scale, K)
    if initial_state is not None:
        if not isinstance(initial_state, tuple) or len(initial_state) != 3:
            raise checker.fail(
                f"initial_state must be a BoundedMemoryState(k, v, log_z), got {type(initial_state).__name__}"
            )
        initial_state = BoundedMemoryState(
            checker.state("initial_state.k", initial_state[0], (N, H, K, M), "N, H, K, M", q),
            checker.state("initial_state.v", initial_state[1], (N, H, M, V), "N, H, M, V", q),
            checker.state("initial_state.log_z", initial_state[2], (N, H, M), "N, H, M", q),
        )
    begin_k, begin_v, begin_z = (None, None, None) if initial_state is None else initial_state
    by_value = checker.by_value(check, q)
    call = BoundedMemoryCall(
        q, k, v, w, begin_k, begin_v, begin_z, cu_seqlens, normalise, scale, _save(recompute), by_value
    )
    o, *state = find("attention_with_bounded_memory", backend, q.device)(call)
    return o, BoundedMemoryState(*state) if output_final_state else None


def _save(recompute: bool) -> str:
    """What forward saves, if backward can follow."""
    return "marks" if recompute else "states"
