"""HGRN2: gated linear attention with 1 - gate as keys, and gates that are bounded below, in deeper layers higher.

Shape letters: B batch, T time, D model width, H heads, K width of a head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gsa.mixers.activations import log_forget_gate
from gsa.mixers.base import MAX_HEADS, Layers, Mixer, State
from gsa.mixers.convolution import ConvolutionOptions, Projections
from gsa.mixers.gla import empty_memory, linear_memory
from gsa.mixers.norm import RMSNorm
from gsa.mixers.sequences import Sequences
from gsa.ops.state import compute_dtype
from gsa.options import divides, number


@dataclass(frozen=True, kw_only=True)
class HGRN2Options(ConvolutionOptions):
    """Options of HGRN2."""

    num_attention_heads: int | None = number(None, least=1, most=MAX_HEADS)
    """Heads; of width 128 each by default."""
    lower_bound: bool = True
    """Whether gates are bounded below, by bounds that a model learns for all of its layers, deeper ones higher."""
    output_norm_eps: float | None = number(None, above=0)
    """Added to the mean square in the output's norm; `rms_norm_eps` by default."""
    scale: float | None = None
    """Of queries; one over the square root of a head's width by default."""

    mixer: ClassVar[str] = "hgrn2"

    def __post_init__(self) -> None:
        super().__post_init__()
        divides(self.heads, self.hidden_size, self.mixer, "num_attention_heads must divide hidden_size")

    @property
    def heads(self) -> int:
        return max(self.hidden_size // 128, 1) if self.num_attention_heads is None else self.num_attention_heads

    @property
    def width(self) -> int:
        return self.hidden_size // self.heads


class HGRN2(Mixer):
    """The mixer `hgrn2`."""

    Options = HGRN2Options
    options: HGRN2Options

    def __init__(self, options: HGRN2Options):
        super().__init__(options)
        D = options.hidden_size
        self.projections = Projections(self, options, dict.fromkeys("qfi", D), "none")
        self.o_proj = nn.Linear(D, D, bias=False)
        eps = options.rms_norm_eps if options.output_norm_eps is None else options.output_norm_eps
        self.norm = RMSNorm(D, eps)

    def mix(
        self,
        x: Tensor,
        state: State | None,
        sequences: Sequences,
        return_state: bool = True,
        shared: Tensor | None = None,
    ) -> tuple[Tensor, State | None]:
        """`shared` [2, D]: logarithms of this layer's lower bound b of the gates, and of 1 - b."""
        (q, f, i), left = self.projections.project(self, x, state, sequences, return_state)
        g = log_forget_gate(f, 1.0)
        if shared is not None:
            bound, rest = shared.to(g.dtype)
            g = torch.logaddexp(bound, rest + g)  # log(b + (1 - b) exp(g))
        q, k, i, g = (
            part.unflatten(-1, (-1, self.options.width)) for part in (F.silu(q), -torch.expm1(g).to(i.dtype), i, g)
        )
        o, memory = linear_memory(q, k, i, g, self.options.scale, state, sequences, return_state)
        y = self.o_proj(self.norm(o.flatten(-2)))
        return y, {**memory, **left} if return_state else None

    @classmethod
    def shared_parameters(cls, layers: Layers) -> dict[str, nn.Parameter]:
        """`lower_bounds` [layers, D]: a row of logits for every layer, of which `shared_inputs` makes its bound."""
        if not _bounded(layers):
            return {}  # a parameter without a gradient would stop training on several processes
        return {"lower_bounds": nn.Parameter(torch.zeros(len(layers), layers[0].hidden_size))}

    @classmethod
    def shared_inputs(cls, layers: Layers, model: nn.Module) -> dict[int, Tensor]:
        numbers = _bounded(layers)
        if not numbers:
            return {}
        assert isinstance(model.lower_bounds, Tensor)
        bounds = lower_bounds(model.lower_bounds)
        return {number: bounds[number] for number in numbers}

    def init_state(self, batch_size: int) -> State:
        memory = empty_memory(self, self.options.heads, self.options.width, self.options.width, batch_size)
        return {**memory, **self.projections.init_state(self, batch_size)}

    @property
    def state_size(self) -> int:
        return self.options.hidden_size * self.options.width


def _bounded(layers: Layers) -> list[int]:
    """The numbers of HGRN2's layers with a lower bound. The first layer of a model has none: it would be 0."""
    kinds = list(enumerate(layers))[1:]
    return [number for number, options in kinds if isinstance(options, HGRN2Options) and options.lower_bound]


def lower_bounds(logits: Tensor) -> Tensor:
    """Bounds that grow from 0 in the first layer towards 1, as logarithms [layers, 2, D] of bound and 1 - bound.

    The bound of a layer is the sum of a softmax over layers, from the second layer up to it. Both logarithms are sums
    of their own: a difference of 1 and a bound near 1 would be rounding.
    """
    shares = logits.to(compute_dtype(logits.dtype)).log_softmax(0)
    none = torch.full_like(shares[:1], -torch.inf)
    bounds = torch.cat([none, shares[1:].logcumsumexp(0)])
    deeper = torch.cat([shares[1:].flip(0).logcumsumexp(0).flip(0), none])
    return torch.stack([bounds, torch.logaddexp(shares[:1], deeper)], 1)
