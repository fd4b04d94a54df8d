"""States that were kept save work, change no bit, are found by nobody else, and never take more memory than allowed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from gsa import GSAError
from gsa.infer import Completion, Engine, Sampling, State
from gsa.infer.runner import MAX_READ
from gsa.infer.state_cache import StateCache
from gsa.infer.tokens import TokenHash
from gsa.models.state import ModelState
from tests.infer.engines import loaded, tensors
from tests.models.cases import VOCABULARY, ids
from tests.ops.isas import needs_native

LOTS = 10**9
FEW = Sampling(max_tokens=6, temperature=1.0, seed=4, logprobs=2)
OTHER = "f" * 64


def state(tokens: int, digest: bytes, numbers: int = 90) -> State:
    """A state of 4 * (numbers + 10) bytes."""
    return State(
        ModelState([{"k": torch.zeros(1, numbers)}]), torch.zeros(10), tokens, digest.hex() * 32, OTHER, "fp32"
    )


def test_what_was_not_used_for_longest_makes_room():
    cache = StateCache(1200)
    for name in (b"a", b"b", b"c"):
        cache.put("", state(1, name))
    assert (len(cache), cache.nbytes) == (3, 1200)
    assert cache.get("", b"a" * 32, 1)
    cache.put("", state(2, b"d"))
    assert cache.get("", b"b" * 32, 1) is None
    assert all(cache.get("", name * 32, 1) for name in (b"a", b"c", b"d"))
    assert cache.lengths() == [2, 1]
    cache.put("", state(5, b"e", numbers=190))  # as large as two others
    assert (len(cache), cache.nbytes) == (2, 1200)
    assert cache.get("", b"d" * 32, 1)
    assert cache.report().evictions == 3


def test_a_state_that_is_put_again_counts_once_and_is_new_again():
    cache = StateCache(800)
    for name in (b"a", b"b", b"a", b"c"):
        cache.put("", state(1, name))
    assert (len(cache), cache.nbytes) == (2, 800)
    assert cache.get("", b"b" * 32, 1) is None


def test_a_state_larger_than_all_room_is_not_kept_and_removes_nothing():
    cache = StateCache(400)
    cache.put("", state(1, b"a"))
    cache.put("", state(9, b"b", numbers=91))
    assert cache.lengths() == [1]
    assert cache.get("", b"a" * 32, 1)


def test_what_an_interruption_leaves_is_counted(monkeypatch: pytest.MonkeyPatch):
    class Interrupted(OrderedDict[tuple[str, str], object]):
        def popitem(self, last: bool = True) -> object:
            raise KeyboardInterrupt

    cache = StateCache(800)
    for name in (b"a", b"b"):
        cache.put("", state(1, name))
    with monkeypatch.context() as patch:
        patch.setattr(cache, "_held", Interrupted(cache._held))
        with pytest.raises(KeyboardInterrupt):
            cache.put("", state(2, b"c"))
        assert (cache.nbytes, cache.lengths()) == (1200, [2, 1])
    assert (cache.nbytes, cache.lengths()) == (800, [1])
    cache.put("", state(3, b"d"))
    assert (len(cache), cache.nbytes, cache.lengths()) == (2, 800, [3, 1])


def test_scopes_are_apart():
    cache = StateCache(LOTS)
    cache.put("one", state(1, b"a"))
    assert cache.get("", b"a" * 32, 1) is None
    assert cache.get("one", b"a" * 32, 1)


def remembering(case: str = "gsa", **options: object) -> Engine:
    return Engine(loaded(case), **{"state_cache_bytes": LOTS, "batch_size": 4, **options})


def bits(completion: Completion) -> tuple[object, ...]:
    """What a request gives, but for what it was spared."""
    return completion.tokens, completion.logprobs, completion.top, completion.reason


def answer(engine: Engine, prompt: Sequence[int] | torch.Tensor, **options: object) -> Completion:
    """Also checks that the same comes of it without any state that was kept."""
    found = engine.generate(engine.prompt(prompt, **options), FEW)
    given = options.get("state")
    without = engine.generate(engine.prompt(prompt, state=given, reuse=False), FEW)
    assert (bits(found), without.cached_tokens) == (bits(without), 0)
    return found


@needs_native
@pytest.mark.parametrize("case", ["gsa", "gsa, convolved", "attention", "attention, window", "hybrid", "mamba"])
def test_a_prompt_goes_on_from_wherever_another_ended(case):
    engine, text = remembering(case), ids(700)
    first = answer(engine, text[:37])
    assert first.cached_tokens == 0
    assert answer(engine, text[:60]).cached_tokens == 37
    assert answer(engine, text[:37]).cached_tokens == 37
    assert answer(engine, text).cached_tokens == 60
    assert answer(engine, torch.cat([text[:600], text[:20]])).cached_tokens == MAX_READ
    said = [*text[:37].tolist(), *first.tokens]
    assert answer(engine, [*said, 1, 2, 3]).cached_tokens == len(said)
    assert answer(engine, text[1:37]).cached_tokens == 0


@needs_native
def test_marks_are_places_to_go_on_from():
    engine, text = remembering(), ids(100)
    answer(engine, text[:90], marks=[20, 50])
    assert answer(engine, torch.cat([text[:60], text[:9]])).cached_tokens == 50
    assert answer(engine, torch.cat([text[:40], text[:9]])).cached_tokens == 20
    for wrong in (0, 101, 1.0, True):
        with pytest.raises(GSAError, match=r"^prompt: marks must be from 1 to 100"):
            engine.prompt(text, marks=[wrong])
    for wrong in (7, "7", range(3), [1] * 65):
        with pytest.raises(GSAError, match=r"^prompt: marks must be a list of at most 64, got "):
            engine.prompt(text, marks=wrong)


@needs_native
def test_every_turn_of_a_conversation_reads_only_what_is_new():
    engine, said = remembering(), ids(30).tolist()
    for turn in range(4):
        found = answer(engine, said)
        assert found.cached_tokens == (0 if turn == 0 else len(said) - 5)
        said += [*found.tokens, *ids(5, seed=turn).tolist()]
    report = engine.cache.report()
    assert (report.hits, report.misses, report.tokens_reused) == (3, 1, 36 + 47 + 58)


@needs_native
def test_an_answer_that_is_cut_off_is_gone_on_from():
    engine, prompt = remembering(), ids(9).tolist()
    generation = engine.submit(prompt, replace(FEW, max_tokens=99))
    while len(generation.tokens) < 7:
        engine.step()
    generation.cancel()
    assert answer(engine, [*prompt, *generation.tokens, 1]).cached_tokens == 16


def test_states_are_found_under_their_salt_alone():
    engine, prompt = remembering(), ids(MAX_READ)
    assert answer(engine, prompt, salt="mine").cached_tokens == 0
    assert answer(engine, prompt, salt="yours").cached_tokens == 0
    assert answer(engine, prompt).cached_tokens == 0
    assert answer(engine, prompt, salt="mine").cached_tokens == MAX_READ


def test_a_prompt_behind_a_state_goes_on_from_what_came_behind_the_same_numbers():
    engine, prompt = remembering("attention"), ids(MAX_READ + 3, seed=5)
    begun = engine.read(ids(9))
    answer(engine, prompt)
    assert answer(engine, prompt, state=begun).cached_tokens == 0
    assert answer(engine, prompt, state=begun.clone()).cached_tokens == len(prompt)
    # One that says it is of the same tokens, and is not.
    forged = replace(begun, model=begun.model.map(lambda x: x * 2 if x.is_floating_point() else x))
    assert answer(engine, prompt, state=forged).cached_tokens == 0
    assert answer(engine, torch.cat([ids(9), prompt])).cached_tokens == 0


def test_one_who_wants_no_reuse_leaves_nothing():
    engine = remembering()
    engine.generate(engine.prompt(ids(40), reuse=False), FEW)
    engine.read(ids(40))
    assert len(engine.cache) == 0
    assert engine.cache.report().misses == 0


@pytest.mark.parametrize("case", ["gsa", "abc", "hybrid"])
def test_where_reading_is_fast_states_are_found_where_pieces_end(case):
    engine, text, other = remembering(case, reading="fast"), ids(3 * MAX_READ), ids(700, seed=2)
    assert answer(engine, text[:1300], marks=[37]).cached_tokens == 0
    assert answer(engine, text[:1300]).cached_tokens == 1300
    assert answer(engine, text[:1301]).cached_tokens == 2 * MAX_READ
    assert answer(engine, torch.cat([text[:700], other])).cached_tokens == MAX_READ
    assert answer(engine, text[:37]).cached_tokens == 0


def test_reading_is_exact_where_it_can_be_and_states_are_kept():
    assert remembering()._runner.exact
    assert not remembering(state_cache_bytes=0)._runner.exact
    assert not remembering("abc")._runner.exact  # whose normaliser is rounded in a copy
    assert remembering(state_cache_bytes=0, reading="exact")._runner.exact
    with pytest.raises(GSAError, match=r"^engine: reading cannot be exact here: a copy of its state rounds log_z"):
        remembering("abc", reading="exact")
    with pytest.raises(GSAError, match=r"^engine: reading must be one of auto, fast, exact, got 'quick'"):
        remembering(reading="quick")


def test_prompts_that_are_read_at_the_same_time_share_work(monkeypatch):
    engine, read = remembering(), []
    runner, reads = engine._runner, engine._runner.read
    monkeypatch.setattr(runner, "read", lambda ids, *rest: read.append(len(ids)) or reads(ids, *rest))
    completions = engine.generate([ids(3 * MAX_READ)] * 5, FEW)
    assert len({tuple(completion.tokens) for completion in completions}) == 1
    assert sum(read) == 3 * MAX_READ
    assert sum(completion.cached_tokens for completion in completions) == 4 * 3 * MAX_READ


def test_nothing_changes_a_state_that_others_went_on_from():
    engine, prompt = remembering(), ids(2 * MAX_READ)
    kept = engine.generate([prompt] * 3, FEW, keep_state=True)[0].state
    for tokens in (prompt.tolist(), [*prompt.tolist(), *engine.generate(prompt, FEW).tokens]):
        digest = TokenHash.advance(TokenHash.EMPTY, tokens)
        before = engine.cache.get("", digest, 1).clone()
        with torch.inference_mode():
            for x in tensors(kept):
                x.fill_(float("nan"))
        assert all(map(torch.equal, tensors(before), tensors(engine.cache.get("", digest, 1))))


def test_memory_stays_within_the_limit_and_answers_stay_right():
    one = loaded().state_bytes + 4 * VOCABULARY
    engine = remembering(state_cache_bytes=3 * one + one // 2)
    for seed in range(4):
        for prompt in (ids(MAX_READ + 1, seed=seed), ids(40, seed=seed)):
            answer(engine, prompt)
            assert engine.cache.nbytes <= engine.cache.limit
    assert len(engine.cache) == 3
    small = remembering(state_cache_bytes=one - 1)
    small.generate(ids(40), FEW)
    assert len(small.cache) == 0


def test_a_long_prompt_leaves_few_states_and_a_similar_one_reads_little_again(monkeypatch):
    monkeypatch.setattr("gsa.infer.reading.MAX_READ", 2)
    engine, text = remembering(read_tokens=2), ids(400)
    engine.generate(text, replace(FEW, max_tokens=0))
    assert len(engine.cache) == 31 + 16 + 16 + 10  # of 200 pieces
    for length in (9, 64, 65, 130, 200, 399):
        found = answer(engine, torch.cat([text[:length], (text[length : length + 1] + 1) % VOCABULARY])).cached_tokens
        assert length - max(2, length // 16) <= found <= length
