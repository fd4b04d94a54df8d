"""Whatever comes in the middle of a step (a cancel, a signal, the garbage collector, an error of one request): every
request ends with its own result or its own error, and the engine goes on."""

from __future__ import annotations

import gc
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import count

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gsa.errors import GSAError, OutOfMemory
from gsa.infer import Engine, Generation, Sampling
from gsa.infer.reading import Prompt, Source
from gsa.infer.runner import MAX_READ
from tests.examples import examples
from tests.infer.engines import SHORT, engine, loaded, tensors
from tests.models.cases import ids

PROMPTS = [ids(length, seed=length).tolist() for length in (5, 6, 7, 70)]
EXPECTED = [engine().generate(prompt, SHORT).tokens for prompt in PROMPTS]
ONES = ("step", "put", "take", "clear", "read")
"""What a step asks of a runner."""


def finish(one: Engine) -> None:
    for _ in range(5000):
        if not one.busy:
            return
        one.step()
    raise AssertionError("it stays busy")


def check_usable(one: Engine) -> None:
    """Whether an engine is as good as a new one."""
    finish(one)
    assert [completion.tokens for completion in one.generate(PROMPTS, SHORT)] == EXPECTED
    assert not one.busy
    assert one.step() == []
    assert (len(one._scheduler._running), len(one._scheduler._waiting)) == (0, 0)


def check_ended(generation: Generation, expected: list[int], *reasons: str) -> None:
    assert generation.reason in reasons
    assert generation.tokens == expected[: len(generation.tokens)]
    assert (generation.error is not None) == (generation.reason == "error")
    assert generation.reason != "length" or generation.tokens == expected


def before(one: Engine, name: str, monkeypatch: pytest.MonkeyPatch, act: Callable[[int], object]) -> None:
    """Lets something happen in the middle of whatever calls a method of the runner; it gets the number of the call."""
    original, calls = getattr(one._runner, name), count()

    def called(*arguments: object) -> object:
        act(next(calls))
        return original(*arguments)

    monkeypatch.setattr(one._runner, name, called)


@contextmanager
def signals(handler: Callable[..., object], first: float, interval: float = 0.0) -> Iterator[None]:
    """An alarm while entered, after some seconds and perhaps again."""
    earlier = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, first, interval)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, earlier)


@pytest.mark.parametrize("how", ["call", "signal", "garbage"])
@pytest.mark.parametrize("where", ONES)
def test_a_cancel_at_any_place_of_a_step_ends_its_own_request_only(where, how, monkeypatch):
    one = engine(batch_size=3)
    victim = one.submit(PROMPTS[0], SHORT, keep_state=True)
    others = [one.submit(prompt, SHORT, keep_state=True) for prompt in PROMPTS[1:]]
    stream = one.stream(PROMPTS[0], SHORT)
    next(stream)
    keeps = [[stream, victim]]
    keeps[0].append(keeps)  # a cycle, which only the garbage collector frees
    streamed = stream.gi_frame.f_locals["generation"]

    def act(call: int) -> None:
        if call != 1:
            return
        if how == "call":
            victim.cancel()
        elif how == "signal":
            with signals(lambda *_: victim.cancel(), 10):
                signal.raise_signal(signal.SIGALRM)
        else:
            keeps.clear()
            gc.collect()

    del stream
    before(one, where, monkeypatch, act)
    if how != "garbage":
        keeps[0][0].close()
        keeps.clear()
        gc.collect()
    finish(one)
    monkeypatch.undo()
    check_ended(victim, EXPECTED[0], "cancelled", "length")
    check_ended(streamed, EXPECTED[0], "cancelled", "length")
    for generation, prompt, expected in zip(others, PROMPTS[1:], EXPECTED[1:], strict=True):
        check_ended(generation, expected, "length")
        alone = engine().generate(prompt, SHORT, keep_state=True).state
        assert generation.kept.digest == alone.digest
        assert all(map(torch.allclose, tensors(generation.kept), tensors(alone)))
    check_usable(one)


