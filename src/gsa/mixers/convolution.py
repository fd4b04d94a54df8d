"""Short causal convolutions behind projections: an option of most mixers, a part of Mamba.

Shape letters: B batch, T time, C channels, N sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gsa.mixers.activations import ACTIVATIONS
from gsa.mixers.base import Options, State
from gsa.mixers.sequences import Sequences
from gsa.options import number

MAX_SPAN = 2**12  # a short convolution


@dataclass(frozen=True, kw_only=True)
class ConvolutionOptions(Options):
    """Options of mixers whose projections may be followed by a convolution."""

    conv_size: int = number(0, least=0, most=MAX_SPAN)
    """Tokens that a causal convolution behind the projections spans; 0 for no convolution."""
    conv_bias: bool = False
    """Whether those convolutions have a bias."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.conv_size == 1:
            raise self.fail("conv_size: a convolution over 1 token is none; use 0, or 2 and more")
        if self.conv_bias and not self.conv_size:
            raise self.fail("conv_bias does nothing without conv_size")


class Projections:
    """For a mixer with `{name}_proj` matrices: the convolutions `{name}_conv` behind them, and what those keep."""

    def __init__(self, mixer: nn.Module, options: ConvolutionOptions, widths: dict[str, int], activation: str):
        self.names = tuple(widths)
        self.convolved = options.conv_size > 0
        for name, width in widths.items():
            mixer.add_module(f"{name}_proj", nn.Linear(options.hidden_size, width, bias=False))
            if self.convolved:
                conv = ShortConvolution(width, options.conv_size, options.conv_bias, activation)
                mixer.add_module(f"{name}_conv", conv)

    def project(
        self, mixer: nn.Module, x: Tensor, state: State | None, sequences: Sequences, return_state: bool
    ) -> tuple[list[Tensor], State]:
        """Every projection of x behind its convolution, and the state of those."""
        parts, left = [], {}
        for name in self.names:
            part = getattr(mixer, f"{name}_proj")(x)
            if self.convolved:
                conv = f"{name}_conv"
                part, after = getattr(mixer, conv)(
                    part, None if state is None else state[conv], sequences, return_state
                )
                left[conv] = after
            parts.append(part)
        return parts, left

    def init_state(self, mixer: nn.Module, batch_size: int) -> State:
        """The convolutions' part of a fresh state."""
        convs = [f"{name}_conv" for name in self.names] if self.convolved else []
        return {conv: getattr(mixer, conv).init_state(batch_size) for conv in convs}


class ShortConvolution(nn.Module):
    """A causal convolution over the last few tokens, each channel by itself; its state [N, size-1, C] are those."""

    def __init__(self, channels: int, size: int, bias: bool, activation: str):
        super().__init__()
        self.channels, self.size = channels, size
        self.activation = ACTIVATIONS[activation]
        self.weight = nn.Parameter(torch.empty(channels, 1, size))
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        bound = self.size**-0.5
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(
        self, x: Tensor, state: Tensor | None, sequences: Sequences, return_state: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        """y [B, T, C] and the last inputs of each sequence [N, size-1, C]."""
        before = self.size - 1
        past = x.new_zeros(sequences.count, before, self.channels) if state is None else state.to(x.dtype)
        if sequences.packed:
            return self._packed(x, past, sequences, return_state)
        if x.shape[1] == 0:
            return x, past if return_state else None
        stream = torch.cat([past, x], 1)
        # The state is a copy: a view would keep all of the inputs.
        y = F.conv1d(stream.transpose(1, 2), self.weight, self.bias, groups=self.channels).transpose(1, 2)
        return self.activation(y), stream[:, stream.shape[1] - before :].clone() if return_state else None

    def _packed(
        self, x: Tensor, past: Tensor, sequences: Sequences, return_state: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Each tap reads the token so far back, or the state where the sequence does not reach so far."""
        assert sequences.ids is not None
        before, T = self.size - 1, x.shape[1]
        memory = torch.cat([past.flatten(0, 1), x[0]])  # states of all sequences, then all tokens
        tokens = torch.arange(T, device=x.device) + past.shape[0] * before
        offsets = sequences.offsets[0]
        y = None if self.bias is None else self.bias.to(x.dtype)
        for back in range(self.size):
            source = torch.where(offsets >= back, tokens - back, sequences.ids * before + before + offsets - back)
            term = memory[source] * self.weight[:, 0, before - back].to(x.dtype)
            y = term if y is None else y + term
        assert y is not None
        after = None
        if return_state:
            ends = sequences.lengths().cumsum(0)[:, None]
            ago = torch.arange(before, 0, -1, device=x.device)[None]
            lengths = sequences.lengths()[:, None]
            rows = torch.arange(past.shape[0], device=x.device)[:, None]
            source = torch.where(
                lengths >= ago, ends - ago + past.shape[0] * before, rows * before + before + lengths - ago
            )
            after = memory[source]
        return self.activation(y)[None], after

    def init_state(self, batch_size: int) -> Tensor:
        shape = (batch_size, self.size - 1, self.channels)
        return torch.zeros(shape, dtype=self.weight.dtype, device=self.weight.device)
