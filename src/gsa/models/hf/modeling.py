"""GSAModel and GSAForCausalLM: models of transformers with the same parts as `gsa.LM`, under the same names."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import Cache
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from gsa.errors import GSAError
from gsa.mixers.norm import RMSNorm
from gsa.mixers.sequences import PackedRows, describe
from gsa.models.backbone import Blocks, build, run, state_size
from gsa.models.hf.base import GSAPreTrainedModel
from gsa.models.hf.cache import GSACache
from gsa.models.hf.config import GSAConfig
from gsa.models.hf.generation import GSAGenerationMixin
from gsa.models.hf.outputs import LossOutput
from gsa.models.hf.packing import Packing, Past
from gsa.models.lm import check_ids, check_labels, check_state
from gsa.models.loss import cross_entropy, head_cross_entropy, ignored_at_pads, next_token_labels
from gsa.models.sizes import check_memory


class GSAModel(GSAPreTrainedModel):
    """The model without its head."""

    _keys_to_ignore_on_load_unexpected = [r"^lm_head\."]  # noqa: RUF012  (as transformers declares it)

    embeddings: nn.Embedding
    layers: Blocks
    norm: RMSNorm

    def __init__(self, config: GSAConfig):
        super().__init__(config)
        sizes = config.to_model_config()
        check_memory(sizes, "GSAModel", headless=True)
        build(self, sizes)
        self.norm.handed_out = True  # as last_hidden_state, in fp32 under autocast as that of others' models
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
        position_ids: Tensor | None = None,
        seq_idx: Tensor | None = None,
        cu_seq_lens_q: Tensor | None = None,
        cu_seq_lens_k: Tensor | None = None,
        max_length_q: int | None = None,
        max_length_k: int | None = None,
    ) -> BaseModelOutputWithPast | tuple[Any, ...]:
        """Features of tokens [B, T], or of embeddings.

        `attention_mask` [B, T], or [B, earlier tokens + T], is 0 at pads. The cache that is given, or made, is advanced
        by T tokens.

        Several sequences may lie end to end in a row. Where they begin is told by `cu_seqlens` [N+1] (or the same as
        `cu_seq_lens_q` and `cu_seq_lens_k`), with B = 1; by their numbers `seq_idx` [B, T]; or by `position_ids`
        [B, T], which start again at 0. Positions that do anything else than to count are refused. `max_length_q` and
        `max_length_k`, which come along, say nothing that these do not.
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
        B, T = inputs_embeds.shape[:2]
        given = Packing(cu_seqlens, cu_seq_lens_q, cu_seq_lens_k, seq_idx, position_ids)
        packing, borders = given.resolved(
            inputs_embeds, _last(attention_mask, T), Past.of(past_key_values, use_cache, attention_mask, T)
        )
        several = borders is not None or isinstance(packing, PackedRows)
        if use_cache is None:
            use_cache = past_key_values is not None or (self.config.use_cache and not self.training and not several)
        cache = self._cache(past_key_values, use_cache, several)
        state = None if cache is None else cache.state
        check_state(state, self.layers, B)
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        hidden: list[Tensor] | None = [] if output_hidden_states else None
        x, state = run(self, inputs_embeds, state, packing, borders, cache is not None, hidden)
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

    @property
    def state_size(self) -> int | None:
        """Numbers of recurrent memory per sequence over all layers; None if it grows with the sequence."""
        return state_size(self)

    def _cache(self, given: Cache | None, use_cache: bool, several: bool) -> GSACache | None:
        if given is not None and not isinstance(given, GSACache):
            raise GSAError(f"GSAModel: past_key_values must be a GSACache, got {type(given).__name__}")
        if several and (use_cache or given is not None):
            raise GSAError(
                "GSAModel: packed sequences (cu_seqlens, or position_ids that start again) have no cache here; gsa.LM "
                "carries their states"
            )
        if not use_cache:
            # A state that is given is read all the same, but not written to.
            return None if given is None else GSACache(given.state, given.seen)
        return GSACache() if given is None else given


