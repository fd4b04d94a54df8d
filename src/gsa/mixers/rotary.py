"""Rotary positions as an option of mixers: queries and keys are turned by their place in the sequence.

Shape letters: B batch, T time, H heads, K width of a head, N sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gsa.mixers.base import Options, State
from gsa.mixers.sequences import Sequences
from gsa.ops.state import compute_dtype
from gsa.ops.transforms import in_forward_mode, transformed
from gsa.options import number


@dataclass(frozen=True, kw_only=True)
class RotaryOptions(Options):
    """Options of mixers that may know positions."""

    rope_theta: float = number(10000.0, least=0)
    """Base of the rotary frequencies; 0 for no rotary embedding."""

    if TYPE_CHECKING:

        @property
        def key_width(self) -> int:
            """Of one head."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rope_theta and self.key_width % 2:
            raise self.fail(f"rope_theta: rotary positions need heads of even width, got {self.key_width}; 0 for none")

    def turn(self, q: Tensor, k: Tensor, state: State | None, sequences: Sequences) -> tuple[Tensor, Tensor, State]:
        """q and k turned, and the count of tokens after them."""
        if not self.rope_theta:
            return q, k, {}
        start = None if state is None else state["position"]
        positions = sequences.positions(start)
        after = sequences.lengths() if start is None else sequences.lengths() + start
        return (
            rotate(q, positions, self.rope_theta),
            rotate(k, positions, self.rope_theta),
            {"position": after},
        )

    def counter(self, batch_size: int, device: torch.device) -> State:
        """The count of tokens [N] before the first."""
        if not self.rope_theta:
            return {}
        return {"position": torch.zeros(batch_size, dtype=torch.int64, device=device)}


def rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """x [B, T, H, K] turned by its positions [B or 1, T]: rotary embedding, first half against second half.

    Angles are fp64 where the device has it: in fp32, those of heads of 128 are off by up to 0.06 at position a million.
    """
    half = x.shape[-1] // 2
    dtype = torch.float32 if x.device.type == "mps" else torch.float64
    frequencies = theta ** (torch.arange(half, device=x.device, dtype=dtype) / -half)
    angles = positions[..., None, None].to(dtype) * frequencies
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
