"""ABC, attention with bounded memory control: slots that are written with a running softmax and never forget.

Shape letters: B batch, T time, H heads, M slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from gsa.mixers.base import MAX_WIDTH, State
from gsa.mixers.gsa import bounded_memory, normaliser, slot_memory, slot_memory_size
from gsa.mixers.heads import HeadMixer, HeadOptions
from gsa.mixers.rotary import RotaryOptions
from gsa.mixers.sequences import Sequences
from gsa.ops import attention_with_bounded_memory
from gsa.options import number


@dataclass(frozen=True, kw_only=True)
class ABCOptions(RotaryOptions, HeadOptions):
    """Options of ABC."""

    num_slots: int = number(64, least=1, most=MAX_WIDTH)
    """Memory slots M of each head."""
    normalise: bool = True
    """True: memory is a running average of what was written. False: it is a growing sum, the paper's equation."""
    gate_clamp: float = number(32.0, least=0)
    """Write logits are kept between minus this and this; 0 for no limit."""
    expand_k: float = 0.5
    output_gate: bool = True

    mixer: ClassVar[str] = "abc"


class BoundedMemoryAttention(HeadMixer):
    """The mixer `abc`."""

    Options = ABCOptions
    options: ABCOptions

    def __init__(self, options: ABCOptions):
        super().__init__(options)
        self.s_proj = nn.Linear(options.hidden_size, options.kv_heads * options.num_slots, bias=False)

    def mix(
        self, x: Tensor, state: State | None, sequences: Sequences, return_state: bool = True
    ) -> tuple[Tensor, State | None]:
        options = self.options
        q, k, v, left = self.project(x, state, sequences, return_state)
        q, k, counter = options.turn(q, k, state, sequences)
        w = self.s_proj(x).unflatten(-1, (-1, options.num_slots))
        if options.gate_clamp:
            w = w.clamp(-options.gate_clamp, options.gate_clamp)
        o, memory = attention_with_bounded_memory(
            q,
            k,
            v,
            w,
            normalise=options.normalise,
            scale=options.scale,
            initial_state=bounded_memory(state),
            output_final_state=return_state,
            cu_seqlens=sequences.cu_seqlens,
            check=False,
        )
        y = self.output(o, x)
        return y, None if memory is None else {**memory._asdict(), **left, **counter}

    def init_state(self, batch_size: int) -> State:
        M = self.options.num_slots
        return {
            **slot_memory(self, M, batch_size),
            **normaliser(self, M, batch_size),
            **self.projections.init_state(self, batch_size),
            **self.options.counter(batch_size, self.device_and_dtype[0]),
        }

    @property
    def state_size(self) -> int:
        return slot_memory_size(self, self.options.num_slots)
