"""`generate` of transformers: with the cache, without it, alone or in a batch, at once or in parts, one answer.

Every way is held against one uncached call over the text that came out.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.generation.streamers import BaseStreamer

from gsa import GSACache, GSAForCausalLM
from tests.models.hf_models import (
    PAD,
    VOCABULARY,
    assert_same,
    every_mixer,
    extended,
    left_padded,
    tiny_model,
    tokens,
    uncached_logits,
)

PROMPTS = [9, 4, 7]  # lengths


def greedy(model: GSAForCausalLM, ids: Tensor, mask: Tensor | None = None, **options: Any) -> Any:
    """Eight tokens more, each the likeliest. The mask is always given: a token that came out may be that of a pad."""
    mask = torch.ones_like(ids) if mask is None else mask
    return model.generate(ids, attention_mask=mask, do_sample=False, **{"max_new_tokens": 8, **options})


@every_mixer
def test_greedy_decoding_takes_the_likeliest_token_of_the_uncached_forward(name: str) -> None:
    model = tiny_model(name)
    ids, mask = left_padded(PROMPTS)
    output = greedy(model, ids, mask, output_logits=True, return_dict_in_generate=True)
    assert torch.equal(output.sequences[:, :9], ids)
    expected = uncached_logits(model, output.sequences, extended(mask, 17))[:, 8:-1]
    assert_same(torch.stack(output.logits, 1), expected)
    assert torch.equal(output.sequences[:, 9:], expected.argmax(-1))
    assert torch.equal(greedy(model, ids, mask, use_cache=False), output.sequences)


@every_mixer
def test_each_row_of_a_padded_batch_is_continued_as_if_it_were_alone(name: str) -> None:
    model = tiny_model(name)
    ids, mask = left_padded(PROMPTS)
    together = greedy(model, ids, mask)
    for row, length in enumerate(PROMPTS):
        alone = greedy(model, ids[row : row + 1, 9 - length :])
        assert torch.equal(together[row, 9 - length :], alone[0])


@every_mixer
def test_sampling_with_a_seed_is_the_same_with_and_without_the_cache(name: str) -> None:
    model = tiny_model(name)
    ids, mask = left_padded(PROMPTS)

    def sampled(seed: int, use_cache: bool) -> Tensor:
        torch.manual_seed(seed)
        return model.generate(
            ids,
            attention_mask=mask,
            do_sample=True,
            top_p=0.95,
            temperature=1.3,
            num_return_sequences=2,
            max_new_tokens=8,
            use_cache=use_cache,
        )

    cached = sampled(1, True)
    assert cached.shape == (6, 17)
    assert torch.equal(cached, sampled(1, False))
    assert not torch.equal(cached, sampled(2, True))


@every_mixer
def test_beam_search_is_the_same_with_and_without_the_cache(name: str) -> None:
    model = tiny_model(name)
    ids, mask = left_padded(PROMPTS)

    def searched(use_cache: bool) -> Any:
        return greedy(
            model,
            ids,
            mask,
            num_beams=4,
            num_return_sequences=3,
            output_scores=True,
            return_dict_in_generate=True,
            use_cache=use_cache,
        )

    cached, uncached = searched(True), searched(False)
    assert torch.equal(cached.sequences, uncached.sequences)
    # The score of a beam is the mean log-probability of what it says.
    logits = uncached_logits(model, cached.sequences, extended(mask, 17).repeat_interleave(3, 0))
    chosen = logits.log_softmax(-1)[:, 8:-1].gather(2, cached.sequences[:, 9:, None])
    assert_same(cached.sequences_scores, chosen.mean((1, 2)))
    assert bool((cached.sequences_scores.view(3, 3).diff() <= 0).all())


def test_beams_that_end_early_are_the_same_with_and_without_the_cache() -> None:
    model = tiny_model("hybrid")
    ids, mask = left_padded(PROMPTS)
    plain = greedy(model, ids, mask, num_beams=3, num_return_sequences=3)
    ends = plain[::3, 11].tolist()
    options = {"num_beams": 3, "num_return_sequences": 3, "eos_token_id": ends, "early_stopping": True}
    ended = greedy(model, ids, mask, **options)
    assert not torch.equal(ended, plain)
    assert torch.equal(ended, greedy(model, ids, mask, **options, use_cache=False))


@every_mixer
def test_sampled_beams_and_guidance_are_the_same_with_and_without_the_cache(name: str) -> None:
    model = tiny_model(name)
    ids, mask = left_padded(PROMPTS)
    for options in ({"num_beams": 3, "do_sample": True}, {"guidance_scale": 1.5, "do_sample": False}):
        outputs = []
        for use_cache in (True, False):
            torch.manual_seed(5)
            options = {**options, "use_cache": use_cache, "max_new_tokens": 6}
            outputs.append(model.generate(ids, attention_mask=mask, **options))
        assert torch.equal(*outputs)


@every_mixer
def test_a_text_in_pieces_of_any_size_has_the_logits_of_the_whole(name: str) -> None:
    model = tiny_model(name)
    ids = tokens(3, 24)
    mask = (torch.rand(3, 24) > 0.25).long()  # pads anywhere
    expected = uncached_logits(model, ids, mask)
    for _ in range(3):
        cache, parts, start = GSACache(), [], 0
        while start < 24:
            end = min(start + int(torch.randint(1, 9, ())), 24)
            # The mask may be about these tokens, or about all tokens so far.
            seen = mask[:, :end] if torch.rand(()) < 0.5 else mask[:, start:end]
            with torch.no_grad():
                output = model(ids[:, start:end], attention_mask=seen, past_key_values=cache)
            assert output.past_key_values is cache
            assert cache.get_seq_length() == end
            parts.append(output.logits)
            start = end
        real = mask.bool()
        assert_same(torch.cat(parts, 1)[real], expected[real])


@every_mixer
def test_a_later_turn_goes_on_from_the_cache_of_an_earlier_one(name: str) -> None:
    model = tiny_model(name)
    ids, mask = left_padded(PROMPTS)
    first = greedy(model, ids, mask, return_dict_in_generate=True)
    assert first.past_key_values.get_seq_length() == 16  # the last token has not been read yet
    text = torch.cat([first.sequences, tokens(3, 3)], 1)
    mask = extended(mask, 20)
    expected = greedy(model, text, mask, use_cache=False)
    assert torch.equal(greedy(model, text, mask, past_key_values=copy.copy(first.past_key_values)), expected)
    # Only what is new, with a mask over everything.
    new = greedy(model, text[:, 16:], mask, past_key_values=copy.copy(first.past_key_values))
    assert torch.equal(new, expected[:, 16:])


@pytest.mark.parametrize("with_mask", [False, True])
def test_new_tokens_without_a_mask_over_the_earlier_ones_go_on_or_are_refused(with_mask: bool) -> None:
    """transformers tells new tokens from the whole text by the mask's length; never may a wrong text come out."""
    model = tiny_model("gsa")
    first = greedy(model, tokens(2, 9), return_dict_in_generate=True)
    text = torch.cat([first.sequences, tokens(2, 3)], 1)
    expected = greedy(model, text)[:, 16:]
    mask = {"attention_mask": torch.ones(2, 4)} if with_mask else {}
    try:
        actual = model.generate(
            text[:, 16:], past_key_values=first.past_key_values, do_sample=False, max_new_tokens=8, **mask
        )
    except ValueError as error:
        assert "attention_mask" in str(error)  # noqa: PT017  (either is right)
    else:
        assert torch.equal(actual, expected)


