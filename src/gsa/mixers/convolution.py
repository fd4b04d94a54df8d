"""Short causal convolutions behind projections: an option of most mixers, a part of Mamba.

Shape letters: B batch, T time, C channels, N sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gsa.mixers.activations import ACTIVATIONS
from gsa.mixers.base import Options, State
from gsa.mixers.fused import gradients
from gsa.mixers.sequences import Sequences
from gsa.ops.native import convolution, rows
from gsa.options import number

MAX_SPAN = 2**12  # a short convolution
FUSED = ("none", "swish")  # activations that the native engine applies itself


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

    def __init__(
        self,
        mixer: nn.Module,
        options: ConvolutionOptions,
        widths: dict[str, int],
        activation: str,
        *,
        bias: bool = False,
    ):
        self.names = tuple(widths)
        self.convolved = options.conv_size > 0
        for name, width in widths.items():
            mixer.add_module(f"{name}_proj", nn.Linear(options.hidden_size, width, bias=bias))
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
        self.activation = activation
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
        if rows.usable(x, self.weight, self.bias, state):
            fused = self.activation if self.activation in FUSED else "none"
            y = _Native.apply(x, self.weight, self.bias, state, sequences, fused)
        else:
            fused = "none"
            y = convolved(x, self.weight, self.bias, state, sequences)
        if fused != self.activation:
            y = ACTIVATIONS[self.activation](y)
        return y, self._left(x, state, sequences) if return_state else None

    def _left(self, x: Tensor, state: Tensor | None, sequences: Sequences) -> Tensor:
        """The last inputs of each sequence. A copy: a view would keep all of the inputs."""
        before, T = self.size - 1, x.shape[1]
        past = _past(x, state, sequences, before)
        if T == 0:
            return past
        if not sequences.packed:
            # Compiled code is for every length: it must not look whether T is large enough.
            stream = torch.cat([past, x], 1) if torch.compiler.is_compiling() or before > T else x
            return stream[:, stream.shape[1] - before :].clone()
        lengths = sequences.lengths()[:, None]
        ago = torch.arange(before, 0, -1, device=x.device)[None]
        recent = x[0][(lengths.cumsum(0) - ago).clamp(min=0)]
        older = past.gather(1, (before + lengths - ago).clamp(max=before - 1)[:, :, None].expand_as(recent))
        return torch.where((lengths >= ago)[:, :, None], recent, older)

    def init_state(self, batch_size: int) -> Tensor:
        shape = (batch_size, self.size - 1, self.channels)
        return torch.zeros(shape, dtype=self.weight.dtype, device=self.weight.device)


def convolved(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None, sequences: Sequences) -> Tensor:
    """The convolution in torch, on any device: x [B, T, C], weight [C, 1, size], bias [C], state [N, size-1, C]."""
    C, _, size = weight.shape
    before, T = size - 1, x.shape[1]
    if T == 0:
        return x
    past = _past(x, state, sequences, before)
    if not sequences.packed:
        stream = torch.cat([past, x], 1)
        weight, bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
        return F.conv1d(stream.transpose(1, 2), weight, bias, groups=C).transpose(1, 2)
    # Each tap reads the token so far back, or the state where the sequence does not reach so far.
    assert sequences.ids is not None
    memory = torch.cat([past.flatten(0, 1), x[0]])  # states of all sequences, then all tokens
    tokens = torch.arange(T, device=x.device) + past.shape[0] * before
    offsets = sequences.offsets[0]
    y = None if bias is None else bias.to(x.dtype)
    for back in range(size):
        source = torch.where(offsets >= back, tokens - back, sequences.ids * before + before + offsets - back)
        term = memory[source] * weight[:, 0, before - back].to(x.dtype)
        y = term if y is None else y + term
    assert y is not None
    return y[None]


def _past(x: Tensor, state: Tensor | None, sequences: Sequences, before: int) -> Tensor:
    """What came before each sequence, in the dtype of x."""
    return x.new_zeros(sequences.count, before, x.shape[2]) if state is None else state.to(x.dtype)


class _Native(torch.autograd.Function):
    """The same by the native engine, with an activation; keeps its inputs alone."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        state: Tensor | None,
        sequences: Sequences,
        activation: str,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, bias, state)
        ctx.sequences, ctx.activation = sequences, activation
        return convolution.forward(x, weight, bias, state, sequences.cu_seqlens, activation)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        inputs, sequences, activation = ctx.saved_tensors, ctx.sequences, ctx.activation
        x, weight, bias, state = inputs
        if torch.is_grad_enabled() or not rows.usable(grad, *inputs):
            found = gradients(
                lambda x, weight, bias, state: ACTIVATIONS[activation](convolved(x, weight, bias, state, sequences)),
                inputs,
                grad,
            )
        else:
            dx, dweight, dbias, dstate = convolution.backward(
                grad, x, weight, bias, state, sequences.cu_seqlens, activation
            )
            found = dx, dweight, None if bias is None else dbias, dstate
        return *found, None, None
