"""LM: a language model with any mixer.

Shape letters: B batch, T time, D model width, V vocabulary, N sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor, nn

from gsa.errors import GSAError, memory_errors, raised_by
from gsa.mixers.sequences import describe, padding_of, sequence_count
from gsa.models.backbone import Backbone, Blocks, state_size
from gsa.models.config import ModelConfig
from gsa.models.init import initialise
from gsa.models.loss import IGNORED, head_cross_entropy, next_token_labels
from gsa.models.sizes import check_memory
from gsa.models.state import ModelState


@dataclass
class LMOutput:
    """What a model says of a batch."""

    logits: Tensor | None
    """Scores of the next token [B, T, V]; None when labels are given, since the loss is computed in pieces."""
    loss: Tensor | None
    """Mean cross-entropy of the labels, in nats."""
    state: ModelState | None
    """The state after the last token, to go on from; None when labels are given without a state, as in training."""


class LM(nn.Module):
    """A language model.

    >>> model = LM(ModelConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=100))
    >>> ids = torch.randint(100, (1, 10))
    >>> whole = model(ids).logits
    >>> first = model(ids[:, :7])
    >>> rest = model(ids[:, 7:], first.state)
    >>> torch.allclose(torch.cat([first.logits, rest.logits], 1), whole, atol=1e-5)
    True
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        if not isinstance(config, ModelConfig):
            raise GSAError(f"LM: expected a ModelConfig, got {type(config).__name__}")
        check_memory(config, "LM")
        self.config = config
        with memory_errors("LM"):
            self.model = Backbone(config)
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.apply(lambda module: initialise(module, config.initializer_range, config.num_hidden_layers))
        self.tie_weights()

    def tie_weights(self) -> None:
        """Gives the head the embedding's weights, if the config says so."""
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embeddings.weight

    @classmethod
    def from_pretrained(cls, model: str | Path, *, dtype: torch.dtype | None = None) -> LM:
        """A trained model: "gsa-tiny" of the package, a folder, a run of training, or a name of the Hugging Face Hub.

        It has the dtype of its weights unless another is asked for.

        >>> LM.from_pretrained("gsa-tiny").num_parameters
        4590848
        """
        from gsa.models.checkpoint import load_model  # which imports this module

        return load_model(model, dtype=dtype)

    def save_pretrained(self, folder: str | Path) -> None:
        """Writes config.json and weights to a folder, which `from_pretrained` and transformers read."""
        from gsa.models.checkpoint import save_model

        save_model(self, folder)

    def forward(
        self,
        ids: Tensor,
        state: ModelState | None = None,
        *,
        labels: Tensor | None = None,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> LMOutput:
        """Logits of ids [B, T], or with labels [B, T] the loss, and the state after them.

        `state` is that of an earlier output, or None for a beginning. `mask` [B, T] is 0 at pads, wherever they are.
        With `cu_seqlens` [N+1], B is 1 and N sequences lie end to end. Labels are usually the ids themselves: the model
        shifts them by one, within each sequence; -100 does not count, nor do pads.
        """
        self._check(ids, state, labels, cu_seqlens)
        x, after = self.model(
            ids, state, mask=mask, cu_seqlens=cu_seqlens, return_state=state is not None or labels is None
        )
        if labels is None:
            return LMOutput(self.lm_head(x), None, after)
        targets = next_token_labels(labels, padding_of(mask, labels, cu_seqlens, "LM"), cu_seqlens)
        return LMOutput(None, head_cross_entropy(self.lm_head, x, targets, vocab_size=self.config.vocab_size), after)

    def init_state(self, batch_size: int) -> ModelState:
        """The state of so many sequences that have not begun."""
        return ModelState([block.mixer.init_state(batch_size) for block in self.model.layers])

    @property
    def state_size(self) -> int | None:
        """Numbers of recurrent memory per sequence over all layers; None if it grows with the sequence."""
        return state_size(self.model)

    @property
    def num_parameters(self) -> int:
        """Numbers in all parameters, shared ones counted once."""
        return sum(p.numel() for p in self.parameters())

    @property
    def accepts_loss_kwargs(self) -> NoReturn:
        """Asked by transformers' Trainer of every model it is given, which otherwise fails later and less clearly."""
        raise GSAError(
            "LM: transformers' Trainer wants a model of transformers, and GSAForCausalLM is one, with the same "
            "weights: model.save_pretrained(folder), then GSAForCausalLM.from_pretrained(folder)"
        )

    def __dir__(self) -> list[str]:
        """All names but the one that only the Trainer asks for: whoever goes through them meets no error."""
        return [name for name in super().__dir__() if name != "accepts_loss_kwargs"]

    @property
    def gradient_checkpointing(self) -> bool:
        """Whether each block forgets its activations in training and computes them again in the pass backward."""
        return all(block.gradient_checkpointing for block in self.model.layers)

    @gradient_checkpointing.setter
    def gradient_checkpointing(self, on: bool) -> None:
        for block in self.model.layers:
            block.gradient_checkpointing = on

    def _check(self, ids: Tensor, state: ModelState | None, labels: Tensor | None, cu_seqlens: Tensor | None) -> None:
        check_ids("ids", ids, self.config.vocab_size)
        check_state(state, self.model.layers, sequence_count(ids, cu_seqlens, "LM"))
        check_labels(labels, ids.shape, self.config.vocab_size)


def check_ids(name: str, ids: object, vocab_size: int) -> None:
    """Raises unless ids are tokens [B, T] of the vocabulary (their values are read on the CPU only)."""
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.dtype not in (torch.int32, torch.int64):
        raise GSAError(f"LM: {name} must be an int32 or int64 tensor [B, T], got {describe(ids)}")
    if ids.device.type == "cpu" and ids.numel() and not torch.compiler.is_compiling():
        low, high = (int(x) for x in ids.aminmax())
        if low < 0 or high >= vocab_size:
            raise GSAError(f"LM: {name} must be in 0..{vocab_size - 1} (vocab_size {vocab_size}), got {low}..{high}")


def check_labels(labels: object, shape: torch.Size, vocab_size: int, name: str = "labels") -> None:
    """Raises unless labels are tokens of the vocabulary or -100, in the shape of the ids (values as in `check_ids`)."""
    if labels is None:
        return
    if not isinstance(labels, Tensor) or labels.shape != shape or labels.dtype != torch.int64:
        raise GSAError(f"LM: {name} must be int64 in the shape of ids {list(shape)}, got {describe(labels)}")
    if labels.device.type == "cpu" and not torch.compiler.is_compiling():
        wrong = labels[(labels != IGNORED) & ((labels < 0) | (labels >= vocab_size))]
        if wrong.numel():
            raise GSAError(f"LM: {name} must be in 0..{vocab_size - 1}, or {IGNORED}, got {int(wrong[0])}")


def check_state(state: object, layers: Blocks, sequences: int) -> None:
    """Raises unless this is a state of a model with these layers for so many sequences; compiled code trusts it."""
    if state is None or torch.compiler.is_compiling():
        return
    if not isinstance(state, ModelState):
        raise GSAError(f"LM: state must be a ModelState, got {type(state).__name__}")
    if len(state.layers) != len(layers):
        raise GSAError(f"LM: state is of a model with {len(state.layers)} layers, this one has {len(layers)}")
    for i, (block, layer) in enumerate(zip(layers, state.layers, strict=True)):
        with raised_by(f"LM: layer {i}"):
            block.mixer.check_state(layer, sequences)