def test_a_given_cache_without_use_cache_gives_the_same_text_or_is_refused() -> None:
    model = tiny_model("gsa")
    ids = tokens(2, 9)
    with torch.no_grad():
        cache = model(ids[:, :6]).past_key_values
    try:
        actual = greedy(model, ids, past_key_values=cache, use_cache=False)
    except ValueError as error:
        assert "use_cache" in str(error)  # noqa: PT017  (either is right)
    else:
        assert torch.equal(actual, greedy(model, ids))


@every_mixer
def test_a_prompt_may_be_read_in_chunks(name: str) -> None:
    model = tiny_model(name)
    ids, mask = left_padded([11, 3, 7])
    ids, mask = (torch.nn.functional.pad(x, (3, 0)) for x in (ids, mask))  # the first chunk is pads only
    expected = greedy(model, ids, mask)
    for size in (1, 3, 20):
        # transformers changes this setting of torch's compiler when it reads in chunks.
        with torch._dynamo.config.patch(cache_size_limit=torch._dynamo.config.cache_size_limit):
            assert torch.equal(greedy(model, ids, mask, prefill_chunk_size=size), expected)


@every_mixer
def test_embeddings_are_continued_as_their_tokens_are(name: str) -> None:
    model = tiny_model(name)
    ids, mask = left_padded(PROMPTS)
    expected = greedy(model, ids, mask)
    embeddings = model.get_input_embeddings()(ids).detach()
    options = {"attention_mask": mask, "do_sample": False, "max_new_tokens": 8, "inputs_embeds": embeddings}
    assert torch.equal(model.generate(**options), expected[:, 9:])
    assert torch.equal(model.generate(ids, **options), expected)


class Collector(BaseStreamer):
    """Keeps what is streamed."""

    def __init__(self) -> None:
        self.parts: list[Tensor] = []
        self.ended = False

    def put(self, value: Tensor) -> None:
        self.parts.append(value)

    def end(self) -> None:
        self.ended = True


@every_mixer
def test_tokens_are_streamed_as_they_come(name: str) -> None:
    model, streamer = tiny_model(name), Collector()
    ids = tokens(1, 6)
    output = greedy(model, ids, streamer=streamer)
    assert streamer.ended
    prompt, *new = streamer.parts
    assert torch.equal(prompt, ids)
    assert [part.tolist() for part in new] == [[token] for token in output[0, 6:].tolist()]


