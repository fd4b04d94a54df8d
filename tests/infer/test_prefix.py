"""Prefixes of earlier prompts save work, change no token, and never take more memory than allowed."""

import pytest
import torch

from gsa.infer import Engine, Sampling
from gsa.infer.prefix import PrefixCache
from gsa.infer.runner import MAX_READ
from gsa.infer.tokens import TokenHash
from gsa.models.state import ModelState
from tests.models.cases import VOCABULARY, ids, model

LOTS = 10**9
FEW = Sampling(max_tokens=6, temperature=1.0, seed=4, logprobs=0)


def filled(cache: PrefixCache, name: bytes, tokens: int, numbers: int = 90) -> None:
    """Puts an entry of 4 * (numbers + 10) bytes into a cache."""
    cache.put(name, tokens, ModelState([{"k": torch.zeros(1, numbers)}]), torch.zeros(10))


def test_the_longest_of_the_known_prefixes_is_found():
    cache = PrefixCache(LOTS)
    filled(cache, b"a", 1)
    filled(cache, b"c", 3)
    assert cache.longest == 3
    assert cache.find([b"a", b"b", b"c", b"d"]).tokens == 3
    assert cache.find([b"a", b"b"]).tokens == 1
    assert cache.find([b"b", b"d"]) is None
    assert cache.find([]) is None


def test_what_was_not_used_for_longest_makes_room():
    cache = PrefixCache(1200)
    for name in (b"a", b"b", b"c"):
        filled(cache, name, 1)
    assert (len(cache), cache.nbytes) == (3, 1200)
    cache.find([b"a"])
    filled(cache, b"d", 2)
    assert cache.find([b"b"]) is None
    assert all(cache.find([name]) for name in (b"a", b"c", b"d"))
    filled(cache, b"e", 5, numbers=190)  # as large as two others
    assert (len(cache), cache.nbytes) == (2, 1200)
    assert cache.find([b"d"])


def test_an_entry_that_is_put_again_counts_once_and_is_new_again():
    cache = PrefixCache(800)
    for name in (b"a", b"b", b"a", b"c"):
        filled(cache, name, 1)
    assert (len(cache), cache.nbytes) == (2, 800)
    assert cache.find([b"b"]) is None


def test_an_entry_larger_than_all_room_is_not_stored_and_removes_nothing():
    cache = PrefixCache(400)
    filled(cache, b"a", 1)
    filled(cache, b"b", 9, numbers=91)
    assert cache.longest == 1
    assert cache.find([b"a"])


def prompts() -> list[torch.Tensor]:
    """Prompts of up to three pieces, most of which begin like another."""
    base, other = ids(3 * MAX_READ), ids(2 * MAX_READ, seed=2)
    return [
        base[:1300],
        base[:1300],
        base[: 2 * MAX_READ],
        base[: 2 * MAX_READ + 1],
        torch.cat([base[:MAX_READ], other[:700]]),
        torch.cat([base[:700], other[:700]]),
        base[: MAX_READ - 1],
        base[:MAX_READ],
        torch.cat([other[:1], base[1:]]),
        torch.cat([base[:-1], other[-1:]]),
    ]


CACHED = [0, 2 * MAX_READ, 2 * MAX_READ, 2 * MAX_READ, MAX_READ, MAX_READ, 0, MAX_READ, 0, 2 * MAX_READ]


@pytest.mark.parametrize("case", ["gsa", "abc", "attention", "hybrid", "mamba"])
def test_tokens_and_their_probabilities_are_the_same_with_and_without(case):
    lm = model(case)
    without, remembering = Engine(lm, batch_size=4), Engine(lm, batch_size=4, prefix_bytes=LOTS)
    for prompt, cached in zip(prompts(), CACHED, strict=True):
        expected, actual = without.generate(prompt, FEW), remembering.generate(prompt, FEW)
        assert (expected.cached_tokens, actual.cached_tokens) == (0, cached)
        assert (actual.tokens, actual.logprobs) == (expected.tokens, expected.logprobs)


def test_prompts_that_are_read_at_the_same_time_share_work(monkeypatch):
    engine = Engine(model("gsa"), prefix_bytes=LOTS)
    read = []
    runner, reads = engine._runner, engine._runner.read
    monkeypatch.setattr(runner, "read", lambda ids, state: read.append(len(ids)) or reads(ids, state))
    completions = engine.generate([ids(3 * MAX_READ)] * 5, FEW)
    assert len({tuple(completion.tokens) for completion in completions}) == 1
    assert sum(read) == 3 * MAX_READ
    assert sum(completion.cached_tokens for completion in completions) == 4 * 3 * MAX_READ


def test_nothing_changes_a_prefix_that_others_went_on_from():
    engine = Engine(model("gsa"), prefix_bytes=LOTS)
    prompt = ids(2 * MAX_READ)
    engine.generate(prompt, FEW)
    digest = TokenHash.advance(TokenHash.EMPTY, prompt)
    prefix = engine.prefixes.find([digest])
    before = [x.clone() for layer in prefix.state.layers for x in layer.values()]
    state = engine.generate([prompt] * 3, FEW, keep_state=True)[0].state
    with torch.inference_mode():
        for x in (x for layer in state.model.layers for x in layer.values()):
            x.fill_(float("nan"))
    after = [x for layer in engine.prefixes.find([digest]).state.layers for x in layer.values()]
    assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))


def test_memory_stays_within_the_limit_and_answers_stay_right():
    lm = model("gsa")
    without = Engine(lm)
    one = without.model.state_bytes + 4 * VOCABULARY
    engine = Engine(lm, prefix_bytes=3 * one + one // 2)
    for prompt in (*prompts(), *prompts()):
        assert engine.generate(prompt, FEW).tokens == without.generate(prompt, FEW).tokens
        assert engine.prefixes.nbytes <= engine.prefixes.limit
    assert len(engine.prefixes) == 3
    first = ids(MAX_READ + 1, seed=8)
    engine.generate(first, FEW)
    assert engine.generate(first, FEW).cached_tokens == MAX_READ
    engine.generate(ids(4 * MAX_READ, seed=9), FEW)
    assert engine.generate(first, FEW).cached_tokens == 0
    small = Engine(lm, prefix_bytes=one - 1)
    small.generate(ids(MAX_READ), FEW)
    assert len(small.prefixes) == 0


def test_a_prompt_behind_a_state_is_not_taken_for_one_that_begins():
    engine, plain = Engine(model("attention"), prefix_bytes=LOTS), Engine(model("attention"))
    state, prompt = plain.read(ids(9)), ids(MAX_READ + 3, seed=5)
    expected = plain.generate(prompt, FEW, state=state).logprobs
    assert engine.generate(prompt, FEW).logprobs != expected
    for _ in range(2):
        completion = engine.generate(prompt, FEW, state=state)
        assert (completion.logprobs, completion.cached_tokens) == (expected, 0)
    assert engine.generate(prompt, FEW).logprobs == plain.generate(prompt, FEW).logprobs
