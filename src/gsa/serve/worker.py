"""Worker: the one thread that the engine runs in. Requests reach it through a queue, and what they bring goes back to
the event loop they came from, a batch for every step, or for several when there are many answers.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Thread

from gsa.errors import GSAError, OutOfMemory
from gsa.infer.text import Piece, Writing
from gsa.serve.errors import ApiError, EngineFailed

LOG = logging.getLogger("gsa.serve")
MAX_FAILURES = 10
"""Steps that fail one after the other before the worker gives up."""

Event = Piece | GSAError
"""What comes of an answer: pieces, the last with a reason; or an error, which is the last, too."""


class Answer:
    """One answer on its way. `start` submits it to the engine; its events go to `tell`, in the event loop."""

    def __init__(self, start: Callable[[], Writing], tell: Callable[[Event], None]) -> None:
        self.start: Callable[[], Writing] | None = start
        """Until it was submitted: what it holds is of no use then, a prompt with its state among it."""
        self.tell = tell
        self.writing: Writing | None = None
        """Once it was submitted."""
        self.urgent = True
        """Whether its next event goes out at once: the first, and the last."""


class Worker:
    """Steps an engine while there are answers to write.

    `limit` is how many answers there may be at a time, those that wait included. Of the answers that are written, all
    together bring about `events_per_second` at most: an event costs as much as several tokens do, on a core that the
    engine could use, so where many answers are written fast, a client hears of several tokens at a time. First pieces
    and last ones do not wait.
    """

    def __init__(self, step: Callable[[], object], limit: int, events_per_second: float) -> None:
        self.limit = limit
        self.pending = 0
        """Answers that are not done; only the event loop counts."""
        self.draining = False
        """Whether no more answers are taken."""
        self.failure: str | None = None
        """Why it has given up."""
        self._step, self._pace = step, 1 / events_per_second
        self._delivered = 0.0
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._live: list[Answer] = []
        self._events: list[tuple[Answer, Event]] = []
        self._failures = 0
        self._ended = self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = Thread(target=self._run, name="gsa-engine", daemon=True)

    def start(self) -> None:
        """Starts the thread; called in the event loop that answers are for."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def end(self) -> None:
        """Cancels what is left, and tells those who wait for it; the thread ends soon."""
        self.draining = self._closed = True
        self._commands.put(self._end)

    def close(self) -> None:
        """The same, and returns when the thread has ended."""
        self.end()
        if self._thread.is_alive():
            self._thread.join()

    def check(self, more: int) -> None:
        """Raises if there is no room for so many answers more."""
        if self.failure is not None:
            raise ApiError(503, f"the engine has failed: {self.failure}", code="engine_failed")
        if self.draining:
            raise ApiError(503, "the server is about to stop", code="draining", headers={"Retry-After": "10"})
        if more > self.limit:
            raise ApiError(400, f"{more} answers at once were asked for, the server takes {self.limit}")
        if self.pending + more > self.limit:
            raise ApiError(
                429,
                f"the server is full: {self.pending} answers are being written or wait; try again soon",
                code="server_full",
                headers={"Retry-After": "1"},
            )

    def submit(self, *answers: Answer) -> None:
        """Lets the engine write answers, for which `check` has found room."""
        self.pending += len(answers)
        for answer in answers:
            if self._closed and self._loop is not None:  # the thread takes no more commands
                events: list[tuple[Answer, Event]] = [(answer, Piece(reason="cancelled"))]
                self._loop.call_soon(self._tell, events)
                continue
            self._commands.put(lambda answer=answer: self._begin(answer))  # type: ignore[misc]

    def forget(self, answer: Answer) -> None:
        """Tells nobody of it any more: who listened can go, without waiting for Python's collector."""
        answer.tell = lambda _: None

    def cancel(self, answer: Answer) -> None:
        """Ends an answer, if it is not done."""
        self._commands.put(lambda: self._cancel(answer))

    def _run(self) -> None:
        while not self._ended:
            try:
                self._take_commands()
                if self._live:
                    self._advance()
            except Exception as error:  # of this file: without the thread, all clients would wait for ever
                LOG.exception("the thread of the engine failed")
                self._give_up(error)
            self._deliver()

    def _take_commands(self) -> None:
        """Does what was asked for since the last step; waits if there is nothing else to do."""
        if not self._live:
            self._commands.get()()
        with suppress(Empty):
            while not self._ended:
                self._commands.get_nowait()()

    def _advance(self) -> None:
        """One step of the engine. What it raises for want of memory, say, has ended the requests that it concerns."""
        try:
            self._step()
            self._failures = 0
        except Exception as error:
            LOG.exception("a step of the engine failed")
            self._failures += 1
            if self._failures == MAX_FAILURES:
                self._give_up(error)
        for answer in list(self._live):
            self._collect(answer)

    def _give_up(self, error: Exception) -> None:
        """Ends all answers; later ones are refused."""
        self.failure = f"{type(error).__name__}: {error}"
        for answer in list(self._live):
            self._done(answer, EngineFailed(f"the engine has failed: {self.failure}"))

    def _collect(self, answer: Answer) -> None:
        """Takes what there is of an answer by now."""
        assert answer.writing is not None
        try:
            for piece in answer.writing.ready():
                self._events.append((answer, piece))
            if answer.writing.reason is not None:
                self._live.remove(answer)
                answer.urgent = True
        except OutOfMemory as error:
            self._done(answer, error)
        except GSAError as error:  # what is wrong with a request was found before it came here
            self._done(answer, EngineFailed(error))

    def _begin(self, answer: Answer) -> None:
        self._live.append(answer)
        start, answer.start = answer.start, None
        assert start is not None
        try:
            if self.failure is not None:
                raise EngineFailed(f"the engine has failed: {self.failure}")
            answer.writing = start()
        except GSAError as error:
            self._done(answer, error)
        except Exception as error:
            LOG.exception("a request cannot be submitted")
            self._done(answer, EngineFailed(f"the request cannot be submitted: {type(error).__name__}: {error}"))

    def _cancel(self, answer: Answer) -> None:
        if answer in self._live and answer.writing is not None:
            answer.writing.cancel()
            self._collect(answer)

    def _done(self, answer: Answer, error: GSAError) -> None:
        self._live.remove(answer)
        self._events.append((answer, error))
        answer.urgent = True

    def _end(self) -> None:
        with suppress(Empty):  # also those that are still to begin have someone who waits
            while True:
                self._commands.get_nowait()()
        for answer in list(self._live):
            self._cancel(answer)
        self._ended = True

    def _deliver(self) -> None:
        """Hands events to the event loop, all at once: those of all answers if enough time has passed for so many, and
        else those of answers that begin or end."""
        now, streams = time.monotonic(), sum(not answer.urgent for answer in self._live)
        if now - self._delivered >= self._pace * streams:
            events, self._events, self._delivered = self._events, [], now
        else:
            events = [each for each in self._events if each[0].urgent]
            self._events = [each for each in self._events if not each[0].urgent]
        for answer, _ in events:
            answer.urgent = False
        if events and self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                self._loop.call_soon_threadsafe(self._tell, events)

    def _tell(self, events: list[tuple[Answer, Event]]) -> None:
        for answer, event in events:
            if isinstance(event, GSAError) or event.reason is not None:
                self.pending -= 1
            answer.tell(event)
