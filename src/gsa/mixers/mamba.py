"""Mamba: a selective state space for every channel, with a convolution before it and a gate behind.

Shape letters: B batch, T time, D model width, E channels, S state of a channel.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from gsa.mixers.base import MAX_WIDTH, Mixer, Options, State
from gsa.mixers.convolution import MAX_SPAN, ShortConvolution
from gsa.mixers.fused import skip_gate, softplus
from gsa.mixers.heads import MAX_EXPANSION
from gsa.mixers.sequences import Sequences
from gsa.ops import selective_scan
from gsa.ops.state import compute_dtype
from gsa.options import number


@dataclass(frozen=True, kw_only=True)
class MambaOptions(Options):
    """Options of Mamba."""

    expand: float = number(2.0, above=0, most=MAX_EXPANSION)
    """Channels E over model width."""
    ssm_state_size: int = number(16, least=1, most=MAX_WIDTH)
    """State S of a channel."""
    time_step_rank: int | None = number(None, least=1, most=MAX_WIDTH)
    """Rank of the map to time steps; a sixteenth of the model width by default."""
    conv_size: int = number(4, least=2, most=MAX_SPAN)
    """Tokens that the convolution spans."""
    conv_bias: bool = True
    """Whether the convolution has a bias."""

    mixer: ClassVar[str] = "mamba"

    def __post_init__(self) -> None:
        super().__post_init__()
        if abs(self.hidden_size * self.expand - self.channels) > 1e-6 or self.channels < 1:
            raise self.fail(f"expand: {self.expand} x hidden_size {self.hidden_size} is not a whole number from 1")

    @property
    def channels(self) -> int:
        return round(self.hidden_size * self.expand)

    @property
    def rank(self) -> int:
        return math.ceil(self.hidden_size / 16) if self.time_step_rank is None else self.time_step_rank


class Mamba(Mixer):
    """The mixer `mamba`. Two blocks of it, without MLP, stand for one block of the others."""

    Options = MambaOptions
    options: MambaOptions
    with_mlp = False

    def __init__(self, options: MambaOptions):
        super().__init__(options)
        D, E, S = options.hidden_size, options.channels, options.ssm_state_size
        self.in_proj = nn.Linear(D, 2 * E, bias=False)
        self.conv = ShortConvolution(E, options.conv_size, options.conv_bias, "swish")
        self.x_proj = nn.Linear(E, options.rank + 2 * S, bias=False)
        self.dt_proj = nn.Linear(options.rank, E)
        self.A_log = nn.Parameter(torch.empty(E, S))
        self.D = nn.Parameter(torch.empty(E))
        self.o_proj = nn.Linear(E, D, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As in Mamba's paper: decays 1 to S (S4D-real), time steps log-uniform from 0.001 to 0.1."""
        E, S = self.A_log.shape
        device = self.A_log.device
        with torch.no_grad():
            self.A_log.copy_(torch.arange(1, S + 1, device=device).log().expand(E, S))
            self.D.fill_(1.0)
            nn.init.uniform_(self.dt_proj.weight, -(self.options.rank**-0.5), self.options.rank**-0.5)
            low, high = math.log(1e-3), math.log(1e-1)
            steps = torch.exp(torch.rand(E, device=device) * (high - low) + low).clamp(min=1e-4)
            self.dt_proj.bias.copy_(steps + torch.log(-torch.expm1(-steps)))  # softplus of it gives the steps

    def mix(
        self, x: Tensor, state: State | None, sequences: Sequences, return_state: bool = True
    ) -> tuple[Tensor, State | None]:
        S = self.options.ssm_state_size
        u, z = self.in_proj(x).chunk(2, -1)
        u, left = self.conv(u, None if state is None else state["conv"], sequences, return_state)
        dt, B, C = self.x_proj(u).split([self.options.rank, S, S], -1)
        y, memory = selective_scan(
            u,
            softplus(self.dt_proj(dt)),
            -torch.exp(self.A_log.to(compute_dtype(u.dtype))),
            B,
            C,
            initial_state=None if state is None else state["h"],
            output_final_state=return_state,
            cu_seqlens=sequences.cu_seqlens,
            check=False,
        )
        y = skip_gate(y, u, z, self.D)
        after = None if memory is None or left is None else {"h": memory, "conv": left}
        return self.o_proj(y), after

    def init_state(self, batch_size: int) -> State:
        E, S = self.A_log.shape
        return {
            "h": torch.zeros(batch_size, E, S, dtype=compute_dtype(self.A_log.dtype), device=self.A_log.device),
            "conv": self.conv.init_state(batch_size),
        }

    @property
    def state_size(self) -> int:
        return self.options.channels * self.options.ssm_state_size
