"""Any requests, in any order, with any marks, salts and states, cut in any way: each gives the bits that it gives alone
to an engine that keeps nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gsa.infer import Engine, Generation, Model, Sampling, State
from gsa.infer.compiled_runner import CompiledRunner
from gsa.infer.runner import Runner
from gsa.infer.torch_runner import TorchRunner
from tests.examples import examples
from tests.infer.states import VOCABULARY, ids, model
from tests.ops.isas import needs_native

TEXTS = [ids(80, seed=seed).tolist() for seed in range(2)]
EXACT = ["gsa", "mamba", "attention", "window", "no window", "hybrid", "window and slots"]
FORMATS = ["fp32", "bf16", "int8", "int4"]


@pytest.fixture(scope="module", autouse=True)
def _small_pieces() -> Iterator[None]:
    """Prompts of some tokens are of several pieces, and these are long enough for the model's forward: above 16 tokens
    what it gives depends on their number."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gsa.infer.reading.MAX_READ", 24)
        patch.setattr("gsa.infer.scheduler.MAX_READ", 24)
        patch.setattr("gsa.infer.compiled_runner.SHORT_READ", 4)
        patch.setattr("gsa.files.sync", lambda _: None)  # which takes most of the time, and no machine goes down here
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
        "length": st.sampled_from([1, 7, 24, 30, 48, 57, 80, 80, 80]),
        "tail": st.just([]) | st.lists(st.integers(0, VOCABULARY - 1), max_size=5),
        "marks": st.lists(st.integers(1, 80), max_size=3),
        "salt": st.sampled_from(["", "", "", "a"]),
        "from_state": st.sampled_from([False, False, True]),
        "logprobs": st.sampled_from([None, None, None, 1]),
        "steps": st.sampled_from([0, 1, 5, 99, 99]),  # until the next one
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
        st.tuples(st.just("submit"), PROMPTS, SAMPLINGS),
        st.tuples(st.just("submit"), PROMPTS, SAMPLINGS),
        st.tuples(st.just("cancel"), st.integers(0, 3)),
        st.tuples(st.just("restart")),
    ),
    min_size=3,
    max_size=12,
)
CACHES = st.sampled_from([6_000, 40_000, 10**8])


class Session:
    """An engine that keeps states, and one that keeps none and reads otherwise."""

    def __init__(self, loaded: Model, folder: str, reading: str, **options: Any) -> None:
        def start() -> Engine:
            return Engine(loaded, reading=reading, state_dir=folder, state_dir_bytes=200_000, **options)

        self._start, self.engine = start, start()
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
        for _ in range(chosen["steps"]):
            self.engine.step()

    def finish(self) -> None:
        while self.engine.busy:
            self.engine.step()

    def restart(self) -> None:
        self.finish()
        self.engine.close()
        self.engine = self._start()

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


def play(actions: list[tuple[Any, ...]], loaded: Model, reading: str, runner: type[Runner], **options: Any) -> None:
    with TemporaryDirectory() as folder:
        session = Session(loaded, folder, reading, **options)
        assert isinstance(session.engine._runner, runner)
        for name, *arguments in actions:
            getattr(session, name)(*arguments)
        session.check()
        session.engine.close()


@needs_native
@examples(100)
@given(
    ACTIONS, st.sampled_from(EXACT), st.sampled_from(FORMATS), CACHES, st.sampled_from([1, 3, 7, 40]), st.integers(1, 4)
)
def test_where_reading_is_exact(actions, name, weights, cache, read_tokens, batch_size):
    options = {"state_cache_bytes": cache, "read_tokens": read_tokens, "batch_size": batch_size}
    play(actions, model(name, weights), "exact", CompiledRunner, **options)


@needs_native
@examples(60)
@given(ACTIONS, st.sampled_from(["gsa", "abc", "attention"]), CACHES, st.integers(1, 4))
def test_where_reading_is_fast(actions, name, cache, batch_size):
    play(actions, model(name), "fast", CompiledRunner, state_cache_bytes=cache, batch_size=batch_size)


@examples(20)
@given(ACTIONS, st.sampled_from(["gsa", "window and slots"]), CACHES)
def test_with_torch(actions, name, cache):
    """One at a time: torch's products depend on how many there are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gsa.infer.runners.obstacle", lambda *_: "a test wants torch")
        play(actions, model(name), "auto", TorchRunner, state_cache_bytes=cache, batch_size=1)
