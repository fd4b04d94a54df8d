"""`joined_slots` for an engine that has gated linear attention: two passes over the slots around one softmax.

The first pass, with gates on values, gives the scores of slots, the last, with gates on keys, their outputs. Between
them one of width 1 counts: n, the tokens that a slot stands for.

Shape letters: B batch, T time, H key/value heads, HQ query heads, R queries per key/value head, K, V widths of a head,
M slots, N sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from gsa.errors import raised_by
from gsa.ops.calls import JoinedSlotsCall, LinearCall, Tensors, sums_dtype
from gsa.ops.gates import refuse_gates, refuse_strengths
from gsa.ops.memory import require_memory
from gsa.ops.transforms import recorded

EMPTY = 1e-15
"""A slot that stands for no more tokens than this is empty: what is divided by n, and in gradients by its square, stays
finite."""


class HeadNumbers(NamedTuple):
    """t, c and b of the query heads [HQ]."""

    scale: Tensor
    mass: Tensor
    bias: Tensor


class ThroughLinear:
    """`joined_slots` by an engine's gated linear attention."""

    def __init__(self, linear: Callable[[LinearCall], Tensors]):
        self.linear = linear

    def __call__(self, call: JoinedSlotsCall) -> Tensors:
        """Outputs [B, T, HQ, V], and final memories [N, H, K, M], [N, H, M, V], [N, H, M]."""
        with torch.autocast(call.q.device.type, enabled=False), raised_by("joined_slots"):
            if not recorded():
                require_memory(call._asdict())
            if call.check:
                refuse_gates(g=call.g)
                refuse_strengths(call.s)
            return self._run(call)

    def _run(self, call: JoinedSlotsCall) -> Tensors:
        dtype, H, cu_seqlens, save = sums_dtype(call), call.k.shape[2], call.cu_seqlens, call.save
        v, g, s, near = (x.to(dtype) for x in (call.v, call.g, call.s, call.near))
        logits, n, last_k, last_n = self.logits(call)
        # Both softmaxes in one; the near part is always there, so that no sum is empty.
        lse = torch.logaddexp(call.near_lse, logits.logsumexp(-1).flatten(2))
        weights = (logits - lse.unflatten(2, (H, -1))[..., None]).exp() / n[:, :, :, None]
        o, last_v = self.linear(
            LinearCall(weights.flatten(2, 3), s, v, g, None, call.initial_v, cu_seqlens, 1.0, save, False)
        )
        o = o + (call.near_lse - lse).exp()[..., None] * near
        return o.to(call.q.dtype), last_k, last_v, last_n

    def logits(self, call: JoinedSlotsCall) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """l [B, T, H, R, M] of all slots and n [B, T, H, M] (see `slot_logits`), the last K~ [N, H, K, M] and n."""
        q, k, g, s = (x.to(sums_dtype(call)) for x in (call.q, call.k, call.g, call.s))
        one, rest = torch.ones_like(k[..., :1]), (call.save, False)
        before = None if call.initial_mass is None else call.initial_mass[:, :, None]
        scores, last_k = self.linear(LinearCall(q, k, s, None, g, call.initial_k, call.cu_seqlens, call.scale, *rest))
        n, last_n = self.linear(LinearCall(one, one, s, None, g, before, call.cu_seqlens, 1.0, *rest))
        numbers = HeadNumbers(call.slot_scale, call.slot_mass, call.slot_bias)
        logits, n = slot_logits(scores.unflatten(2, (k.shape[2], -1)), n, numbers)
        return logits, n, last_k, last_n[:, :, 0]


def slot_logits(scores: Tensor, n: Tensor, numbers: HeadNumbers) -> tuple[Tensor, Tensor]:
    """l [.., H, R, M] of scores scale q . K~ [.., H, R, M], lowest at empty slots; and n [.., H, M], 1 there.

    No gradient meets the logarithm or the quotient of an empty slot: those are taken of 1 instead.
    """
    empty = n <= EMPTY
    n = torch.where(empty, 1.0, n)
    t, c, b = (x.to(n.dtype).unflatten(0, (n.shape[-2], -1))[..., None] for x in numbers)  # [H, R, 1]
    found = t.exp() * scores / n[..., None, :] + (c * n.log()[..., None, :] + b)
    # The lowest number, not -inf: the log-sum-exp of nothing but those has a gradient, and their weights are 0.
    return found.masked_fill(empty[..., None, :], torch.finfo(found.dtype).min), n
