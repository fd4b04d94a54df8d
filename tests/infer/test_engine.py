"""The engine: every request gives what it gives alone, whatever starts and ends beside it."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from gsa import GSAError
from gsa.infer import Engine, Sampling
from gsa.infer.runner import MAX_READ
from tests.infer.engines import SHORT, engine, larger, loaded, teacher_forced
from tests.models.cases import CASES, VOCABULARY, ids, model
from tests.models.hf_models import every_mixer, tiny_model, tokens
from tests.ops.isas import needs_native


@pytest.mark.parametrize("case", CASES)
def test_greedy_tokens_are_the_likeliest_of_the_whole_text(case):
    lm = model(case)
    prompts = [ids(length, seed=length) for length in (1, 7, 30, 5, 7)]
    for prompt, completion in zip(prompts, Engine(lm, batch_size=3).generate(prompts, SHORT), strict=True):
        assert len(completion.tokens) == 8
        assert completion.tokens == teacher_forced(lm, prompt, completion.tokens)
        assert (completion.reason, completion.prompt_tokens) == ("length", len(prompt))


@every_mixer
def test_greedy_tokens_are_those_of_generate_of_transformers(name, tmp_path):
    theirs = tiny_model(name)
    theirs.save_pretrained(tmp_path)
    prompt = tokens(1, 9)
    expected = theirs.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=12)
    assert (
        Engine(tmp_path).generate(prompt[0], Sampling(max_tokens=12, temperature=0)).tokens == expected[0, 9:].tolist()
    )


def random_requests(count: int, vocabulary: int) -> list[tuple[list[int], Sampling]]:
    chance = random.Random(7)
    requests = []
    for i in range(count):
        length = chance.choice([1, 3, 20, 90, 600]) + chance.randrange(40)
        sampling = Sampling(
            max_tokens=chance.randrange(30),
            stop=tuple(chance.sample(range(vocabulary), chance.choice([0, 3, 6]))),
            temperature=chance.choice([0.0, 0.0, 1.0]),
            top_k=chance.choice([0, 5]),
            seed=i,
            logprobs=0,
        )
        requests.append(([chance.randrange(vocabulary) for _ in range(length)], sampling))
    return requests


def test_two_hundred_requests_that_come_and_go_in_sixteen_places_give_what_each_gives_alone():
    chance, requests = random.Random(8), random_requests(200, 97)
    together, alone = Engine(larger()), Engine(larger(), batch_size=1)
    assert together.batch_size == 16
    generations, waiting, most = [], list(requests), 0
    while waiting or together.busy:
        arriving = [waiting.pop(0) for _ in range(min(len(waiting), chance.choice([0, 0, 1, 5])))]
        generations += [together.submit(*request) for request in arriving]
        most = max(most, len({token.request.id for token in together.step()}))
    assert most == 16
    reasons = set()
    for generation, request in zip(generations, requests, strict=True):
        expected = alone.generate(*request)
        assert (generation.tokens, generation.reason) == (expected.tokens, expected.reason)
        assert generation.logprobs == expected.logprobs
        reasons.add((generation.reason, bool(generation.tokens)))
    assert reasons == {("length", True), ("length", False), ("stop", True), ("stop", False)}


@pytest.mark.parametrize("case", ["gsa, convolved", "abc", "gla", "mamba", "attention", "attention, window", "hybrid"])
def test_requests_of_other_mixers_do_not_disturb_each_other(case):
    requests = random_requests(12, VOCABULARY)
    together = Engine(loaded(case), batch_size=5)
    generations = [together.submit(*request) for request in requests]
    while together.busy:
        together.step()
    alone = Engine(loaded(case), batch_size=1)
    for generation, request in zip(generations, requests, strict=True):
        assert generation.tokens == alone.generate(*request).tokens


@pytest.mark.parametrize(
    "form",
    [
        list,
        tuple,
        np.array,
        torch.tensor,
        lambda x: np.array(x, np.uint16),
        lambda x: torch.tensor(x, dtype=torch.uint8),
    ],
    ids=["list", "tuple", "array", "tensor", "uint16", "uint8"],
)
def test_ids_may_come_in_any_form_and_are_copied(form):
    numbers = ids(20).tolist()
    expected = engine().generate(numbers, SHORT).tokens
    given, one = form(numbers), engine()
    generation = one.submit(given, SHORT)
    if not isinstance(given, tuple):
        given[0] = (given[0] + 1) % VOCABULARY
    while one.busy:
        one.step()
    assert generation.tokens == expected


def test_weights_are_packed_as_asked():
    assert Engine(model("gsa"), weights="int8").model.weights == "int8"
    assert Engine(loaded(), weights="fp32").model is loaded()


def test_one_prompt_gives_a_completion_and_several_give_a_list_with_settings_for_each():
    one = engine()
    alone = one.generate(ids(5), SHORT)
    assert one.generate([ids(5), ids(5).tolist()], SHORT) == [alone, alone]
    first, second = one.generate([ids(5)] * 2, [SHORT, replace(SHORT, max_tokens=3)])
    assert (first, second.tokens) == (alone, alone.tokens[:3])
    for wrong in ([SHORT], [SHORT] * 3, None):
        with pytest.raises(
            GSAError, match=r"^generate: sampling must be a Sampling, or one for each of several prompts"
        ):
            one.generate([ids(5)] * 2, wrong)
    with pytest.raises(GSAError, match=r"^generate: sampling must be a Sampling"):
        one.generate(ids(5), [SHORT])
    with pytest.raises(GSAError, match=r"^generate: there are no ids"):
        one.generate([])
    with pytest.raises(GSAError, match=r"^generate: ids must be in"):
        one.generate([[1], [99]])
    assert not one.busy


def test_a_stop_token_ends_the_text_and_is_not_part_of_it():
    said = Engine(larger()).generate([5, 6], SHORT).tokens
    stop = said[4]
    completion = Engine(larger()).generate([5, 6], replace(SHORT, stop=(stop,)))
    assert (completion.tokens, completion.reason) == (said[: said.index(stop)], "stop")


def test_tokens_are_reported_with_their_log_probabilities():
    lm, prompt = model("gsa"), ids(6)
    streamed = list(Engine(lm).stream(prompt, replace(SHORT, logprobs=3)))
    said = [token.id for token in streamed]
    with torch.no_grad():
        expected = lm(torch.cat([prompt, torch.tensor(said)])[None]).logits[0, 5:-1].log_softmax(-1)
    for token, logprobs in zip(streamed, expected, strict=True):
        assert token.logprob == pytest.approx(float(logprobs[token.id]), abs=1e-4)
        assert [id_ for id_, _ in token.top] == logprobs.argsort(descending=True)[:3].tolist()
    completion = Engine(lm).generate(prompt, replace(SHORT, logprobs=3))
    assert completion.logprobs == [token.logprob for token in streamed]
    assert completion.top == [token.top for token in streamed]


def test_streams_may_be_taken_in_turns_and_lose_no_token():
    one = engine(batch_size=2)
    prompts = [ids(4, seed=i) for i in range(3)]
    expected = [engine().generate(prompt, SHORT).tokens for prompt in prompts]
    streams = [one.stream(prompt, SHORT) for prompt in prompts]
    assert not one.busy  # nothing begins before a token is asked for
    said = [[next(streams[0]).id], [], []]
    for i in (2, 2, 1, 0, 1):
        said[i].append(next(streams[i]).id)
    for i in (1, 2, 0):
        said[i] += [token.id for token in streams[i]]
    assert said == expected
    assert not one.busy


def test_a_long_prompt_is_read_in_pieces_while_others_go_on(monkeypatch):
    one = engine()
    read = []
    runner, reads = one._runner, one._runner.read
    monkeypatch.setattr(runner, "read", lambda ids, *rest: read.append(len(ids)) or reads(ids, *rest))
    runs = one.submit(ids(5), replace(SHORT, max_tokens=99))
    one.step()
    long, others = one.submit(ids(4 * MAX_READ + 9), SHORT), [one.submit(ids(100, seed=i), SHORT) for i in range(8)]
    rounds = 0
    while not long.tokens:
        read.clear()
        assert runs in [token.request for token in one.step()]
        assert sum(read) <= MAX_READ
        rounds += 1
        if rounds == 3:  # the short prompts did not have to wait for the long one
            assert sum(bool(other.tokens) for other in others) >= 5
    assert rounds <= 9


@needs_native
def test_a_step_reads_few_tokens_while_others_write_and_each_prompt_gets_its_turn(monkeypatch):
    one = engine(reading="exact", read_tokens=20)
    read, reads = [], one._runner.read
    monkeypatch.setattr(one._runner, "read", lambda ids, *rest: read.append(len(ids)) or reads(ids, *rest))
    long = one.submit(ids(3 * MAX_READ), SHORT)
    one.step()
    assert sum(read) == MAX_READ  # nobody has to wait for it
    runs = one.submit(ids(5), replace(SHORT, max_tokens=10**6))
    while not runs.tokens:
        one.step()
    shorts = [one.submit(ids(30, seed=seed), SHORT) for seed in range(3)]
    for rounds in range(10**4):
        if long.tokens:
            break
        read.clear()
        assert runs in [token.request for token in one.step()]
        assert sum(read) <= 20
        if rounds == 10:
            assert all(short.tokens for short in shorts)
    runs.cancel()
    while one.busy:
        one.step()
    alone = engine(reading="exact")
    assert long.tokens == alone.generate(ids(3 * MAX_READ), SHORT).tokens
    for seed, short in enumerate(shorts):
        assert short.tokens == alone.generate(ids(30, seed=seed), SHORT).tokens
