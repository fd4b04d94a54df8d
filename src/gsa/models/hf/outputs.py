"""What a model returns while it trains."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers.utils.generic import ModelOutput

from gsa.models.hf.cache import GSACache


@dataclass
class LossOutput(ModelOutput):
    """The output of a language model that was asked for its loss and not for logits."""

    loss: Tensor | None = None
    past_key_values: GSACache | None = None
    hidden_states: tuple[Tensor, ...] | None = None

    def __getattr__(self, name: str) -> Any:
        if name == "logits":
            raise AttributeError(
                "GSAForCausalLM: while training, labels give the loss without logits, which would take most of the "
                "memory; ask for them with output_logits=True in the call, or logits_in_training=True in the config"
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
