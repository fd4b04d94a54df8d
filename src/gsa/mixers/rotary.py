"""Rotary positions as an option of mixers: queries and keys are turned by their place in the sequence.

Shape letters: B batch, T time, H heads, K width of a head, N sequences.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from gsa.mixers.base import Options, State
from gsa.mixers.sequences import Sequences
from gsa.ops.state import compute_dtype
from gsa.ops.transforms import in_forward_mode, transformed
from gsa.options import number


class Rope(NamedTuple):
    """What says how fast features turn."""

    theta: float
    factor: float = 1.0
    context: int = 0
    low: float = 1.0
    high: float = 4.0

    def frequencies(self, half: int, device: torch.device | None, dtype: torch.dtype) -> Tensor:
        """Angles of a step [half], the fastest first.

        All are divided by the factor; with a context, as Llama 3 has it, only those that turn less than `low` times in
        it, and those of up to `high` turns in part.
        """
        plain = self.theta ** (torch.arange(half, device=device, dtype=dtype) / -half)
        if self.factor == 1:
            return plain
        if not self.context:
            return plain / self.factor
        turns = self.context * plain / (2 * math.pi)
        kept = ((turns - self.low) / (self.high - self.low)).clamp(0, 1)
        return kept * plain + (1 - kept) * plain / self.factor


@dataclass(frozen=True, kw_only=True)
class RotaryOptions(Options):
    """Options of mixers that may know positions."""

    rope_theta: float = number(10000.0, least=0)
    """Base of the rotary frequencies; 0 for no rotary embedding."""
    rope_factor: float = number(1.0, least=1)
    """What frequencies are divided by, for contexts so many times longer than a model was made for."""
    rope_context: int = number(0, least=0)
    """The context it was made for: frequencies that turn often in it stay as they are, as Llama 3 has it; 0 divides
    all."""
    rope_low: float = number(1.0, above=0)
    """Frequencies that turn fewer times in that context are divided by all of the factor."""
    rope_high: float = number(4.0, above=0)
    """Frequencies that turn more often in that context are not divided."""

    if TYPE_CHECKING:

        @property
        def key_width(self) -> int:
            """Of one head."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rope_theta and self.key_width % 2:
            raise self.fail(f"rope_theta: rotary positions need heads of even width, got {self.key_width}; 0 for none")
        needs = (
            ("rope_factor", "rope_theta 0", self.rope_theta != 0),
            ("rope_context", "rope_factor 1", self.rope_factor != 1),
            ("rope_low", "rope_context 0", self.rope_context != 0),
            ("rope_high", "rope_context 0", self.rope_context != 0),
        )
        for name, without, has in needs:
            if not has and getattr(self, name) != RotaryOptions.__dataclass_fields__[name].default:
                raise self.fail(f"{name} does nothing with {without}")
        if self.rope_low >= self.rope_high:
            raise self.fail(f"rope_low must be below rope_high, got {self.rope_low} and {self.rope_high}")

    @property
    def rope(self) -> Rope:
        return Rope(self.rope_theta, self.rope_factor, self.rope_context, self.rope_low, self.rope_high)

    def turn(self, q: Tensor, k: Tensor, state: State | None, sequences: Sequences) -> tuple[Tensor, Tensor, State]:
        """q and k turned, and the count of tokens after them."""
        if not self.rope_theta:
            return q, k, {}
        start = None if state is None else state["position"]
        positions = sequences.positions(start)
        after = sequences.lengths() if start is None else sequences.lengths() + start
        return (
            rotate(q, positions, self.rope),
            rotate(k, positions, self.rope),
            {"position": after},
        )

    def counter(self, batch_size: int, device: torch.device) -> State:
        """The count of tokens [N] before the first."""
        if not self.rope_theta:
            return {}
        return {"position": torch.zeros(batch_size, dtype=torch.int64, device=device)}


def rotate(x: Tensor, positions: Tensor, rope: Rope) -> Tensor:
    """x [B, T, H, K] turned by its positions [B or 1, T]: rotary embedding, first half against second half.

    Angles are fp64 where the device has it: in fp32, those of heads of 128 are off by up to 0.06 at position a million.
    """
    dtype = torch.float32 if x.device.type == "mps" else torch.float64
    angles = positions[..., None, None].to(dtype) * rope.frequencies(x.shape[-1] // 2, x.device, dtype)
    compute = compute_dtype(x.dtype)
    cos, sin = angles.cos().to(compute), angles.sin().to(compute)
    return _turned(x, cos, sin)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [B, T, H, K] by angles [B or 1, T, 1, K / 2], computed in their dtype."""
    if not (torch.compiler.is_compiling() or transformed() or in_forward_mode()):
        return _Turned.apply(x, cos, sin)
    a, b = x.to(cos.dtype).chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


class _Turned(torch.autograd.Function):
    """The same in two passes over memory; keeps the angles alone. The way back is a turn back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        a, b = x.to(cos.dtype).chunk(2, -1)
        y = torch.empty(x.shape, dtype=cos.dtype, device=x.device)
        first, second = y.chunk(2, -1)
        torch.mul(a, cos, out=first).addcmul_(b, sin, value=-1)
        torch.mul(b, cos, out=second).addcmul_(a, sin)
        return y.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turned(grad, cos, -sin), None, None