@pytest.mark.parametrize("where", ONES)
@pytest.mark.parametrize("calls", [1, 2, 3])
def test_interruptions_one_after_another_end_with_order(where, calls, monkeypatch):
    """The second comes while order is made after the first."""
    one = engine(batch_size=2)
    requests = [one.submit(prompt, SHORT, keep_state=True) for prompt in PROMPTS]
    one.step()
    cancelled = one.submit(PROMPTS[0], SHORT)
    cancelled.cancel()

    def act(call: int) -> None:
        if call < calls:
            raise KeyboardInterrupt

    before(one, "clear", monkeypatch, act)
    before(one, where, monkeypatch, act)
    interrupted = 0
    for _ in range(100):
        try:
            one.step()
        except KeyboardInterrupt:
            interrupted += 1
    assert interrupted
    assert not one.busy
    monkeypatch.undo()
    assert cancelled.reason == "cancelled"
    for generation, expected in zip(requests, EXPECTED, strict=True):
        check_ended(generation, expected, "length", "error")
    check_usable(one)


FAILURES = {
    "its reading": (Prompt, "advance"),
    "its digest": (Source, "snapshot"),
    "its state's way into a place": ("put", None),
    "its state's way out": ("take", None),
    "its sampler": ("sampler", None),
}


@pytest.mark.parametrize("error", [RuntimeError("broken"), MemoryError(), GSAError("refused"), AssertionError()])
@pytest.mark.parametrize("what", FAILURES)
def test_what_fails_for_one_request_fails_it_alone(what, error, monkeypatch):
    one = engine(batch_size=3)
    settings = Sampling(max_tokens=8, temperature=0, repetition_penalty=1.0000001)
    requests = [one.submit(prompt, settings, keep_state=True) for prompt in PROMPTS[:3]]
    where, name = FAILURES[what]

    def fails(*_: object) -> object:
        raise error

    def failing(call: int) -> None:
        if call == 1:
            fails()

    if name is not None:
        calls, original = count(), getattr(where, name)
        monkeypatch.setattr(where, name, lambda *given: failing(next(calls)) or original(*given))
    elif where == "sampler":
        monkeypatch.setattr(one._scheduler._waiting[1].sampler, "took", fails)
    else:
        before(one, where, monkeypatch, failing)
    finish(one)
    failed = [generation for generation in requests if generation.reason == "error"]
    assert len(failed) == 1
    said = {GSAError: "refused", MemoryError: "engine: not enough memory: it cannot be had"}
    told = said.get(type(error), f"{type(error).__name__}: {error}")
    assert failed[0].error == f"request {failed[0].id}: {told}"
    kind = OutOfMemory if isinstance(error, MemoryError) else GSAError
    with pytest.raises(kind):
        failed[0].completion()
    monkeypatch.undo()
    for generation, expected in zip(requests, EXPECTED, strict=False):
        check_ended(generation, expected, "error" if generation in failed else "length")
    check_usable(one)


def test_a_state_that_cannot_be_taken_ends_its_own_request(monkeypatch):
    one = engine(batch_size=2)
    requests = [one.submit(prompt, SHORT) for prompt in PROMPTS[:2]]
    one.step()
    monkeypatch.setattr(one._runner, "take", lambda _: [][0])
    with pytest.raises(GSAError, match=r"^request 0: IndexError: list index out of range$"):
        requests[0].state()
    monkeypatch.undo()
    finish(one)
    check_ended(requests[0], EXPECTED[0], "error")
    check_ended(requests[1], EXPECTED[1], "length")


def test_the_error_of_a_signal_handler_reaches_who_called():
    """It is no request's own, wherever it strikes."""

    def late(*_: object) -> None:
        raise TimeoutError("too late")

    one = engine(batch_size=2)

    def use() -> None:
        while True:
            one.generate(PROMPTS, SHORT)

    for _ in range(10):
        with pytest.raises(TimeoutError, match="too late"), signals(late, 0.002):
            use()
    check_usable(one)


