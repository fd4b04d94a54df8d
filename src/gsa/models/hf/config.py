"""GSAConfig: ModelConfig's fields as a Hugging Face config, one model type for every mixer."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from transformers import PreTrainedConfig

from gsa.auto_classes import register_models
from gsa.errors import GSAError
from gsa.mixers.registry import suggestion
from gsa.models.checkpoint import MODEL_TYPE, of_transformers
from gsa.models.config import ModelConfig


class GSAConfig(PreTrainedConfig):
    """A model's config with the fields of `gsa.ModelConfig`, and the ids of special tokens.

    >>> GSAConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=2).to_model_config().mixer
    'gsa'
    """

    model_type = MODEL_TYPE
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012  (as transformers declares it)

    for _field in fields(ModelConfig):
        __annotations__[_field.name] = _field.type
        vars()[_field.name] = _field.default
    del _field

    use_cache: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        for name in kwargs:
            if not of_transformers(name):
                raise GSAError(f"GSAConfig: unknown field {name!r}{suggestion(name, self.__annotations__)}")
        super().__post_init__(**kwargs)
        self.to_model_config()  # checks all fields
        register_models()  # here, since transformers looks models up by the class of their config

    def to_model_config(self) -> ModelConfig:
        """The same without what belongs to transformers."""
        return ModelConfig(**{entry.name: getattr(self, entry.name) for entry in fields(ModelConfig)})

    @classmethod
    def from_model_config(cls, config: ModelConfig, **more: Any) -> GSAConfig:
        """A model's config for transformers, with more fields (e.g. eos_token_id) if given."""
        return cls(**config.to_dict(), **more)
