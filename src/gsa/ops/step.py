"""One token of gated slot attention: what decoding does, with a state of constant size.

Shape letters: B batch, H key/value heads, R queries per key/value head (HQ = H * R), K, V widths, M slots.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gsa.ops.calls import StepCall, tensors_of
from gsa.ops.checks import Checker
from gsa.ops.portable_step import gated_slot_attention_step as portable_step
from gsa.ops.registry import find
from gsa.ops.state import SlotState, compute_dtype
from gsa.ops.transforms import in_forward_mode, transformed


def gated_slot_attention_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    s: Tensor | None = None,
    *,
    state: SlotState,
    scale: float | None = None,
    readout: str = "softmax",
    inplace: bool = False,
    check: bool | None = None,
) -> tuple[Tensor, SlotState]:
    """The output [B, HQ, V] for one token per row, and the state after it.

    A sequence begins with `SlotState.zeros`, or with the final state that `gated_slot_attention` gives of its prompt.

    Arguments are those of `gated_slot_attention` without time: q [B, HQ, K], k [B, H, K], v [B, H, V], log forget gate
    g [B, H, M], write strength s [B, H, M] (default 1 - exp(g)). The state passed in stays as it is, unless `inplace`:
    then its tensors are updated and returned, which is faster, and no gradient flows. Without it all derivatives are
    there, and torch.func can transform it. A gate that is refused (see `gated_slot_attention`) has changed no state.

    >>> state = SlotState.zeros(batch=1, heads=2, slots=4, key_width=8, value_width=8)
    >>> q, k, v = torch.randn(3, 1, 2, 8)
    >>> o, state = gated_slot_attention_step(q, k, v, torch.full((1, 2, 4), -0.1), state=state)
    >>> o.shape
    torch.Size([1, 2, 8])
    """
    checker = Checker("gated_slot_attention_step")
    checker.flags(inplace=inplace)
    q, k, v = checker.one_dtype(q, k, v)
    checker.qkv(q, k, v, steps=True)
    B, K = q.shape[0], q.shape[2]
    H, V = v.shape[1:]
    checker.gate("g", g, q, H, None)
    M = g.shape[2]
    if s is not None:
        checker.gate("s", s, q, H, {"M": M})
    checker.readout(readout)
    scale = checker.scale(scale, K)
    if not isinstance(state, tuple) or len(state) != 2:
        raise checker.fail(f"state must be a SlotState(k, v), got {type(state).__name__}")
    memory_k = checker.state("state.k", state[0], (B, H, K, M), "B, H, K, M", q)
    memory_v = checker.state("state.v", state[1], (B, H, M, V), "B, H, M, V", q)

    dtype, plain = compute_dtype(q.dtype), not (transformed() or in_forward_mode())
    if inplace:
        if not plain:
            raise checker.fail("inplace=True has no derivative and cannot be mapped (torch.func); inplace=False can")
        for name, x in (("state.k", state[0]), ("state.v", state[1])):
            if x.dtype != dtype:
                raise checker.fail(f"{name} must be {dtype} to be updated in place, got {x.dtype}")
    call = StepCall(q, k, v, g, s, memory_k, memory_v, scale, readout, checker.by_value(check, q))
    step = find("gated_slot_attention_step", "auto", q.device)  # which refuses a named engine that cannot run
    return (step if plain and _engine_can(call, inplace) else portable_step)(call, inplace=inplace)


def _engine_can(call: StepCall, inplace: bool) -> bool:
    """Whether an engine's own step can be used, where nothing transforms it: it has no derivative, and updates only
    contiguous states in place. The portable step has neither limit."""
    if inplace:  # never has a graph
        return call.memory_k.is_contiguous() and call.memory_v.is_contiguous()
    return not (torch.is_grad_enabled() and any(x.requires_grad for x in tensors_of(call)))
