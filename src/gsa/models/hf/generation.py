"""What `generate` is told of our models: their cache, and what it cannot do with them."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import GenerationMixin

from gsa.errors import GSAError
from gsa.models.hf.cache import GSACache


class GSAGenerationMixin(GenerationMixin):
    """transformers' `generate` with a GSACache."""

    model: Any
    """Holds the layers."""

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False

    def _prepare_cache_for_generation(  # type: ignore[override]
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        """`generate` gets a cache of ours, before the first token, and no other."""
        if generation_config.is_assistant:
            raise GSAError("GSAForCausalLM: it cannot assist another model: its state cannot take tokens back")
        kind, grows = generation_config.cache_implementation, self.model.state_size is None
        if kind not in (None, "dynamic" if grows else "static"):
            raise GSAError(
                f"GSAForCausalLM: cache_implementation={kind!r}: the cache of this model is its state, which has one "
                f"form (GSACache) and {'grows' if grows else 'does not grow'}"
            )
        given = model_kwargs.get("past_key_values")
        if given is not None and not generation_config.use_cache:
            raise GSAError("GSAForCausalLM: past_key_values with use_cache=False: a cache can only be gone on with")
        if given is None:
            if generation_config.use_cache:
                model_kwargs["past_key_values"] = GSACache()
            return
        prepare: Any = super()._prepare_cache_for_generation  # type: ignore[misc]
        prepare(generation_config, model_kwargs, *args, **kwargs)
        if isinstance(given, GSACache):
            _check_past(given.seen, generation_config, model_kwargs)

    def init_continuous_batching(self, *args: Any, **options: Any) -> Any:
        raise GSAError("GSAForCausalLM: there are no pages of keys and values to batch; the state is a GSACache")

    def prepare_inputs_for_generation(  # type: ignore[override]
        self,
        input_ids: Tensor,
        *,
        inputs_embeds: Tensor | None = None,
        tokenizer: Any = None,
        assistant_tokenizer: Any = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Without tokenizers, with which `generate` finds stop strings and which it then hands on to the model."""
        prepare: Any = super().prepare_inputs_for_generation  # type: ignore[misc]
        return prepare(input_ids, inputs_embeds=inputs_embeds, **kwargs)


def _check_past(seen: int, generation_config: Any, model_kwargs: dict[str, Any]) -> None:
    """Raises where `generate` would take new tokens for the whole text, since no mask tells of the past."""
    mask = model_kwargs.get("attention_mask")
    # A mask that hides nothing is dropped by newer versions of transformers, which then keep its length.
    length = getattr(generation_config, "_mask_length", None) if mask is None else mask.shape[1]
    if length is not None and length <= seen:
        raise GSAError(
            f"GSAForCausalLM: the cache has seen {seen} tokens, attention_mask covers {length}: give the whole text, "
            "earlier tokens included, or the new tokens with an attention_mask over all"
        )
