"""Gated slots in one softmax with what else a token sees: arguments checked, an engine chosen, one call.

Shape letters: B batch, T time, H key/value heads, HQ query heads (a multiple of H), K key width of a head, V value
width, M slots, N sequences (B, or the number of packed ones).
"""

from __future__ import annotations

from torch import Tensor

from gsa.ops.calls import JoinedSlotsCall
from gsa.ops.checks import Checker
from gsa.ops.registry import find
from gsa.ops.state import JoinedSlotState, compute_dtype


def joined_slots(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    s: Tensor,
    near: Tensor,
    near_lse: Tensor,
    *,
    slot_scale: Tensor,
    slot_mass: Tensor,
    slot_bias: Tensor,
    scale: float | None = None,
    initial_state: JoinedSlotState | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
    recompute: bool = True,
    check: bool | None = None,
) -> tuple[Tensor, JoinedSlotState | None]:
    """Outputs [B, T, HQ, V] of attention to slots and to what is near, and the final JoinedSlotState if asked for.

        K~_i <- a_i K~_i + s_i k        V~_i <- a_i V~_i + s_i v        n_i <- a_i n_i + s_i,        a = exp(g)
        l_i  = e^t scale q . K~_i / n_i + c log n_i + b,     -inf while n_i = 0
        o    = [near e^near_lse + sum_i V~_i e^l_i / n_i] / [e^near_lse + sum_i e^l_i]

    A slot is the average of what was written to it, and stands for n tokens. `near` [B, T, HQ, V] and its log-sum-exp
    `near_lse` [B, T, HQ] are what `window_attention` gives. q [B, T, HQ, K], k [B, T, H, K], v [B, T, H, V], log forget
    gate g [B, T, H, M] (at most 0), the share s [B, T, H, M] of a token that each slot takes (at least 0); slot_scale
    t, slot_mass c, slot_bias b [HQ]. The rest is as in `gated_slot_attention`.

    >>> from gsa.ops import window_attention
    >>> q, k, v = torch.randn(3, 1, 50, 2, 8)
    >>> near, near_lse = window_attention(q, k, v, window=4)
    >>> t, c, b = torch.zeros(2), torch.ones(2), torch.zeros(2)
    >>> s = torch.randn(1, 50, 2, 6).softmax(-1)
    >>> o, state = joined_slots(
    ...     q, k, v, -s / 64, s, near, near_lse, slot_scale=t, slot_mass=c, slot_bias=b, output_final_state=True
    ... )
    >>> o.shape, state.mass.shape
    (torch.Size([1, 50, 2, 8]), torch.Size([1, 2, 6]))
    """
    checker = Checker("joined_slots")
    checker.flags(output_final_state=output_final_state, recompute=recompute)
    q, k, v = checker.one_dtype(q, k, v)
    checker.qkv(q, k, v)
    HQ, H, K, V = q.shape[2], k.shape[2], k.shape[3], v.shape[3]
    checker.gate("g", g, q, H, None)
    checker.gate("s", s, q, H, {"M": g.shape[3]})
    M, N, dtype = g.shape[3], checker.sequences(q, cu_seqlens), compute_dtype(q.dtype)
    for name, x, letters, shape in (
        ("near", near, "B, T, HQ, V", (*q.shape[:3], V)),
        ("near_lse", near_lse, "B, T, HQ", tuple(q.shape[:3])),
        ("slot_scale", slot_scale, "HQ", (HQ,)),
        ("slot_mass", slot_mass, "HQ", (HQ,)),
        ("slot_bias", slot_bias, "HQ", (HQ,)),
    ):
        checker.tensor(name, x, letters, q)
        if tuple(x.shape) != shape:
            raise checker.fail(f"{name} must have the shape [{letters}] = {list(shape)}, got {list(x.shape)}")
    begin: list[Tensor | None] = [None] * 3
    if initial_state is not None:
        if not isinstance(initial_state, tuple) or len(initial_state) != 3:
            raise checker.fail(
                f"initial_state must be a JoinedSlotState(k, v, mass), got {type(initial_state).__name__}"
            )
        sizes = {"N": N, "H": H, "K": K, "M": M, "V": V}
        layouts = {"k": "NHKM", "v": "NHMV", "mass": "NHM"}
        begin = [
            checker.state(f"initial_state.{name}", x, tuple(sizes[i] for i in own), ", ".join(own), q)
            for x, (name, own) in zip(initial_state, layouts.items(), strict=True)
        ]
    begin_k, begin_v, begin_mass = begin
    call = JoinedSlotsCall(
        q,
        k,
        v,
        g,
        s,
        checker.converted("near", near, q.dtype),
        checker.converted("near_lse", near_lse, dtype),
        checker.converted("slot_scale", slot_scale, dtype),
        checker.converted("slot_mass", slot_mass, dtype),
        checker.converted("slot_bias", slot_bias, dtype),
        begin_k,
        begin_v,
        begin_mass,
        cu_seqlens,
        checker.scale(scale, K),
        "marks" if recompute else "states",
        checker.by_value(check, q),
    )
    o, *state = find("joined_slots", backend, q.device)(call)
    return o, JoinedSlotState(*state) if output_final_state else None
