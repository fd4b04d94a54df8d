"""Gated linear attention: a decay for every key feature, from the token through a low-rank map.

Shape letters: B batch, T time, H key/value heads, K, V widths of a head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from gsa.mixers.activations import log_forget_gate
from gsa.mixers.base import MAX_WIDTH, Mixer, State
from gsa.mixers.heads import HeadMixer, LinearMemoryOptions
from gsa.mixers.sequences import Sequences
from gsa.ops import gated_linear_attention
from gsa.ops.state import compute_dtype
from gsa.options import number


@dataclass(frozen=True, kw_only=True)
class GLAOptions(LinearMemoryOptions):
    """Options of gated linear attention."""

    gate_rank: int = number(16, least=1, most=MAX_WIDTH)
    """Rank of the map from token to gates."""
    gate_temperature: float = number(16.0, above=0)
    """tau: gates are sigmoid(logits)^(1/tau)."""
    expand_k: float = 0.5
    output_gate: bool = True

    mixer: ClassVar[str] = "gla"


class GatedLinearAttention(HeadMixer):
    """The mixer `gla`."""

    Options = GLAOptions
    options: GLAOptions

    def __init__(self, options: GLAOptions):
        super().__init__(options)
        width = options.kv_heads * options.feature_width
        self.gk_proj = nn.Sequential(
            nn.Linear(options.hidden_size, options.gate_rank, bias=False), nn.Linear(options.gate_rank, width)
        )

    def mix(
        self, x: Tensor, state: State | None, sequences: Sequences, return_state: bool = True
    ) -> tuple[Tensor, State | None]:
        q, k, v, left = self.project(x, state, sequences, return_state)
        logits = self.gk_proj(x).unflatten(-1, (-1, self.options.feature_width))
        gk = log_forget_gate(logits, self.options.gate_temperature)
        options = self.options
        o, memory = linear_memory(q, k, v, gk, options.scale, state, sequences, return_state, options.sum_eps)
        return self.output(o, x), {**memory, **left} if return_state else None

    def init_state(self, batch_size: int) -> State:
        options = self.options
        memory = empty_memory(self, options.kv_heads, options.feature_width, options.memory_width, batch_size)
        return {**memory, **self.projections.init_state(self, batch_size)}

    @property
    def state_size(self) -> int:
        return self.options.kv_heads * self.options.feature_width * self.options.memory_width


def linear_memory(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gk: Tensor | None,
    scale: float | None,
    state: State | None,
    sequences: Sequences,
    return_state: bool,
    sum_eps: float | None = None,
) -> tuple[Tensor, State]:
    """Outputs of gated linear attention, with its memory S [N, H, K, V] taken from and put into a state.

    With `sum_eps`, a last column of the memory counts what was written, and outputs are divided by that and this.
    """
    if sum_eps is not None:
        v = torch.cat([v, torch.ones_like(v[..., :1])], -1)
    o, memory = gated_linear_attention(
        q,
        k,
        v,
        gk=gk,
        scale=scale,
        initial_state=None if state is None else state["S"],
        output_final_state=return_state,
        cu_seqlens=sequences.cu_seqlens,
        check=False,
    )
    if sum_eps is not None:
        wide = o.to(compute_dtype(o.dtype))
        o = (wide[..., :-1] / (wide[..., -1:] + sum_eps)).to(o.dtype)
    return o, {} if memory is None else {"S": memory}


def empty_memory(mixer: Mixer, heads: int, key_width: int, value_width: int, batch_size: int) -> State:
    device, dtype = mixer.device_and_dtype
    shape = (batch_size, heads, key_width, value_width)
    return {"S": torch.zeros(shape, dtype=compute_dtype(dtype), device=device)}
