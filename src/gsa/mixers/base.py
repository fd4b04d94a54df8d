"""What every token mixer promises: the same answer for a sequence whole, split, token by token, packed or padded.

Shape letters: B batch, T time, D model width, N sequences.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from gsa.errors import GSAError
from gsa.mixers.sequences import Sequences, describe, padding_of, sequences_of
from gsa.options import check, number

MAX_WIDTH = 2**20
"""Of a model; the widths and counts of its parts have limits of that order, so that no size overflows 64 bits."""
MAX_HEADS = 2**16
State = dict[str, Tensor]
"""What a sequence leaves behind: tensors by name, each with the sequences [N, ...] first."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What can be chosen of a mixer. The sentence beneath a field says what it does."""

    hidden_size: int = number(least=1, most=MAX_WIDTH)
    """Model width D."""
    rms_norm_eps: float = number(1e-6, above=0)
    """Added to the mean square in norms."""

    mixer: ClassVar[str] = "mixer"

    def __post_init__(self) -> None:
        check(self, self.mixer)

    def fail(self, message: str) -> GSAError:
        return GSAError(f"{self.mixer}: {message}")


Layers = Sequence[Options]
"""The options of every layer of a model, in order."""


class Mixer(nn.Module, ABC):
    """A token mixer: x [B, T, D] to y [B, T, D], with a state that carries the sequence on."""

    Options: ClassVar[type[Options]]
    o_proj: nn.Linear
    """The last matrix, back to the model width."""
    with_mlp: ClassVar[bool] = True
    """Whether a block has an MLP behind this mixer."""
    grows: ClassVar[bool] = False
    """Whether its state grows with the sequence: then sizes that are 0 in a fresh state may be any."""

    def __init__(self, options: Any):
        super().__init__()
        self.options = options

    def forward(
        self,
        x: Tensor,
        state: State | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        mask: Tensor | None = None,
        sequences: Sequences | None = None,
        return_state: bool = True,
        shared: Tensor | None = None,
    ) -> tuple[Tensor, State | None]:
        """y [B, T, D] and the state behind the last token.

        `state` is what an earlier call returned, or `init_state(N)`, or None for a beginning; it is not changed. With
        `cu_seqlens` [N+1], B is 1 and N sequences lie end to end. `mask` [B, T] is 0 at pads, which may lie anywhere
        and change nothing; y is 0 there. Without `return_state`, no state comes back.

        A model checks and packs once for all of its layers: it gives them `sequences` instead of `cu_seqlens` and
        `mask`. `shared` is what `shared_inputs` has for this layer.
        """
        # Only mixers whose layers share something take it: `mix` of the others refuses the argument.
        more = {} if shared is None else {"shared": shared}
        if sequences is not None:
            assert cu_seqlens is None
            assert mask is None
            return self.mix(x, state, sequences, return_state, **more)
        name = self.options.mixer
        self._check(x, name)
        padding = padding_of(mask, x, cu_seqlens, name)
        if padding is None:
            sequences = sequences_of(x, cu_seqlens, name)
            self.check_state(state, sequences.count)
            return self.mix(x, state, sequences, return_state, **more)
        self.check_state(state, x.shape[0])
        before = self.grown(state, padding.extra)
        y, after = self.mix(padding.pack(x), before, padding.sequences(), return_state, **more)
        return padding.unpack(y), None if after is None else shrunk(after, padding.rows)

    @abstractmethod
    def mix(
        self, x: Tensor, state: State | None, sequences: Sequences, return_state: bool = True
    ) -> tuple[Tensor, State | None]:
        """What `forward` does, for arguments that are known to be right. Call the mixer itself, so that hooks run."""

    @classmethod
    def shared_parameters(cls, layers: Layers) -> dict[str, nn.Parameter]:
        """Parameters by name that layers of this class share, in a model with these layers.

        The model holds them beside its layers, under these names.
        """
        return {}

    @classmethod
    def shared_inputs(cls, layers: Layers, model: nn.Module) -> dict[int, Tensor]:
        """What layers of this class, by their number, get as `shared`: computed once for all of them in every pass.

        `model` holds the shared parameters.
        """
        return {}

    def reset_parameters(self) -> None:
        """Fresh weights for what is not just a matrix."""

    @abstractmethod
    def init_state(self, batch_size: int) -> State:
        """The state of so many sequences that have not begun."""

    @property
    def device_and_dtype(self) -> tuple[torch.device, torch.dtype]:
        """Where and in which numbers it computes: what a fresh state is made in.

        Nothing more is asked of a weight than that: a quantised one may be anything else, or no tensor at all.
        """
        for weight in (getattr(self.o_proj, "weight", None), *self.parameters()):
            if isinstance(weight, Tensor) and weight.is_floating_point():
                return weight.device, weight.dtype
        return torch.device("cpu"), torch.float32  # as torch's quantised layers compute

    @property
    @abstractmethod
    def state_size(self) -> int | None:
        """Numbers of recurrent memory held per sequence, counted as in the paper; None if it grows with the sequence.

        The few last inputs that a short convolution keeps, and counters of positions, are not part of it.
        """

    def grown(self, state: State | None, count: int) -> State | None:
        """The state with so many sequences more, which have not begun."""
        if state is None or count == 0:
            return state
        extra = self.init_state(count)
        return {name: _cat_ragged(x, extra[name].to(x.dtype)) for name, x in state.items()}

    def _check(self, x: Tensor, name: str) -> None:
        width = self.options.hidden_size
        if not isinstance(x, Tensor) or x.dim() != 3 or x.shape[2] != width or not x.is_floating_point():
            raise GSAError(f"{name}: x must be a floating tensor [B, T, D] with D = {width}, got {describe(x)}")

    def check_state(self, state: State | None, sequences: int) -> None:
        """Raises unless this can be a state of this mixer for so many sequences."""
        if state is None:
            return
        name, expected = self.options.mixer, self._state_shapes
        if not isinstance(state, dict) or state.keys() != expected.keys():
            got = ", ".join(state) if isinstance(state, dict) else type(state).__name__
            raise GSAError(f"{name}: state must hold {', '.join(expected)}, got {got}")
        for key, shape in expected.items():
            x = state[key]
            if (
                not isinstance(x, Tensor)
                or x.dim() != len(shape)
                or any(
                    have != want for have, want in zip(x.shape[1:], shape[1:], strict=True) if want or not self.grows
                )
            ):
                sizes = ", ".join(["N", *("time" if self.grows and not size else str(size) for size in shape[1:])])
                raise GSAError(f"{name}: state[{key!r}] must be a tensor [{sizes}], got {describe(x)}")
            if x.shape[0] != sequences:
                raise GSAError(f"{name}: state[{key!r}] is of {x.shape[0]} sequences, there are {sequences}")

    @cached_property
    def _state_shapes(self) -> dict[str, torch.Size]:
        """Shapes of the tensors of a state."""
        return {key: x.shape for key, x in self.init_state(0).items()}


def shrunk(state: State, count: int) -> State:
    """The first so many sequences of a state."""
    return {name: x[:count] for name, x in state.items()}


def _cat_ragged(x: Tensor, extra: Tensor) -> Tensor:
    """Both along the sequences; `extra` may hold less time (dimension 1 of a cache) and is filled up."""
    if x.dim() > 1 and x.shape[1:] != extra.shape[1:]:
        extra = extra.new_zeros(extra.shape[0], *x.shape[1:])
    return torch.cat([x, extra])
