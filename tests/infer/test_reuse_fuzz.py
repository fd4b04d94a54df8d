"""Any requests, in any order, with any marks, salts and states, cut in any way: each gives the bits that it gives alone
to an engine that keeps nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gsa.infer import Engine, Generation, Model, Sampling, State
from gsa.infer.torch_runner import TorchRunner
from tests.examples import examples
from tests.infer.states import VOCABULARY, ids, model
from tests.ops.isas import needs_native

TEXTS = [ids(60, seed=seed).tolist() for seed in range(2)]
EXACT = ["gsa", "mamba", "attention", "window", "no window", "hybrid", "window and slots"]
FORMATS = ["fp32", "bf16", "int8", "int4"]


@pytest.fixture(scope="module", autouse=True)
def _small_pieces() -> Iterator[None]:
    """Prompts of a few tokens are of several pieces."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gsa.infer.reading.MAX_READ", 8)
        patch.setattr("gsa.infer.scheduler.MAX_READ", 8)
        yield


@dataclass
class Asked:
    """A request, and all that is needed to ask for it again."""

    prompt: list[int]
    sampling: Sampling
    state: State | None
    generation: Generation

    @property
    def said(self) -> list[int]:
        return self.prompt + self.generation.tokens


PROMPTS = st.fixed_dictionaries(
    {
        "base": st.integers(0, 3),  # a text, or what an earlier request has read and said
        "length": st.integers(1, 60),
        "tail": st.lists(st.integers(0, VOCABULARY - 1), max_size=5),
        "marks": st.lists(st.integers(1, 60), max_size=3),
        "salt": st.sampled_from(["", "", "a", "b"]),
        "from_state": st.booleans(),
        "logprobs": st.sampled_from([None, None, None, 1]),
    }
)
SAMPLINGS = st.builds(
    Sampling,
    max_tokens=st.integers(0, 12),
    temperature=st.sampled_from([0.0, 1.0]),
    seed=st.integers(0, 3),
    stop=st.lists(st.integers(0, VOCABULARY - 1), max_size=2).map(tuple),
    logprobs=st.just(1),
)
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), PROMPTS, SAMPLINGS),
        st.tuples(st.just("step"), st.integers(1, 9)),
        st.tuples(st.just("finish")),
        st.tuples(st.just("cancel"), st.integers(0, 3)),
    ),
    min_size=3,
    max_size=16,
)
CACHES = st.sampled_from([6_000, 40_000, 10**8])


class Session:
    """An engine that keeps states, and one that keeps none and reads otherwise."""

    def __init__(self, loaded: Model, cache: int, read_tokens: int, batch_size: int, reading: str) -> None:
        options: dict[str, Any] = {"reading": reading, "batch_size": batch_size}
        self.engine = Engine(loaded, state_cache_bytes=cache, read_tokens=read_tokens, **options)
        self.alone = Engine(loaded, reading=reading, batch_size=1)
        self.asked: list[Asked] = []

    def submit(self, chosen: dict[str, Any], sampling: Sampling) -> None:
        base = [*TEXTS, *(asked.said for asked in self.asked[-2:])]
        prompt = base[chosen["base"] % len(base)][: chosen["length"]] + chosen["tail"]
        state = None
        if chosen["from_state"] and len(prompt) > 1:
            half = len(prompt) // 2
            state, prompt = self.alone.read(prompt[:half]), prompt[half:]
        marks = [mark for mark in chosen["marks"] if mark <= len(prompt)]
        read = self.engine.prompt(prompt, state=state, marks=marks, salt=chosen["salt"], logprobs=chosen["logprobs"])
        self.asked.append(Asked(prompt, sampling, state, self.engine.submit(read, sampling, keep_state=True)))

    def step(self, count: int) -> None:
        for _ in range(count):
            self.engine.step()

    def finish(self) -> None:
        while self.engine.busy:
            self.engine.step()

    def cancel(self, index: int) -> None:
        for asked in self.asked[-1 - index :][:1]:
            asked.generation.cancel()

    def check(self) -> None:
        self.finish()
        assert self.engine.cache.nbytes <= self.engine.cache.limit
        for asked in self.asked:
            found = asked.generation
            expected = self.alone.generate(asked.prompt, asked.sampling, state=asked.state, keep_state=True)
            count = len(found.tokens)
            assert (found.tokens, found.logprobs) == (expected.tokens[:count], expected.logprobs[:count])
            if found.reason != "cancelled":
                assert found.reason == expected.reason
                assert found.kept.content() == expected.state.content()


def played(actions: list[tuple[Any, ...]], session: Session) -> None:
    for name, *arguments in actions:
        getattr(session, name)(*arguments)
    session.check()


@needs_native
@examples(400)
@given(
    ACTIONS, st.sampled_from(EXACT), st.sampled_from(FORMATS), CACHES, st.sampled_from([1, 3, 7, 40]), st.integers(1, 4)
)
def test_the_same_bits_whatever_was_kept_where_reading_is_exact(actions, name, weights, cache, read_tokens, batch_size):
    played(actions, Session(model(name, weights), cache, read_tokens, batch_size, "exact"))


@examples(120)
@given(ACTIONS, st.sampled_from(["gsa", "abc", "attention"]), CACHES, st.integers(1, 4))
def test_the_same_bits_whatever_was_kept_where_reading_is_fast(actions, name, cache, batch_size):
    played(actions, Session(model(name), cache, 3, batch_size, "fast"))


@examples(30)
@given(ACTIONS, st.sampled_from(["gsa", "window and slots"]), CACHES)
def test_the_same_bits_whatever_was_kept_with_torch(actions, name, cache):
    """One at a time: torch's products depend on how many there are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gsa.infer.runners.obstacle", lambda *_: "a test wants torch")
        session = Session(model(name), cache, 3, 1, "auto")
        assert isinstance(session.engine._runner, TorchRunner)
        played(actions, session)