@every_mixer
def test_a_row_that_ends_is_padded_while_others_go_on(name: str) -> None:
    model = tiny_model(name)
    ids, mask = left_padded(PROMPTS)
    free = greedy(model, ids, mask, max_new_tokens=12)
    end = int(free[1, 12])  # the second row ends within four tokens
    output = greedy(model, ids, mask, max_new_tokens=12, eos_token_id=end)
    lengths = []
    for row in range(3):
        places = (free[row, 9:] == end).nonzero()[:, 0]
        lengths.append(9 + int(places[0]) + 1 if len(places) else 21)
    assert lengths[1] <= 13
    assert output.shape[1] == max(lengths)
    for row, length in enumerate(lengths):
        assert torch.equal(output[row, :length], free[row, :length])
        assert bool((output[row, length:] == PAD).all())


@every_mixer
def test_logits_are_kept_of_as_many_tokens_as_asked(name: str) -> None:
    model = tiny_model(name)
    ids = tokens(2, 9)
    whole = uncached_logits(model, ids)
    with torch.no_grad():
        assert_same(model(ids, logits_to_keep=0).logits, whole)
        assert_same(model(ids, logits_to_keep=3).logits, whole[:, -3:])
        chosen = torch.tensor([1, 4, 8])
        assert_same(model(ids, logits_to_keep=chosen).logits, whole[:, chosen])
        cache = model(ids[:, :5], logits_to_keep=1).past_key_values
        assert_same(model(ids[:, 5:], past_key_values=cache, logits_to_keep=2).logits, whole[:, -2:])


def test_a_text_may_be_generated_from_nothing_but_a_first_token() -> None:
    model = tiny_model("gsa", bos_token_id=1)
    output = model.generate(do_sample=False, max_new_tokens=5)
    assert torch.equal(output, greedy(model, torch.tensor([[1]]), max_new_tokens=5))


def llama() -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=32,
            pad_token_id=PAD,
        )
    ).eval()


@pytest.mark.parametrize(
    "options",
    [
        {"prompt_lookup_num_tokens": 3},
        {"assistant_early_exit": 1},
        {"use_mtp": True},
        {"assistant_model": "gsa"},
        {"assistant_model": "llama"},
    ],
    ids=str,
)
def test_strategies_that_take_tokens_back_are_refused(options: dict[str, Any]) -> None:
    model = tiny_model("gsa")
    assistants = {"gsa": model, "llama": llama()}
    if "assistant_model" in options:
        options = {"assistant_model": assistants[options["assistant_model"]]}
    with pytest.raises(ValueError, match="assisted generation is not supported with stateful models"):
        greedy(model, tokens(1, 6), **options)


def test_assisting_another_model_is_refused_because_guesses_are_taken_back() -> None:
    with pytest.raises(ValueError, match="assist"):
        greedy(llama(), tokens(1, 6), assistant_model=tiny_model("gsa"))


@pytest.mark.parametrize(("name", "own"), [("gsa", "static"), ("window", "static"), ("attention", "dynamic")])
def test_the_cache_may_be_called_what_it_is_and_other_kinds_are_refused_by_name(name: str, own: str) -> None:
    model, ids = tiny_model(name), tokens(1, 6)
    assert torch.equal(greedy(model, ids, cache_implementation=own), greedy(model, ids))
    for kind in {"static", "offloaded_static", "quantized", "offloaded", "dynamic"} - {own}:
        with pytest.raises(ValueError, match=rf"cache_implementation='{kind}'.*GSACache"):
            greedy(model, ids, cache_implementation=kind)


def test_continuous_batching_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("gsa")

    def runs(*_: object, **__: object) -> None:
        pytest.fail("continuous batching, which needs pages of keys and values, has begun")

    monkeypatch.setattr("transformers.generation.ContinuousMixin.init_continuous_batching", runs)
    with pytest.raises(ValueError, match="GSACache"):
        greedy(model, tokens(1, 6), cache_implementation="paged")
    with pytest.raises(ValueError, match="GSACache"):
        model.generate_batch([[1, 2, 3]], max_new_tokens=2)


def test_a_cache_of_another_class_is_refused_by_name() -> None:
    model, ids = tiny_model("gsa"), tokens(1, 6)
    with pytest.raises(ValueError, match="past_key_values must be a GSACache, got DynamicCache"):
        greedy(model, ids, past_key_values=DynamicCache())
    with pytest.raises(ValueError, match="past_key_values must be a GSACache, got DynamicCache"):
        model(ids, past_key_values=DynamicCache())
    with pytest.raises(ValueError, match="past_key_values"):
        greedy(model, ids, past_key_values=((ids, ids),))


def test_attention_matrices_are_refused() -> None:
    model, ids = tiny_model("attention"), tokens(1, 6)
    with pytest.raises(ValueError, match="output_attentions: there are no attention matrices"):
        model(ids, output_attentions=True)
    with pytest.raises(ValueError, match="output_attentions: there are no attention matrices"):
        greedy(model, ids, output_attentions=True, return_dict_in_generate=True)


def test_a_misspelt_argument_of_generate_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="atention_mask"):
        tiny_model("gsa").generate(tokens(1, 6), atention_mask=torch.ones(1, 6), max_new_tokens=2)
