"""GSAModel and GSAForCausalLM: models of transformers with the same parts as `gsa.LM`, under the same names."""

from __future__ import annotations

from typing import Any

from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import Cache, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from gsa.errors import GSAError
from gsa.mixers.norm import RMSNorm
from gsa.mixers.sequences import describe
from gsa.models.backbone import Blocks, build, run
from gsa.models.checkpoint import check_files
from gsa.models.hf.cache import GSACache
from gsa.models.hf.config import GSAConfig
from gsa.models.init import initialise
from gsa.models.lm import check_ids, check_labels, check_state
from gsa.models.loss import linear_cross_entropy, next_token_labels


class GSAPreTrainedModel(PreTrainedModel):
    """What transformers wants to know of both models."""

    config_class = GSAConfig
    config: GSAConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    accepts_loss_kwargs = True
    _input_embed_layer = "embeddings"
    _no_split_modules = ["Block"]  # noqa: RUF012  (here and below: as transformers declares it)
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012
    _is_stateful = True  # no way back to earlier tokens
    _supports_sdpa = True
    _can_compile_fullgraph = True

    def _init_weights(self, module: nn.Module) -> None:
        initialise(module, self.config.initializer_range, self.config.num_hidden_layers)

    def _initialize_weights(self, module: nn.Module, is_custom_code: bool = False) -> None:
        """transformers skips modules of other packages without parameters of their own; ours fill their children's."""
        parameters = list(module.parameters())
        if parameters and all(getattr(p, "_is_hf_initialized", False) for p in parameters):
            module._is_hf_initialized = True  # type: ignore[assignment]
        else:
            super()._initialize_weights(module, False)

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: Any,
        *args: Any,
        output_loading_info: bool = False,
        ignore_mismatched_sizes: bool = False,
        **options: Any,
    ) -> Any:
        """As in transformers; but tensors that are missing, too many or of another shape are errors that name them."""
        path = pretrained_model_name_or_path
        try:
            loaded: Any = super().from_pretrained(
                path, *args, output_loading_info=True, ignore_mismatched_sizes=True, **options
            )
        except SafetensorError as error:
            check_files(path)
            raise GSAError(f"{cls.__name__}: {path}: {error}") from None
        model, info = loaded
        for name, problem in (
            ("missing_keys", "lacks"),
            ("unexpected_keys", "has, but the model has not,"),
            ("mismatched_keys", "has in another shape (name, there, here)"),
        ):
            found = sorted(info[name], key=str)
            if found and not (name == "mismatched_keys" and ignore_mismatched_sizes):
                more = f" and {len(found) - 1} more" if len(found) > 1 else ""
                raise GSAError(f"{cls.__name__}: the checkpoint {path} {problem} {found[0]}{more}")
        return (model, info) if output_loading_info else model


class GSAModel(GSAPreTrainedModel):
    """The model without its head."""

    _keys_to_ignore_on_load_unexpected = [r"^lm_head\."]  # noqa: RUF012

    embeddings: nn.Embedding
    layers: Blocks
    norm: RMSNorm

    def __init__(self, config: GSAConfig):
        super().__init__(config)
        build(self, config.to_model_config())
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> BaseModelOutputWithPast | tuple[Any, ...]:
        """Features of tokens [B, T], or of embeddings.

        `attention_mask` [B, T], or [B, earlier tokens + T], is 0 at pads. With `cu_seqlens` [N+1], B is 1 and sequences
        lie end to end. The cache that is given, or made, is advanced by T tokens.
        """
        if output_attentions:
            raise GSAError("GSAModel: output_attentions: there are no attention matrices to return")
        if (input_ids is None) == (inputs_embeds is None):
            raise GSAError("GSAModel: exactly one of input_ids and inputs_embeds must be given")
        if input_ids is not None:
            check_ids("input_ids", input_ids, self.embeddings.num_embeddings)
            inputs_embeds = self.embeddings(input_ids)
        assert inputs_embeds is not None
        width = self.config.hidden_size
        if inputs_embeds.dim() != 3 or inputs_embeds.shape[2] != width:
            raise GSAError(f"GSAModel: inputs_embeds must be [B, T, {width}], got {list(inputs_embeds.shape)}")
        if use_cache is None:
            use_cache = past_key_values is not None or (
                self.config.use_cache and not self.training and cu_seqlens is None
            )
        cache = self._cache(past_key_values, use_cache, cu_seqlens)
        B, T = inputs_embeds.shape[:2]
        state = None if cache is None else cache.state
        check_state(state, self.layers, B)
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        hidden: list[Tensor] | None = [] if output_hidden_states else None
        mask = _last(attention_mask, T)
        x, state = run(self, inputs_embeds, state, mask, cu_seqlens, cache is not None, hidden)
        if cache is not None and state is not None:
            cache.advance(state, T)
        features: Any = x
        entering: Any = hidden
        output = BaseModelOutputWithPast(
            last_hidden_state=features,
            past_key_values=cache,
            hidden_states=None if hidden is None else (*entering, features),
        )
        return output if (self.config.return_dict if return_dict is None else return_dict) else output.to_tuple()

    def _cache(self, given: Cache | None, use_cache: bool, cu_seqlens: Tensor | None) -> GSACache | None:
        if given is not None and not isinstance(given, GSACache):
            raise GSAError(f"GSAModel: past_key_values must be a GSACache, got {type(given).__name__}")
        if not use_cache:
            # A state that is given is read all the same, but not written to.
            return None if given is None else GSACache(given.state, given.seen)
        if cu_seqlens is not None:
            raise GSAError("GSAModel: packed sequences (cu_seqlens) have no cache here; gsa.LM carries their states")
        return GSACache() if given is None else given


