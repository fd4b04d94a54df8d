"""Embedding, blocks and last norm: what a language model is without its head.

Shape letters: B batch, T time, D model width, L layers.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gsa.mixers.base import Mixer, Options, State, shrunk
from gsa.mixers.fused import swiglu
from gsa.mixers.norm import RMSNorm
from gsa.mixers.registry import mixer_class
from gsa.mixers.sequences import PackedRows, Padding, Sequences, padding_of, sequences_of
from gsa.mixers.shared import add_shared_parameters, shared_inputs
from gsa.models.config import ModelConfig
from gsa.models.state import ModelState


class SwiGLU(nn.Module):
    """W_down (swish(W_gate x) * W_up x)"""

    def __init__(self, width: int, inner: int):
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))


class AddedSwiGLU(SwiGLU):
    """One that can do more than its own part, in fewer passes over memory."""

    @abstractmethod
    def add_to(self, x: Tensor, norm: RMSNorm) -> Tensor:
        """x + MLP(norm(x))"""


class Block(nn.Module):
    """x + mixer(norm(x)), then x + MLP(norm(x)) if the mixer wants an MLP behind it."""

    def __init__(self, config: ModelConfig, options: Options):
        super().__init__()
        kind = mixer_class(options.mixer)
        self.mixer_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mixer: Mixer = kind(options)
        self.mlp: SwiGLU | None = None
        if kind.with_mlp:
            self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
            self.mlp = SwiGLU(config.hidden_size, config.mlp_width)
        # Names that Hugging Face's gradient_checkpointing_enable() looks for.
        self.gradient_checkpointing = False
        self._gradient_checkpointing_func: Any = checkpoint

    def forward(
        self, x: Tensor, state: State | None, sequences: Sequences, return_state: bool, shared: Tensor | None
    ) -> tuple[Tensor, State | None]:
        if self.gradient_checkpointing and self.training and torch.is_grad_enabled():
            if self._gradient_checkpointing_func is checkpoint:
                return checkpoint(self._run, x, state, sequences, return_state, shared, use_reentrant=False)
            return self._gradient_checkpointing_func(self._run, x, state, sequences, return_state, shared)
        return self._run(x, state, sequences, return_state, shared)

    def _run(
        self, x: Tensor, state: State | None, sequences: Sequences, return_state: bool, shared: Tensor | None
    ) -> tuple[Tensor, State | None]:
        y, state = self.mixer(self.mixer_norm(x), state, sequences=sequences, return_state=return_state, shared=shared)
        x = x + y
        if isinstance(self.mlp, AddedSwiGLU):
            x = self.mlp.add_to(x, self.mlp_norm)
        elif self.mlp is not None:
            x = x + self.mlp(self.mlp_norm(x))
        return x, state


class Blocks(nn.ModuleList):
    """The blocks of a model."""

    def __iter__(self) -> Iterator[Block]:
        return cast("Iterator[Block]", super().__iter__())


class BackboneParts(Protocol):
    """What `build` gives to a module and `run` goes through, beside the parameters that layers share."""

    embeddings: nn.Embedding
    layers: Blocks
    norm: RMSNorm


class Backbone(nn.Module):
    """Tokens [B, T] to features [B, T, D], and the state of every layer."""

    embeddings: nn.Embedding
    layers: Blocks
    norm: RMSNorm

    def __init__(self, config: ModelConfig):
        super().__init__()
        build(self, config)

    def forward(
        self,
        ids: Tensor,
        state: ModelState | None = None,
        *,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        return_state: bool = True,
    ) -> tuple[Tensor, ModelState | None]:
        x = self.embeddings(ids)
        return run(self, x, state, padding_of(mask, x, cu_seqlens, "LM"), cu_seqlens, return_state)


def build(module: BackboneParts, config: ModelConfig) -> None:
    """Gives a module the parts of a backbone."""
    module.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
    module.layers = Blocks(Block(config, options) for options in config.layers)
    module.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
    assert isinstance(module, nn.Module)
    add_shared_parameters(module, config.layers)


def run(
    module: BackboneParts,
    x: Tensor,
    state: ModelState | None,
    packing: Padding | PackedRows | None,
    cu_seqlens: Tensor | None,
    return_state: bool,
    hidden: list[Tensor] | None = None,
) -> tuple[Tensor, ModelState | None]:
    """Embeddings x [B, T, D] through the parts that `build` made; what enters each layer is put into `hidden`."""
    if packing is None:
        sequences = sequences_of(x, cu_seqlens, "LM")
    else:
        x, sequences = packing.pack(x), packing.sequences()
    states: Sequence[State | None] = [None] * len(module.layers) if state is None else state.layers
    assert isinstance(module, nn.Module)
    shared = shared_inputs(module, [block.mixer.options for block in module.layers])
    after: list[State] = []
    for block, before, own in zip(module.layers, states, shared, strict=True):
        if hidden is not None:
            hidden.append(x if packing is None else packing.unpack(x))
            if packing is not None:
                x = packing.pack(hidden[-1])  # through what is handed out, so that it gets its gradient
        if packing is not None:
            before = block.mixer.grown(before, packing.extra)
        x, left = block(x, before, sequences, return_state, own)
        if left is not None:
            after.append(left if packing is None else shrunk(left, packing.rows))
    x = module.norm(x)
    return x if packing is None else packing.unpack(x), ModelState(after) if return_state else None


def state_size(module: BackboneParts) -> int | None:
    """Numbers of recurrent memory per sequence over all layers; None if it grows with the sequence."""
    sizes = [block.mixer.state_size for block in module.layers]
    return None if None in sizes else sum(size for size in sizes if size is not None)
