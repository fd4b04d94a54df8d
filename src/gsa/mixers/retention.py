"""Linear attention with a fixed decay for each head: RetNet, SUPRA, and without a decay plain linear attention.

Shape letters: B batch, T time, H key/value heads, HQ query heads, K, V widths of a head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gsa.mixers.activations import SOFTMAX
from gsa.mixers.base import State
from gsa.mixers.gla import empty_memory, linear_memory
from gsa.mixers.heads import HeadMixer, LinearMemoryOptions
from gsa.mixers.rotary import RotaryOptions
from gsa.mixers.sequences import Sequences
from gsa.ops.state import compute_dtype
from gsa.options import choice

DECAYS = ("fixed", "none")


@dataclass(frozen=True, kw_only=True)
class RetNetOptions(RotaryOptions, LinearMemoryOptions):
    """Options of RetNet."""

    num_attention_heads: int = 8
    decay: str = choice("fixed", DECAYS)
    """`fixed`: head h keeps 1 - 2^(-5-h) of its memory at every token; `none`: all of it."""
    expand_v: float = 2.0
    output_gate: bool = True

    mixer: ClassVar[str] = "retnet"


@dataclass(frozen=True, kw_only=True)
class SUPRAOptions(RetNetOptions):
    """Options of SUPRA: RetNet without the gate, queries and keys behind a learned feature map (T2R)."""

    feature_map: str = "t2r"
    expand_v: float = 1.0
    output_gate: bool = False

    mixer: ClassVar[str] = "supra"


@dataclass(frozen=True, kw_only=True)
class LinearOptions(RetNetOptions):
    """Options of plain linear attention: no decay, no positions, positive features."""

    decay: str = "none"
    rope_theta: float = 0.0
    feature_map: str = "elu1"
    expand_v: float = 1.0
    output_gate: bool = False

    mixer: ClassVar[str] = "linear"


class Retention(HeadMixer):
    """The mixer `retnet`; with other defaults also `supra` and `linear`."""

    Options = RetNetOptions
    options: RetNetOptions

    def mix(
        self, x: Tensor, state: State | None, sequences: Sequences, return_state: bool = True
    ) -> tuple[Tensor, State | None]:
        options = self.options
        turned_first = options.feature_map == SOFTMAX  # whose features must not become negative
        q, k, v, left = self.project(x, state, sequences, return_state, mapped=not turned_first)
        q, k, counter = options.turn(q, k, state, sequences)
        if turned_first:
            q, k = self.feature_map(q), self.feature_map(k)
        decay = None
        if options.decay == "fixed":
            decay = head_decay(options.num_attention_heads, q).expand(*x.shape[:2], -1)[..., None]
            # A decay belongs to a query head, so grouped keys and values each get a memory of their own there.
            k, v = (part.repeat_interleave(options.num_attention_heads // options.kv_heads, 2) for part in (k, v))
        o, memory = linear_memory(q, k, v, decay, options.scale, state, sequences, return_state, options.sum_eps)
        return self.output(o, x), {**memory, **left, **counter} if return_state else None

    @property
    def _memories(self) -> int:
        return self.options.num_attention_heads if self.options.decay == "fixed" else self.options.kv_heads

    def init_state(self, batch_size: int) -> State:
        options = self.options
        return {
            **empty_memory(self, self._memories, options.feature_width, options.memory_width, batch_size),
            **self.projections.init_state(self, batch_size),
            **options.counter(batch_size, self.device_and_dtype[0]),
        }

    @property
    def state_size(self) -> int:
        return self._memories * self.options.feature_width * self.options.memory_width


class SUPRA(Retention):
    """The mixer `supra`."""

    Options = SUPRAOptions


class LinearAttention(Retention):
    """The mixer `linear`."""

    Options = LinearOptions


def head_decay(heads: int, like: Tensor) -> Tensor:
    """Log of what each head keeps of its memory at a token [HQ]: from 1 - 2^-5 on, ever closer to 1."""
    numbers = torch.arange(heads, device=like.device, dtype=compute_dtype(like.dtype))
    return torch.log1p(-torch.exp2(-5 - numbers))
