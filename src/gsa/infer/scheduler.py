"""Scheduler: requests in the places of a runner, whatever comes, goes or goes wrong.

A step reads some tokens of the prompts that wait for it, in turns, and then makes one token for every request whose
prompt is read. Shape letters: V vocabulary, N requests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import RLock
from typing import TypeVar

import torch
from torch import Tensor

from gsa.errors import GSAError, memory_errors
from gsa.infer.reading import Prompt
from gsa.infer.requests import Generation, Request, Token
from gsa.infer.runner import MAX_READ, Runner
from gsa.infer.sampling import COMPUTED, choose
from gsa.infer.state import State

NOT_FINITE = "the model's scores are not finite"
Result = TypeVar("Result")


def is_finite(state: State) -> bool:
    """Whether a sequence can go on from a state."""
    return bool(state.logits.isfinite().all())


def _writes(request: Request) -> bool:
    return request.begun and not request.done


class Scheduler:
    """Gives the places to requests in the order in which they come.

    An interruption may come between any two lines, and a signal handler or the garbage collector may cancel there. So
    what changes requests or places goes through `_change`, one at a time; what is to happen meanwhile is noted in a
    single operation, and done at its end; and what was cut off there is finished by the next one.
    """

    def __init__(self, runner: Runner, read_tokens: int = MAX_READ):
        self._runner = runner
        self._read_tokens = read_tokens if runner.exact else max(read_tokens, MAX_READ)  # at least one whole piece
        self._lock = RLock()  # several threads may ask one engine
        self._waiting: deque[Request] = deque()  # it only grows at the end and shrinks at the front
        self._running: dict[int, Request] = {}  # by place
        self._reading: deque[Request] = deque()  # those of the running whose prompt is not read yet, the next one first
        self._changing = False  # whether a change is under way, or was cut off before all was in order again
        self._broken: str | None = None  # why the states of those that run are not to be trusted
        self._cancelled: deque[Generation] = deque()  # to be ended at the end of a change

    @property
    def busy(self) -> bool:
        """Whether a request waits or runs for which somebody waits."""
        with self._lock:
            requests = (*self._running.values(), *self._waiting)
        return any(not request.done and not request.generation.abandoned for request in requests)

    def add(self, *requests: Request) -> None:
        """Lets requests wait for places."""
        self._waiting.extend(requests)

    def step(self) -> list[Token]:
        """The tokens of one round."""
        return self._change("step", self._step)

    def cancel(self, *generations: Generation) -> None:
        """Ends generations that are not done; inside a step (from an `until`, a signal handler, or the garbage
        collector), at its end.

        A step is not done with its requests before: one that is cancelled there might end twice.
        """
        self._cancelled.extend([generation for generation in generations if not generation.done])
        if self._cancelled and not (self._changing and self._inside()):
            self._change("cancel", lambda: None)  # whose end ends them

    def state_of(self, generation: Generation) -> State:
        """The state of a generation that goes on, or was to be kept."""
        what = f"request {generation.id}"
        if generation.kept is not None:
            return generation.kept
        state = None if generation.done else self._change(f"{what}: state", lambda: self._state(generation))
        if generation.error is not None:
            raise generation.error_type(generation.error)
        if generation.done:
            raise GSAError(f"{what}: it is done, and its state was not kept (keep_state)")
        if state is None:
            raise GSAError(f"{what}: its prompt is not read yet, so it has no state")
        if not is_finite(state):
            raise GSAError(f"{what}: {NOT_FINITE}")
        return state

    def _inside(self) -> bool:
        """Whether this thread has the lock."""
        return self._lock._is_owned()  # type: ignore[attr-defined]

    def _change(self, what: str, work: Callable[[], Result]) -> Result:
        """Does what changes requests or places: whatever is raised, no place stays with a state that is half made."""
        inside = self._inside()
        with self._lock, torch.inference_mode():
            if self._changing:
                if inside:
                    raise GSAError(f"{what}: not inside a step; `until` can cancel requests, and no more than that")
                self._settle()  # the change before was interrupted while it did this
            try:
                self._changing, self._broken = True, "the engine was interrupted"
                with memory_errors("engine"):
                    result = work()
                self._broken = None
                return result
            except BaseException as error:
                self._broken = f"the engine was interrupted by {type(error).__name__}: {error}"
                raise
            finally:
                self._settle()

    def _settle(self) -> None:
        """Puts all in order at the end of a change. It can be cut off anywhere and done again."""
        while self._changing:
            if self._broken is not None:
                for request in self._running.values():
                    self._fail(request, self._broken)
            self._broken = "the engine was interrupted"  # a state that is being kept may be half made
            self._end_cancelled()
            self._broken = None
            self._tidy()
            self._changing = False
            self._changing = bool(self._cancelled)  # by something that came after their turn

    def _end_cancelled(self) -> None:
        while self._cancelled:
            generation = self._cancelled[0]
            request = self._found(generation)
            if request is not None:
                self._end(request, "cancelled")
            elif not generation.done:
                generation.reason = "cancelled"
            self._cancelled.popleft()  # last, so that an interruption loses none

    def _tidy(self) -> None:
        """Ends requests that were abandoned, and wipes the places of those that are done."""
        for request in (*self._running.values(), *self._waiting):
            if request.generation.abandoned and not request.done:
                request.generation.reason = "cancelled"
        while self._waiting and self._waiting[0].done:
            self._waiting.popleft()
        self._reading = deque(request for request in self._reading if not request.done)
        for place, request in self._running.items():
            if request.done:
                self._runner.clear(place)
        self._running = {place: request for place, request in self._running.items() if not request.done}

    def _step(self) -> list[Token]:
        self._tidy()  # of those that were abandoned since
        self._admit()
        self._read_prompts()
        return self._decode()

    def _admit(self) -> None:
        """Gives places to requests that wait."""
        while self._waiting and len(self._running) < self._runner.batch_size:
            request = self._waiting[0]
            if not request.done:
                request.place = next(place for place in range(self._runner.batch_size) if place not in self._running)
                self._running[request.place] = request
                self._reading.append(request)
            self._waiting.popleft()  # last, so that an interruption loses none

    def _read_prompts(self) -> None:
        """Reads prompts in turns, so that none keeps the others waiting for long, and only some tokens of them: few
        while others write, whose tokens come no sooner than this is done."""
        most, spent = self._read_tokens, 0
        if not any(map(_writes, self._running.values())):
            most = max(most, MAX_READ)
        while self._reading:
            request = self._reading[0]
            with self._own(request):
                prompt = request.prompt
                assert prompt is not None
                if not prompt.done:
                    if spent >= most or (spent and spent + prompt.piece(most - spent) > most):
                        return
                    spent += prompt.advance(most - spent)
                if prompt.done:
                    self._begin(request, prompt)
            if request.begun or request.done:
                self._reading.popleft()
            else:
                self._reading.rotate(-1)

    def _begin(self, request: Request, prompt: Prompt) -> None:
        """Puts the state after a prompt in its place."""
        assert prompt.state is not None
        self._runner.put(request.place, prompt.state)
        request.logits, request.prompt = prompt.scores, None  # whose state may go now, if no other needs it
        request.generation.cached_tokens = prompt.cached_tokens
        if request.sampler.settings.max_tokens == 0:
            self._end(request, "length")

    def _decode(self) -> list[Token]:
        """One token for every request whose prompt is read."""
        running = [request for request in self._running.values() if _writes(request)]
        last = [(request, request.unread) for request in running if request.unread is not None]
        first = [(request, request.logits) for request in running if request.logits is not None]
        tokens = []
        if last:
            logits = self._runner.step([token for _, token in last], [request.place for request, _ in last])
            tokens += self._continue([request for request, _ in last], logits)
        if first:
            logits = torch.stack([logits for _, logits in first])
            tokens += self._continue([request for request, _ in first], logits)
        return tokens

    def _continue(self, requests: list[Request], logits: Tensor) -> list[Token]:
        """Takes the next token of requests by the scores [N, V]."""
        tokens: list[Token] = []
        ended: list[tuple[Request, str]] = []
        choices = choose(logits, [request.sampler for request in requests])
        for request, choice, scores in zip(requests, choices, logits, strict=True):
            generation, settings = request.generation, request.sampler.settings
            request.unread = request.logits = None
            if choice is None:
                self._fail(request, NOT_FINITE)
            elif isinstance(choice, Exception):
                with self._own(request):
                    raise choice
            elif choice.id in settings.stop:
                request.logits = scores.clone()  # the next step may use their memory again
                ended.append((request, "stop"))
            else:
                request.unread = choice.id
                tokens.append(generation.add(choice))
                if self._says_stop(request, choice.id):
                    ended.append((request, "stop"))
                elif not request.done and len(generation.tokens) == settings.max_tokens:
                    ended.append((request, "length"))
        for request, reason in ended:
            self._end(request, reason)
        return tokens

    def _says_stop(self, request: Request, token: int) -> bool:
        """Whether the `until` of a request ends it; if that raises, the request fails, and no other."""
        if request.until is None:
            return False
        try:
            return request.until(token)
        except Exception as error:
            self._fail(request, f"until raised {type(error).__name__}: {error}")
            return False

    def _end(self, request: Request, reason: str) -> None:
        with self._own(request):
            if request.keep_state and request.begun:
                state = self._snapshot(request)
                if not is_finite(state):
                    raise GSAError(NOT_FINITE)
                request.generation.kept = state
            request.generation.reason = reason
            self._keep(request)  # last: if there is no memory for it, the request is done all the same

    def _keep(self, request: Request) -> None:
        """Keeps the state at the end of an answer for prompts that go on from there. Where the runner is not exact,
        they would be read otherwise than the answer was written."""
        cache = request.source.cache
        if cache is not None and self._runner.exact and request.begun and request.generation.tokens:
            cache.put(request.source.scope, self._snapshot(request))

    @contextmanager
    def _own(self, request: Request) -> Iterator[None]:
        """Around what is computed for one request: if it fails, that one ends with the error, and no other does."""
        try:
            with memory_errors("engine"):
                yield
        except GSAError as error:
            request.generation.error_type = type(error)
            self._fail(request, str(error))
        except COMPUTED as error:
            self._fail(request, f"{type(error).__name__}: {error}")

    def _fail(self, request: Request, message: str) -> None:
        if not request.done:
            request.generation.error = f"request {request.generation.id}: {message}"
            request.generation.reason = "error"

    def _state(self, generation: Generation) -> State | None:
        """The state of a generation that runs, if its prompt is read."""
        request = self._found(generation)
        if request is not None and request.begun:
            with self._own(request):
                return self._snapshot(request)
        return None

    def _snapshot(self, request: Request) -> State:
        """The state of a request after all of its tokens, the last of which may have to be read first."""
        if request.unread is not None:
            request.logits = self._runner.step([request.unread], [request.place])[0].clone()
            request.unread = None
        assert request.logits is not None
        state = self._runner.take(request.place)
        source = request.source
        return source.snapshot(state, request.logits.clone(), len(source.ids), request.generation.tokens)

    def _found(self, generation: Generation) -> Request | None:
        """The request of a generation that runs."""
        running = (request for request in self._running.values() if not request.done)
        return next((request for request in running if request.generation is generation), None)
