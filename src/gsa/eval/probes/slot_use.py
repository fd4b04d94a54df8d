"""What tokens do with slots: how strongly each writes to every slot of a layer, and how much of each it reads.

Both are taken from the calls of the operator while the model reads a text: the gates are arguments of such a call, and
the slot weights are its first pass, which is computed once more.

Shape letters: T time, H key/value heads, HQ query heads, M slots.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from gsa.errors import GSAError
from gsa.infer.model import Model
from gsa.infer.runner import MAX_READ
from gsa.mixers.registry import MIXERS, option_names
from gsa.ops.api import gated_linear_attention
from gsa.ops.bounded_memory import write_gates
from gsa.ops.calls import BoundedMemoryCall, JoinedSlotsCall, SlotCall
from gsa.ops.portable_slots import ThroughLinear
from gsa.ops.readout import READOUTS
from gsa.ops.registry import find, watch


@dataclass(frozen=True)
class SlotUse:
    """How a text uses the slots of one layer. All tensors are fp32, on the CPU."""

    layer: int
    mixer: str
    writes: Tensor
    """Write strengths [T, H, M]: 1 - alpha of GSA, phi of ABC; 1 replaces what the slot holds. In a hybrid, a token
    writes the one that leaves its window, and the first tokens of a text nothing."""
    reads: Tensor
    """Shares of what a token reads [T, HQ, M]: the softmax over slots. Of other readouts, the share of the absolute
    weights."""
    log_gates: Tensor
    """Log forget gates [T, H, M]."""

    @property
    def heads(self) -> int:
        """Key/value heads, each with slots of its own."""
        return self.writes.shape[1]

    @property
    def slots(self) -> int:
        """Of one head."""
        return self.writes.shape[2]

    def memory_of(self, query_head: int) -> int:
        """The key/value head that a query head reads from."""
        return query_head * self.heads // self.reads.shape[1]

    @cached_property
    def reads_of_memory(self) -> Tensor:
        """Reads [T, H, M] of the slots of each key/value head: the mean over the query heads that share them."""
        return self.reads.unflatten(1, (self.heads, -1)).mean(2)

    @cached_property
    def half_lives(self) -> Tensor:
        """Tokens after which half of what a slot holds is forgotten [H, M], from its mean log gate; inf: never.

        The first token is left out: there is nothing to forget yet. So are tokens that write nothing.
        """
        count = (self.writes[1:] != 0).flatten(1).any(1).sum().clamp(min=1)
        return math.log(2) / (self.log_gates[1:].double().sum(0) / count).abs()  # of 0, inf

    @cached_property
    def written(self) -> Tensor:
        """The sum of all writes to a slot [H, M]; below 1, the slot is not filled."""
        return self.writes.double().sum(0)

    @cached_property
    def read(self) -> Tensor:
        """The mean share that a slot has of what is read [H, M]."""
        return self.reads_of_memory.double().mean(0)

    def never_written(self, threshold: float) -> Tensor:
        """Slots [H, M] whose writes all together are below the threshold.

        Their sum counts, and not the largest: a slot with a long memory is written little by little.
        """
        return self.written < threshold

    def never_read(self, threshold: float) -> Tensor:
        """Slots [H, M] of which no token of any query head reads more than the threshold times an equal share, 1/M."""
        most = self.reads.amax(0).unflatten(0, (self.heads, -1)).amax(1)
        return most < threshold / self.slots

    def effective(self) -> dict[str, Tensor]:
        """Effective numbers of slots [H], from 1 to M: the exponential of the entropy of their use.

        `written` and `read` are of the whole text, `read_by_token` is of single tokens, on average.
        """
        read = (self.reads != 0).any(-1).sum(0).clamp(min=1)  # tokens that read from slots [HQ]
        by_token = entropy(self.reads.double()).sum(0) / read
        return {
            "written": entropy(self.written).exp(),
            "read": entropy(self.read).exp(),
            "read_by_token": by_token.unflatten(0, (self.heads, -1)).mean(1).exp(),
        }


def entropy(use: Tensor) -> Tensor:
    """The entropy of use [..., M] in nats, which need not sum to 1: log M if all are used alike, 0 if one alone is.

    >>> entropy(torch.tensor([[1.0, 1.0, 1.0, 1.0], [0.0, 2.0, 0.0, 0.0]])).exp().tolist()
    [4.0, 1.0]
    """
    return torch.special.entr(shares(use)).sum(-1)


def shares(use: Tensor) -> Tensor:
    """Use [..., M] over its sum; where nothing is used, all are 0."""
    total = use.sum(-1, keepdim=True)
    return torch.where(total > 0, use / total, 0.0)


def slot_layers(model: Model) -> list[int]:
    """The numbers of the layers that have slots; raises if there are none."""
    mixers = [options.mixer for options in model.config.layers]
    having = [name for name in MIXERS if "num_slots" in option_names(name)]
    found = [number for number, name in enumerate(mixers) if name in having]
    if not found:
        raise GSAError(
            f"probe slots: the model has no slots: the mixers of its layers are {', '.join(dict.fromkeys(mixers))}; "
            f"expected a layer with one of {', '.join(having)}"
        )
    return found


@torch.inference_mode()
def slot_use(model: Model, ids: Sequence[int], progress: Callable[[int], None] | None = None) -> list[SlotUse]:
    """How a text of at least two tokens uses the slots of every layer that has some.

    >>> model = Model.load("gsa-tiny")
    >>> layers = slot_use(model, [1, 2, 3, 4, 5])
    >>> len(layers), layers[0].writes.shape, layers[0].reads.shape
    (4, torch.Size([5, 4, 32]), torch.Size([5, 4, 32]))
    """
    layers = slot_layers(model)
    if len(ids) < 2:
        raise GSAError(f"probe slots: expected a text of at least 2 tokens, got {len(ids)}")
    pieces: list[list[_Piece]] = [[] for _ in layers]
    text, state = torch.tensor(ids, device=model.device)[None], None
    for begin in range(0, len(ids), MAX_READ):
        piece, seen = text[:, begin : begin + MAX_READ], list[Any]()
        borders = torch.tensor([0, piece.shape[1]], device=model.device)  # packed, so that no piece is a single step
        with watch(seen.append):
            _, state = model.lm.model(piece, state, cu_seqlens=borders)
        calls = [call for call in seen if type(call) in _MEASURES]
        assert len(calls) == len(layers), "a layer with slots calls the operator once"
        for found, call in zip(pieces, calls, strict=True):
            found.append(_MEASURES[type(call)](call))
        if progress is not None:
            progress(begin + piece.shape[1])
    mixers = [model.config.layers[number].mixer for number in layers]
    return [
        SlotUse(number, mixer, *(torch.cat(parts) for parts in zip(*found, strict=True)))
        for number, mixer, found in zip(layers, mixers, pieces, strict=True)
    ]


_Piece = tuple[Tensor, Tensor, Tensor]
"""writes [T, H, M], reads [T, HQ, M], log gates [T, H, M] of some tokens"""


def _of_slots(call: SlotCall) -> _Piece:
    writes = -torch.expm1(call.g) if call.s is None else call.s
    return _measured(call, writes, call.g, call.readout)


def _of_bounded(call: BoundedMemoryCall) -> _Piece:
    phi, forget, _ = write_gates(call.w, call.initial_log_z, call.cu_seqlens, False)
    return _measured(call, phi, forget if call.normalise else torch.zeros_like(phi), "softmax")


def _measured(call: SlotCall | BoundedMemoryCall, writes: Tensor, log_gates: Tensor, readout: str) -> _Piece:
    """The first pass of the operator, whose values are the write strengths: scores of slots, and so their weights."""
    q, k = call.q.to(writes.dtype), call.k.to(writes.dtype)
    scores, _ = gated_linear_attention(
        q, k, writes, gv=log_gates, scale=call.scale, initial_state=call.initial_k, cu_seqlens=call.cu_seqlens
    )
    reads = shares(READOUTS[readout].apply(scores).abs())
    return writes[0].float().cpu(), reads[0].float().cpu(), log_gates[0].float().cpu()


def _of_joined(call: JoinedSlotsCall) -> _Piece:
    linear = ThroughLinear(find("gated_linear_attention", "auto", call.q.device))
    logits, *_ = linear.logits(call)
    weights = logits.softmax(-1).masked_fill(logits == torch.finfo(logits.dtype).min, 0.0)  # of empty slots
    reads = weights.flatten(2, 3)
    return call.s[0].float().cpu(), reads[0].float().cpu(), call.g[0].float().cpu()


_MEASURES: dict[type, Callable[[Any], _Piece]] = {
    SlotCall: _of_slots,
    BoundedMemoryCall: _of_bounded,
    JoinedSlotsCall: _of_joined,
}