def _last(mask: Tensor | None, length: int) -> Tensor | None:
    """The part of an attention mask that is about the newest tokens; the state knows of the earlier ones."""
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or mask.dim() != 2 or mask.shape[1] < length:
        raise GSAError(f"GSAModel: attention_mask must be [B, T] with T of at least {length}, got {describe(mask)}")
    return mask[:, mask.shape[1] - length :]


class GSAForCausalLM(GSAPreTrainedModel, GenerationMixin):
    """The language model: loads and saves, generates, trains, as any other in transformers."""

    _tied_weights_keys = {"lm_head.weight": "model.embeddings.weight"}  # noqa: RUF012

    def __init__(self, config: GSAConfig):
        super().__init__(config)
        self.model = GSAModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        cu_seqlens: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Logits of the last `logits_to_keep` tokens (0: of all), and with labels the loss.

        While training, labels give the loss alone, whose computation never holds the logits of the whole batch. The
        labels are shifted here, and pads do not count; the sum is divided by `num_items_in_batch` if given.
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
            return_dict=True,
            cu_seqlens=cu_seqlens,
        )
        x: Tensor = outputs.last_hidden_state
        loss: Any = None
        logits: Any = None
        if labels is not None:
            check_labels(labels, x.shape[:2], self.lm_head.weight.shape[0])
            targets = next_token_labels(labels.to(x.device), _last(attention_mask, x.shape[1]), cu_seqlens)
            count = num_items_in_batch
            if isinstance(count, Tensor):
                count = count.to(x.device)
            loss = linear_cross_entropy(x.flatten(0, 1), self.lm_head.weight, targets.flatten(), count=count)
        if labels is None or not self.training:
            kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            logits = self.lm_head(x[:, kept])
        output = CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
        )
        return output if (self.config.return_dict if return_dict is None else return_dict) else output.to_tuple()

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False

    def _prepare_cache_for_generation(  # type: ignore[override]
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        """`generate` gets a cache of ours, before the first token, and no other."""
        if generation_config.is_assistant:
            raise GSAError("GSAForCausalLM: it cannot assist another model: its state cannot take tokens back")
        if generation_config.cache_implementation is not None:
            raise GSAError(
                f"GSAForCausalLM: cache_implementation={generation_config.cache_implementation!r}: the cache of this "
                "model is its state, which has one form (GSACache)"
            )
        given = model_kwargs.get("past_key_values")
        if given is not None and not generation_config.use_cache:
            raise GSAError("GSAForCausalLM: past_key_values with use_cache=False: a cache can only be gone on with")
        prepare: Any = super()._prepare_cache_for_generation  # type: ignore[misc]
        prepare(generation_config, model_kwargs, *args, **kwargs)
        if isinstance(given, GSACache):
            _check_past(given.seen, generation_config, model_kwargs)
        elif given is None and generation_config.use_cache:
            model_kwargs["past_key_values"] = GSACache()

    def init_continuous_batching(self, *args: Any, **options: Any) -> Any:
        raise GSAError("GSAForCausalLM: there are no pages of keys and values to batch; the state is a GSACache")


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
