"""Random requests, often wrong ones, in any order: the tokens of a naive loop, or an error that says why."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from gsa import LM, GSAError
from gsa.infer import Engine, Generation, Model, Sampling
from gsa.infer.sampling import Sampler, choose
from gsa.models import ModelConfig
from tests.examples import examples

VOCABULARY = 11
CONFIG = ModelConfig(
    hidden_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_slots=4,
    intermediate_size=16,
    vocab_size=VOCABULARY,
    initializer_range=0.5,
)


@cache
def lm() -> LM:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        return LM(CONFIG).eval()


@cache
def model() -> Model:
    return Model.load(lm())


@pytest.fixture(scope="module", autouse=True)
def _small_pieces():
    """Prompts of a few tokens are of several pieces."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gsa.infer.reading.MAX_READ", 4)
        patch.setattr("gsa.infer.scheduler.MAX_READ", 4)
        yield


def naive(text: list[int], sampling: Sampling) -> tuple[list[int], str]:
    """The tokens after a text, each from a forward over everything before it, and why there are no more."""
    said, sampler = [], Sampler(sampling, torch.tensor(text), VOCABULARY)
    while len(said) < sampling.max_tokens:
        with torch.no_grad():
            logits = lm()(torch.tensor([text + said])).logits[:, -1]
        (choice,) = choose(logits, [sampler])
        if choice.id in sampling.stop:
            return said, "stop"
        said.append(choice.id)
    return said, "length"


IDS = st.integers(0, VOCABULARY - 1)
PROMPTS = st.lists(IDS, min_size=1, max_size=14)
FORMS = st.sampled_from([list, tuple, np.array, torch.tensor])
WRONG_IDS = st.one_of(
    st.integers(max_value=-1),
    st.integers(min_value=VOCABULARY),
    st.booleans(),
    st.floats(),
    st.none(),
    st.text(max_size=2),
)
WRONG_PROMPTS = st.one_of(
    st.tuples(PROMPTS, WRONG_IDS | PROMPTS, PROMPTS).map(lambda parts: [*parts[0], parts[1], *parts[2]]),
    PROMPTS.map(lambda ids: torch.tensor([ids])),
    PROMPTS.map(lambda ids: np.array(ids, float)),
    PROMPTS.map(lambda ids: torch.tensor(ids) - VOCABULARY),
    PROMPTS.map(lambda ids: [x > 3 for x in ids]),
    st.just([]),
    WRONG_IDS,
)
SETTINGS: dict[str, st.SearchStrategy[Any]] = {
    "max_tokens": st.integers(0, 6),
    "temperature": st.sampled_from([0, 0.0, 1e-9, 0.7, 2.5]),
    "top_k": st.sampled_from([0, 1, 3, 10**6]),
    "top_p": st.sampled_from([0.0, 0.4137, 0.9137, 1, 1.0]),
    "min_p": st.sampled_from([0.0, 0.1379, 1.0]),
    "repetition_penalty": st.sampled_from([0.5, 1, 1.0, 1.7]),
    "presence_penalty": st.sampled_from([-0.5, 0, 1.5]),
    "frequency_penalty": st.sampled_from([-0.25, 0.0, 0.7]),
    "logit_bias": st.dictionaries(IDS, st.sampled_from([-100, 0.3, 2]), max_size=2),
    "seed": st.integers(0, 99),
    "stop": st.lists(IDS, max_size=2).map(tuple),
    "logprobs": st.sampled_from([None, 0, 2, 50]),
}
WRONG_VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=2), st.lists(IDS), st.tuples(st.integers())
)
PLAIN = {"max_tokens": 5, "temperature": 0.0, "top_p": 1.0, "seed": 0}
VALID = st.fixed_dictionaries({}, optional=SETTINGS).map(lambda chosen: {**PLAIN, **chosen})
# Any value for any setting; by chance it may be a right one.
MIXED = st.tuples(VALID, st.sampled_from([*SETTINGS]), WRONG_VALUES).map(lambda parts: {**parts[0], parts[1]: parts[2]})


def fits(chosen: dict[str, Any]) -> bool:
    """Whether settings are right, also for this vocabulary."""
    try:
        sampling = Sampling(**chosen)
        return all(token < VOCABULARY for token in (*sampling.stop, *sampling.logit_bias))
    except GSAError:
        return False


