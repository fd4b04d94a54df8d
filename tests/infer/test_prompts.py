"""Prompts: read once for any number of answers, and told token by token how likely they were."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gsa import GSAError
from gsa.infer import Engine, Sampling
from gsa.infer.runner import MAX_READ
from tests.infer.engines import SHORT, engine, loaded
from tests.models.cases import ids, model

FREE = Sampling(max_tokens=8, temperature=1.0, seed=3, logprobs=0)


def counted(one: Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens an engine reads, piece by piece."""
    read, reads = [], one._runner.read
    monkeypatch.setattr(one._runner, "read", lambda ids, *rest: read.append(len(ids)) or reads(ids, *rest))
    return read


@pytest.mark.parametrize("places", [1, 2, 16])
def test_several_answers_are_those_of_their_seeds_and_the_prompt_is_read_once(monkeypatch, places):
    one, settings = engine(batch_size=places), FREE.several(5)
    expected = [engine().generate(ids(700), own) for own in settings]
    read = counted(one, monkeypatch)
    assert one.generate([one.prompt(ids(700))] * 5, settings) == expected
    assert sum(read) == 700
    assert len({tuple(found.tokens) for found in expected}) == 5


def test_seeds_of_several_answers():
    settings = FREE.several(4)
    assert settings[0] == FREE
    assert len({own.seed for own in settings}) == 4
    assert FREE.several(2) == settings[:2]  # how many there are does not matter
    assert [replace(own, seed=3) for own in settings] == [FREE] * 4
    assert [own.seed for own in replace(FREE, seed=None).several(3)] == [None] * 3
    assert FREE.several(0) == []


def test_an_answer_may_come_long_after_the_others():
    one = engine(batch_size=1)
    prompt = one.prompt(ids(20))
    first = one.generate(prompt, SHORT)
    assert (prompt.done, len(prompt), prompt.cached_tokens) == (True, 20, 0)
    one.generate(ids(30), SHORT)
    assert one.generate(prompt, SHORT) == first
    assert [token.id for token in one.stream(prompt, SHORT)] == first.tokens


def test_one_of_several_answers_is_cancelled_while_the_prompt_is_read():
    one = engine()
    prompt = one.prompt(ids(3 * MAX_READ))
    generations = [one.submit(prompt, own) for own in FREE.several(3)]
    one.step()
    generations[0].cancel()
    while one.busy:
        one.step()
    assert [generation.reason for generation in generations] == ["cancelled", "length", "length"]
    assert generations[1].tokens == engine().generate(ids(3 * MAX_READ), FREE.several(3)[1]).tokens


@pytest.mark.parametrize("reading", ["fast", "exact"])
@pytest.mark.parametrize("count", [1, 2, 40, 700])
def test_log_probabilities_of_a_prompt(count, reading):
    text, one = ids(count), engine(reading=reading)
    prompt = one.prompt(text, logprobs=3)
    assert prompt.logprobs == [None] * count
    done = one.generate(prompt, SHORT)
    assert done == one.generate(text, SHORT)
    with torch.no_grad():
        expected = model("gsa")(text[None]).logits[0].log_softmax(-1)
    assert (len(prompt.logprobs), prompt.logprobs[0], prompt.top[0]) == (count, None, None)
    for i in range(1, count):
        own = expected[i - 1]
        assert prompt.logprobs[i] == pytest.approx(float(own[text[i]]), abs=1e-4)
        assert [logprob for _, logprob in prompt.top[i]] == pytest.approx(own.topk(3).values.tolist(), abs=1e-4)


def test_log_probabilities_behind_a_state_begin_with_the_first_token_and_are_those_of_the_whole():
    one, text = engine(reading="exact", state_cache_bytes=10**8), ids(90)
    whole = one.prompt(text, logprobs=1)
    rest = one.prompt(text[30:], state=one.read(text[:30]), logprobs=1)
    for prompt in (whole, rest):
        one.generate(prompt, SHORT)
        assert prompt.cached_tokens == 0
    assert rest.logprobs == whole.logprobs[30:]
    assert rest.top == whole.top[30:]
    assert one.prompt(text).logprobs is None
    again = one.prompt(text, logprobs=1)  # all of it is known, and none of its scores
    one.generate(again, SHORT)
    assert (again.cached_tokens, again.logprobs) == (0, whole.logprobs)


def test_prompts_that_cannot_be():
    one = engine()
    for options, message in (
        ({"logprobs": -1}, "logprobs must be at least 0"),
        ({"logprobs": 1.5}, "logprobs must be a whole number or none"),
        ({"salt": 3}, "salt must be a name"),
        ({"reuse": 1}, "reuse must be true or false"),
        ({"state": 3}, "state must be a gsa.State, got int"),
    ):
        with pytest.raises(GSAError, match=f"^prompt: {message}"):
            one.prompt(ids(3), **options)
    with pytest.raises(GSAError, match=r"^prompt: there are no ids"):
        one.prompt([])
    with pytest.raises(GSAError, match=r"^submit: the prompt is of another engine"):
        engine().submit(one.prompt([1]))
    with pytest.raises(GSAError, match=r"^submit: a prompt has its state already"):
        one.submit(one.prompt([1]), state=one.read([1]))
    with pytest.raises(GSAError, match=r"^generate: logit_bias has the id 999, the vocabulary ends with"):
        one.generate([1], Sampling(logit_bias={999: 1.0}))


def test_two_engines_in_two_threads_do_not_disturb_each_other():
    from concurrent.futures import ThreadPoolExecutor

    prompts = [ids(length, seed=length) for length in (3, 70, 600)]
    expected = [engine(reading="exact").generate(prompt, FREE) for prompt in prompts]
    engines = [Engine(loaded(), state_cache_bytes=10**6), Engine(loaded(), reading="exact")]
    with ThreadPoolExecutor(2) as pool:
        answers = pool.map(lambda one: [one.generate(prompts, FREE) for _ in range(10)], engines)
        for rounds in answers:
            for found in rounds:
                assert [(each.tokens, each.logprobs) for each in found] == [
                    (each.tokens, each.logprobs) for each in expected
                ]
