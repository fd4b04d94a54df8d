"""GSAConfig: ModelConfig's fields as a Hugging Face config, one model type for every mixer."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from transformers import PreTrainedConfig

from gsa import pretrained
from gsa.auto_classes import register_models
from gsa.models.checkpoint import MODEL_TYPE, check_spelling
from gsa.models.config import ModelConfig
from gsa.models.remote import AUTO_MAP, write_module


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
    logits_in_training: bool = False
    """Whether outputs have logits beside the loss while training, which takes the memory of a whole batch of them."""

    def __post_init__(self, **kwargs: Any) -> None:
        check_spelling(kwargs)
        super().__post_init__(**kwargs)
        self.to_model_config()  # checks all fields
        register_models()  # here, since transformers looks models up by the class of their config

    def save_pretrained(self, save_directory: Any, *args: Any, **options: Any) -> None:
        """As in transformers, with the module by which it finds the classes where gsa is not imported."""
        check_spelling(vars(self))
        self.auto_map = {**(getattr(self, "auto_map", None) or {}), **AUTO_MAP}
        super().save_pretrained(save_directory, *args, **options)
        write_module(save_directory)

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = None) -> None:
        """Nothing: folders that are saved carry a module that leads here, not copies of ours."""

    @classmethod
    def get_config_dict(cls, pretrained_model_name_or_path: Any, **options: Any) -> Any:
        """As in transformers, and with the names of models in the package."""
        return super().get_config_dict(pretrained.path_of(pretrained_model_name_or_path), **options)

    def to_model_config(self) -> ModelConfig:
        """The same without what belongs to transformers."""
        return ModelConfig(**{entry.name: getattr(self, entry.name) for entry in fields(ModelConfig)})

    @classmethod
    def from_model_config(cls, config: ModelConfig, **more: Any) -> GSAConfig:
        """A model's config for transformers, with more fields (e.g. eos_token_id) if given."""
        return cls(**config.to_dict(), **more)