@examples(400)
@given(PROMPTS, FORMS, VALID | MIXED)
def test_a_request_gives_the_tokens_of_a_naive_loop_or_an_error(ids, form, chosen):
    engine = Engine(model(), batch_size=1)
    if not fits(chosen):
        with pytest.raises(GSAError, match=r"^(sampling|generate): .{10}"):
            engine.generate(form(ids), Sampling(**chosen))
        return
    sampling = replace(Sampling(**chosen), max_tokens=min(6, chosen["max_tokens"]))
    assume(sampling.seed is not None or sampling.greedy)
    completion = engine.generate(form(ids), sampling)
    assert (completion.tokens, completion.reason) == naive(ids, sampling)
    assert (completion.logprobs is None) == (sampling.logprobs is None)
    assert completion.logprobs is None or len(completion.logprobs) == len(completion.tokens)


@examples(200)
@given(WRONG_PROMPTS, VALID)
def test_a_prompt_that_is_none_is_refused(ids, chosen):
    engine = Engine(model(), batch_size=1)
    for operation in (engine.submit, engine.stream, engine.generate):
        with pytest.raises(GSAError, match=f"^{operation.__name__}: .{{10}}"):
            operation(ids, Sampling(**chosen))
    with pytest.raises(GSAError, match=r"^read: .{10}"):
        engine.read(ids)
    assert not engine.busy


@dataclass
class Submitted:
    """A request, the text before it, and what it must give in the end."""

    generation: Generation
    text: list[int]
    expected: list[int]
    reason: str
    cancelled: bool = False


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), PROMPTS, VALID),
        st.tuples(st.just("fork"), st.lists(IDS, max_size=6), VALID),
        st.tuples(st.just("wrong"), WRONG_PROMPTS),
        st.tuples(st.just("step"), st.integers(1, 4)),
        st.tuples(st.just("cancel"), st.integers(0, 9)),
        st.tuples(st.just("state"), st.integers(0, 9)),
    ),
    max_size=14,
)


class Session:
    """An engine under random actions, whose results are known."""

    def __init__(self, state_cache_bytes: int):
        self.engine = Engine(model(), batch_size=3, state_cache_bytes=state_cache_bytes)
        self.submitted: list[Submitted] = []
        self.text, self.snapshot = [1, 2, 3], Engine(model()).read([1, 2, 3])

    def submit(self, ids: list[int], chosen: dict[str, Any]) -> None:
        sampling = Sampling(**chosen)
        self.submitted.append(Submitted(self.engine.submit(ids, sampling), ids, *naive(ids, sampling)))

    def fork(self, ids: list[int], chosen: dict[str, Any]) -> None:
        sampling = Sampling(**{**chosen, "repetition_penalty": 1.0})  # a state does not know its tokens
        generation = self.engine.submit(ids, sampling, state=self.snapshot)
        self.submitted.append(Submitted(generation, self.text + ids, *naive(self.text + ids, sampling)))

    def wrong(self, ids: Any) -> None:
        with pytest.raises(GSAError):
            self.engine.submit(ids)

    def step(self, count: int) -> None:
        for _ in range(count):
            self.engine.step()

    def cancel(self, index: int) -> None:
        for request in self.submitted[index : index + 1]:
            request.cancelled = request.cancelled or not request.generation.done
            request.generation.cancel()

    def state(self, index: int) -> None:
        """Later forks go on from what a request has said so far."""
        for request in self.submitted[index : index + 1]:
            if request.generation.tokens and not request.generation.done:
                self.snapshot = request.generation.state()
                self.text = request.text + request.generation.tokens
                assert self.snapshot.tokens == len(self.text)

    def finish(self) -> None:
        for _ in range(200):
            self.engine.step()
        assert not self.engine.busy
        for request in self.submitted:
            generation = request.generation
            if request.cancelled:
                assert generation.reason == "cancelled"
                assert generation.tokens == request.expected[: len(generation.tokens)]
            else:
                assert (generation.tokens, generation.reason) == (request.expected, request.reason)


@examples(150)
@given(ACTIONS, st.sampled_from([0, 700, 10**6]))
def test_any_order_of_actions_gives_every_request_its_own_tokens(actions, state_cache_bytes):
    session = Session(state_cache_bytes)
    for name, *arguments in actions:
        getattr(session, name)(*arguments)
    session.finish()