def test_a_signal_handler_may_cancel_all_that_it_likes():
    one, cancelled, seen = engine(batch_size=2), [], set()

    def cancel(*_: object) -> None:
        for generation in cancelled:
            generation.cancel()
        cancelled.clear()

    with signals(cancel, 0.0003, 0.0003):
        for turn in range(60):
            requests = [one.submit(prompt, SHORT, keep_state=bool(turn % 2)) for prompt in PROMPTS]
            cancelled.extend(requests[::2])
            finish(one)
            for index, generation in enumerate(requests):
                check_ended(generation, EXPECTED[index], "length", *(("cancelled",) if index % 2 == 0 else ()))
                seen.add(generation.reason)
    assert seen == {"length", "cancelled"}
    check_usable(one)


DELAYS = st.lists(st.integers(20, 3000), min_size=1, max_size=6)
"""Microseconds until an interruption."""


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # one within a finalizer is lost
@examples(120)
@given(DELAYS, st.integers(1, 3), st.booleans())
def test_an_interruption_at_any_moment_leaves_order(delays, places, keep_state):
    """Ctrl-C, at whichever instruction it strikes: what ran may fail, all ends, and what comes after is right."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    one, submitted = Engine(loaded(), batch_size=places), []

    def use() -> None:
        for index, prompt in enumerate(PROMPTS):
            submitted.append((one.submit(prompt, SHORT, keep_state=keep_state), EXPECTED[index]))
        stream = one.stream(PROMPTS[1], SHORT)
        next(stream)
        submitted[-4][0].cancel()
        stream.close()
        with suppress(GSAError):
            submitted[-1][0].state()
        with suppress(GSAError):  # of an interruption before
            one.generate(PROMPTS[:2], SHORT)

    with torch.inference_mode():  # torch's own way into this mode is not safe from interruptions
        for delay in delays:
            with suppress(KeyboardInterrupt), signals(interrupt, delay / 1e6):
                for _ in range(5):  # and no more: an interruption within a finalizer is lost, as Python has it
                    use()
        finish(one)
        for generation, expected in submitted:
            check_ended(generation, expected, "length", "cancelled", "error")
        check_usable(one)


@examples(40)
@given(
    st.lists(st.sampled_from(["generate", "stream", "drop", "cancel", "raise", "long"]), min_size=4, max_size=16),
    st.integers(1, 3),
)
def test_threads_that_ask_cancel_drop_and_fail_get_their_own(actions, places):
    """While alarms make the garbage collector run in the middle of anything."""
    one = Engine(loaded(), batch_size=places, state_cache_bytes=10**5)
    long = ids(MAX_READ + 3).tolist()
    long_expected = engine().generate(long, SHORT).tokens
    lock = threading.Lock()
    ended: list[tuple[Generation, list[int], tuple[str, ...]]] = []

    def act(numbered: tuple[int, str]) -> None:
        index, action = numbered[0] % len(PROMPTS), numbered[1]
        prompt, expected = PROMPTS[index], EXPECTED[index]
        if action == "generate":
            assert one.generate(prompt, SHORT).tokens == expected
        elif action == "long":
            assert one.generate(long, SHORT).tokens == long_expected
        elif action == "stream":
            assert [token.id for token in one.stream(prompt, SHORT)] == expected
        elif action == "drop":
            stream = one.stream(prompt, SHORT)
            token = next(stream)
            cycle = [stream]
            cycle.append(cycle)
            with lock:
                ended.append((token.request, expected, ("cancelled", "length")))
        elif action == "cancel":
            generation = one.submit(prompt, SHORT, keep_state=True)
            one.step()
            generation.cancel()
            assert generation.done
            with lock:
                ended.append((generation, expected, ("cancelled", "length")))
        else:
            generation = one.submit(prompt, SHORT, until=lambda _: [][0])
            while not generation.done:
                one.step()
            with lock:
                ended.append((generation, expected, ("error",)))

    with signals(lambda *_: gc.collect(0), 0.001, 0.001), ThreadPoolExecutor(3) as pool:
        for _ in pool.map(act, enumerate(actions)):
            pass
    gc.collect()
    finish(one)
    for generation, expected, reasons in ended:
        check_ended(generation, expected, *reasons)
    check_usable(one)