def _last(mask: Tensor | None, length: int) -> Tensor | None:
    """The part of an attention mask that is about the newest tokens; the state knows of the earlier ones."""
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or mask.dim() != 2 or mask.shape[1] < length:
        raise GSAError(f"GSAModel: attention_mask must be [B, T] with T of at least {length}, got {describe(mask)}")
    return mask[:, mask.shape[1] - length :]


class GSAForCausalLM(GSAPreTrainedModel, GSAGenerationMixin):
    """The language model: loads and saves, generates, trains, as any other in transformers."""

    _tied_weights_keys = {"lm_head.weight": "model.embeddings.weight"}  # noqa: RUF012  (as transformers declares it)

    def __init__(self, config: GSAConfig):
        super().__init__(config)
        check_memory(config.to_model_config(), "GSAForCausalLM")
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
        output_logits: bool | None = None,
        position_ids: Tensor | None = None,
        seq_idx: Tensor | None = None,
        cu_seq_lens_q: Tensor | None = None,
        cu_seq_lens_k: Tensor | None = None,
        max_length_q: int | None = None,
        max_length_k: int | None = None,
        **more: Any,
    ) -> CausalLMOutputWithPast | LossOutput | tuple[Any, ...]:
        """Logits of the last `logits_to_keep` tokens (0: of all), and with labels the loss.

        While training, labels give the loss alone, whose computation never holds the logits of the whole batch;
        `output_logits` (or the config's `logits_in_training`) gives both. The labels are shifted here, unless they come
        as `shift_labels`, and pads do not count; the sum is divided by `num_items_in_batch` if given. How sequences may
        lie in a batch is told at `GSAModel`.
        """
        # Not a parameter by name: the Trainer takes every one with "label" in it for something that a batch must have.
        shift_labels = more.pop("shift_labels", None)
        for name in more:
            raise TypeError(f"GSAForCausalLM.forward() got an unexpected keyword argument {name!r}")
        where = {
            "cu_seqlens": cu_seqlens,
            "cu_seq_lens_q": cu_seq_lens_q,
            "cu_seq_lens_k": cu_seq_lens_k,
            "seq_idx": seq_idx,
            "position_ids": position_ids,
        }
        given = input_ids if input_ids is not None else inputs_embeds
        length = 0 if given is None else given.shape[1]
        past = Past.of(past_key_values, use_cache, attention_mask, length)  # before the call advances the cache
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
            return_dict=True,
            **where,
        )
        x: Tensor = outputs.last_hidden_state
        with_loss = labels is not None or shift_labels is not None
        if output_logits is None:
            output_logits = self.config.logits_in_training
        logits: Any = None
        if output_logits or not (with_loss and self.training):
            kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            logits = self.lm_head(x[:, kept])
        loss: Any = None
        if with_loss:
            packing, borders = Packing(**where).resolved(x, _last(attention_mask, x.shape[1]), past)
            if shift_labels is not None:
                check_labels(shift_labels, x.shape[:2], self.config.vocab_size, "shift_labels")
                targets = ignored_at_pads(shift_labels.to(x.device), packing)
            else:
                check_labels(labels, x.shape[:2], self.config.vocab_size)
                assert labels is not None
                targets = next_token_labels(labels.to(x.device), packing, borders)
            # Those that were chosen by their places may stand in any order, however many they are.
            if logits is not None and isinstance(logits_to_keep, int) and logits.shape[1] == x.shape[1]:
                loss = cross_entropy(logits, targets, count=num_items_in_batch)
            else:
                loss = head_cross_entropy(
                    self.lm_head, x, targets, vocab_size=self.config.vocab_size, count=num_items_in_batch
                )
        rest = {"past_key_values": outputs.past_key_values, "hidden_states": outputs.hidden_states}
        output: CausalLMOutputWithPast | LossOutput
        if logits is None:
            output = LossOutput(loss=loss, **rest)
        else:
            output = CausalLMOutputWithPast(loss=loss, logits=logits, **rest)
        return output if (self.config.return_dict if return_dict is None else return_dict) else output.to_tuple()
