"""GSACache: what a model remembers, of constant size; it can be forked, reordered and moved, but not taken back."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gsa import GSACache, GSAForCausalLM
from tests.models.hf_models import (
    assert_same,
    every_mixer,
    extended,
    left_padded,
    tiny_model,
    tokens,
    uncached_logits,
)

LENGTHS = [8, 3, 6]


@torch.no_grad()
def read(model: GSAForCausalLM, ids: Tensor, mask: Tensor | None = None) -> GSACache:
    """The cache behind these tokens."""
    return model(ids, attention_mask=mask).past_key_values


@torch.no_grad()
def continued(model: GSAForCausalLM, cache: GSACache, ids: Tensor) -> Tensor:
    """The logits of these tokens behind the ones that the cache knows."""
    return model(ids, past_key_values=cache).logits


def numbers(cache: GSACache) -> list[Tensor]:
    """A copy of every tensor of the state."""
    return [x.clone() for layer in cache.state.layers for x in layer.values()]


def assert_unchanged(cache: GSACache, before: list[Tensor]) -> None:
    for x, y in zip(numbers(cache), before, strict=True):
        assert torch.equal(x, y)


def test_a_cache_counts_tokens_and_has_no_limit() -> None:
    model, cache = tiny_model("hybrid"), GSACache()
    assert (cache.get_seq_length(), cache.batch_size, len(cache), cache.nbytes) == (0, -1, 0, 0)
    assert not cache.is_initialized
    assert not cache.has_previous_state()
    continued(model, cache, tokens(2, 5))
    continued(model, cache, tokens(2, 1))
    assert (cache.get_seq_length(), cache.get_seq_length(1), cache.get_query_offset()) == (6, 6, 6)
    assert (cache.batch_size, len(cache)) == (2, 3)
    assert cache.get_mask_sizes(4, 0) == (10, 0)
    assert cache.get_max_length() == -1
    assert cache.is_initialized
    assert cache.has_previous_state()
    assert not cache.is_croppable
    assert not cache.is_compileable
    assert repr(cache) == f"GSACache(6 tokens, ModelState(2 sequences, 3 layers, {cache.nbytes} bytes))"


def test_pads_are_counted_as_the_mask_counts_them() -> None:
    ids, mask = left_padded(LENGTHS)
    assert read(tiny_model("gsa"), ids, mask).get_seq_length() == 8


@every_mixer
def test_the_sequences_of_a_cache_may_be_reordered_repeated_and_chosen(name: str) -> None:
    model = tiny_model(name)
    ids, mask = left_padded(LENGTHS)
    new = tokens(3, 4)
    text, whole_mask = torch.cat([ids, new], 1), extended(mask, 12)
    expected = uncached_logits(model, text, whole_mask)[:, 8:]
    changes = {
        "reorder_cache": (torch.tensor([2, 0, 1]), [2, 0, 1]),
        "batch_repeat_interleave": (2, [0, 0, 1, 1, 2, 2]),
        "batch_select_indices": (torch.tensor([1, 1, 0]), [1, 1, 0]),
    }
    for change, (argument, rows) in changes.items():
        cache = read(model, ids, mask)
        getattr(cache, change)(argument)
        assert (cache.batch_size, cache.get_seq_length()) == (len(rows), 8)
        # Other tokens than before may follow: those of the row that is there now.
        assert_same(continued(model, cache, new[rows]), expected[rows])


@pytest.mark.parametrize(
    "chosen",
    [
        [0, 2],
        torch.tensor([0, 2]),
        torch.tensor([0, 2], dtype=torch.int32),
        [True, False, True],
        torch.tensor([True, False, True]),
    ],
    ids=["list", "tensor", "int32", "list of bools", "mask"],
)
def test_sequences_are_chosen_by_indices_or_by_a_mask(chosen: list[int] | Tensor) -> None:
    model, ids, new = tiny_model("gsa"), tokens(3, 6), tokens(3, 2)
    cache = read(model, ids)
    cache.batch_select_indices(chosen)
    expected = uncached_logits(model, torch.cat([ids, new], 1))[[0, 2], 6:]
    assert_same(continued(model, cache, new[[0, 2]]), expected)


def test_changes_of_a_cache_that_has_seen_nothing_do_nothing() -> None:
    cache = GSACache()
    cache.reorder_cache(torch.tensor([1, 0]))
    cache.batch_select_indices(torch.tensor([0]))
    cache.batch_repeat_interleave(2)
    cache.reset()
    assert cache.to("meta") is cache
    assert (cache.state, cache.get_seq_length()) == (None, 0)


def test_a_cache_that_is_reset_is_as_new() -> None:
    model, ids = tiny_model("hybrid"), tokens(2, 6)
    cache = read(model, tokens(3, 5))
    cache.reset()
    assert (cache.get_seq_length(), cache.batch_size, cache.nbytes) == (0, -1, 0)
    assert torch.equal(continued(model, cache, ids), continued(model, GSACache(), ids))


@every_mixer
def test_a_cache_moves_to_another_device(name: str) -> None:
    cache = read(tiny_model(name), tokens(2, 6))
    size = cache.nbytes
    assert cache.to("meta") is cache
    assert {x.device.type for layer in cache.state.layers for x in layer.values()} == {"meta"}
    assert (cache.nbytes, cache.batch_size, cache.get_seq_length()) == (size, 2, 6)


@every_mixer
def test_the_size_of_a_cache_does_not_grow_with_the_text(name: str) -> None:
    model = tiny_model(name)
    sizes = []
    for length in (10, 20, 80):
        ids, mask = left_padded([length, length - 3])
        sizes.append([read(model, ids).nbytes, read(model, ids, mask).nbytes])
        cache = GSACache()
        for token in ids.split(1, 1):
            continued(model, cache, token)
        sizes[-1].append(cache.nbytes)
    if name == "attention":  # keys and values of two layers with two heads of width 8, and their counters
        grown = [2 * (2 * 2 * length * 16 * 4 + 2 * 8) for length in (10, 20, 80)]
        assert sizes == [[size] * 3 for size in grown]
    else:
        assert len({size for row in sizes for size in row}) == 1


@every_mixer
def test_what_a_cache_holds_on_to_is_no_more_than_its_state(name: str) -> None:
    """A state that is a view would keep the activations of the whole prompt alive."""
    ids, mask = left_padded([60, 50])
    for cache in (read(tiny_model(name), ids), read(tiny_model(name), ids, mask)):
        storages = {}
        for layer in cache.state.layers:
            for x in layer.values():
                storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        assert sum(storages.values()) <= 2 * cache.nbytes


@every_mixer
@pytest.mark.parametrize(
    "fork",
    [copy.copy, copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))],
    ids=["copy", "deepcopy", "pickle"],
)
def test_a_fork_goes_its_own_way(name: str, fork: Callable[[GSACache], GSACache]) -> None:
    model, ids = tiny_model(name), tokens(2, 6)
    one = read(model, ids)
    other, before = fork(one), numbers(one)
    left, right = tokens(2, 5), tokens(2, 3)
    for token in left.split(1, 1):
        continued(model, one, token)
    assert (one.get_seq_length(), other.get_seq_length()) == (11, 6)
    assert_unchanged(other, before)
    assert_same(continued(model, other, right), uncached_logits(model, torch.cat([ids, right], 1))[:, 6:])
    end = tokens(2, 2)
    assert_same(continued(model, one, end), uncached_logits(model, torch.cat([ids, left, end], 1))[:, 11:])


@every_mixer
def test_generating_from_a_fork_leaves_the_prompt_as_it_was(name: str) -> None:
    model, ids = tiny_model(name), tokens(1, 6)
    prompt = read(model, ids[:, :5])
    before = numbers(prompt)
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 5}
    expected = model.generate(ids, **options)
    for _ in range(2):
        assert torch.equal(model.generate(ids, past_key_values=copy.copy(prompt), **options), expected)
    assert prompt.get_seq_length() == 5
    assert_unchanged(prompt, before)


def test_a_cache_has_no_way_back() -> None:
    cache = read(tiny_model("gsa"), tokens(1, 6))
    before = numbers(cache)
    for tokens_to_remove in (-1, 3):
        with pytest.raises(ValueError, match=r"cannot go back to earlier tokens.*copy the cache"):
            cache.crop(tokens_to_remove)
    with pytest.raises(ValueError, match="cannot go back to earlier tokens"):
        cache.activate_past_recording()
    cache.crop(0)
    assert cache.get_seq_length() == 6
    assert_unchanged(cache, before)


@every_mixer
def test_nothing_leaks_from_a_finished_call_into_the_next(name: str) -> None:
    model, ids = tiny_model(name), tokens(2, 6)
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 5}
    first = model.generate(ids, **options, return_dict_in_generate=True)
    before = numbers(first.past_key_values)
    model.generate(tokens(3, 9), attention_mask=torch.ones(3, 9), max_new_tokens=4, num_beams=2)
    again = model.generate(ids, **options, return_dict_in_generate=True)
    assert torch.equal(again.sequences, first.sequences)
    assert again.past_key_values is not first.past_key_values
    assert first.past_key_values.get_seq_length() == again.past_key_values.get_seq_length() == 10
    assert_unchanged(first.past_key_values, before)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, model(ids).logits)


def test_a_cache_is_made_only_where_one_is_wanted() -> None:
    model, ids = tiny_model("gsa"), tokens(2, 6)
    assert isinstance(model(ids).past_key_values, GSACache)
    assert model(ids, use_cache=False).past_key_values is None
    assert model.train()(ids).past_key_values is None
    assert isinstance(model(ids, use_cache=True).past_key_values, GSACache)
    assert tiny_model("gsa", use_cache=False)(ids).past_key_values is None


def test_without_use_cache_a_given_cache_is_read_and_not_written() -> None:
    model, ids = tiny_model("hybrid"), tokens(2, 9)
    cache = read(model, ids[:, :5])
    before = numbers(cache)
    with torch.no_grad():
        logits = model(ids[:, 5:], past_key_values=cache, use_cache=False).logits
    assert_same(logits, uncached_logits(model, ids)[:, 5:])
    assert cache.get_seq_length() == 5
    assert_unchanged(cache, before)


def test_a_call_that_fails_leaves_the_cache_as_it_was() -> None:
    model, ids = tiny_model("gsa"), tokens(2, 6)
    cache = read(model, ids)
    before = numbers(cache)
    with pytest.raises(ValueError, match=r"input_ids must be in 0\.\.59"):
        continued(model, cache, ids + 60)
    with pytest.raises(ValueError, match="attention_mask"):
        model(ids, attention_mask=torch.ones(2, 3), past_key_values=cache)
    assert cache.get_seq_length() == 6
    assert_unchanged(cache, before)


def test_a_cache_of_another_batch_or_model_is_refused() -> None:
    model, ids = tiny_model("gsa"), tokens(2, 6)
    with pytest.raises(ValueError, match="is of 3 sequences, there are 2"):
        continued(model, read(model, tokens(3, 6)), ids)
    with pytest.raises(ValueError, match="state is of a model with 3 layers, this one has 2"):
        continued(model, read(tiny_model("gsa", num_hidden_layers=3), ids), ids)


@pytest.mark.parametrize(
    ("name", "options"), [("mamba", {}), ("gsa-constant", {}), ("gsa", {"num_slots": 4}), ("gsa", {"conv_size": 4})]
)
def test_a_cache_of_another_mixer_is_refused(name: str, options: dict[str, int]) -> None:
    ids = tokens(2, 6)
    with pytest.raises(ValueError, match="state"):
        continued(tiny_model("gsa"), read(tiny_model(name, **options), ids), ids)


def test_packed_sequences_have_no_cache() -> None:
    model, ids = tiny_model("gsa"), tokens(1, 6)
    borders = torch.tensor([0, 2, 6])
    assert model(ids, cu_seqlens=borders).past_key_values is None
    with pytest.raises(ValueError, match=r"packed sequences .* have no cache"):
        model(ids, cu_seqlens=borders, use_cache=True)
    with pytest.raises(ValueError, match=r"packed sequences .* have no cache"):
        model(ids, cu_seqlens=borders, past_key_values=GSACache())
