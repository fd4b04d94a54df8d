"""Asking: the answers to one request of a client, in one stream of events, which end with the client."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from types import TracebackType
from typing import TypeVar

from starlette.requests import Request

from gsa.errors import GSAError
from gsa.infer.requests import Generation
from gsa.infer.text import Piece, Writing
from gsa.serve.errors import ApiError, ClientLeft
from gsa.serve.metrics import Metrics
from gsa.serve.worker import Answer, Event, Worker

Result = TypeVar("Result")
Start = Callable[[], Writing]
PING_SECONDS = 10.0
"""After so long without a piece, who waits is told that there is none yet."""


class Asking:
    """The answers of one request; use it as a context, which cancels those that are not done at its end.

    async with Asking(worker, metrics, starts) as asking:
        async for pieces in asking.batches():
            ...
    """

    def __init__(self, worker: Worker, metrics: Metrics, starts: Sequence[Start]) -> None:
        worker.check(len(starts))
        self._worker, self._metrics = worker, metrics
        self._answers = [Answer(start, self._hearer(index)) for index, start in enumerate(starts)]
        self._heard: list[tuple[int, Event]] = []
        self._wake = asyncio.Event()
        self._left = len(starts)
        self._begun = time.perf_counter()
        self._last = [0.0] * len(starts)

    def _hearer(self, index: int) -> Callable[[Event], None]:
        def hear(event: Event) -> None:
            self._heard.append((index, event))
            self._wake.set()

        return hear

    async def __aenter__(self) -> Asking:
        self._worker.submit(*self._answers)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._left:
            self._metrics.answers.labels("cancelled").inc(self._left)
            for answer in self._answers:
                self._worker.cancel(answer)
        for answer in self._answers:
            self._worker.forget(answer)

    async def batches(self, patience: float = PING_SECONDS) -> AsyncGenerator[list[tuple[int, Piece]], None]:
        """The pieces of all answers as they come, each with the number of its answer; all that there are at a time, so
        that who is slow gets fewer and larger ones.

        A batch is empty if nothing came for so many seconds. An answer that fails raises its error.
        """
        with _Alarm(self._wake.set, patience) as alarm:
            while self._left:
                await self._wake.wait()
                self._wake.clear()
                alarm.since = time.monotonic()
                heard, self._heard = self._heard, []
                pieces: list[tuple[int, Piece]] = []
                for index, event in heard:
                    if isinstance(event, GSAError):
                        raise event
                    self._measure(index, event)
                    pieces.append((index, event))
                yield pieces

    def generation(self, index: int) -> Generation:
        """What is known of an answer that has begun."""
        writing = self._answers[index].writing
        assert writing is not None
        return writing.generation

    def _measure(self, index: int, piece: Piece) -> None:
        now = time.perf_counter()
        if piece.token is not None:
            if self._last[index]:
                self._metrics.between_tokens.observe(now - self._last[index])
            else:
                self._metrics.first_token.observe(now - self._begun)
            self._last[index] = now
        if piece.reason is not None:
            self._left -= 1
            if piece.reason == "cancelled":
                raise ApiError(503, "the server stopped before the answer was complete", code="draining")
            self._metrics.finished(self.generation(index))


class _Alarm:
    """Rings whenever so many seconds have passed since `since`, which may be moved on. One timer does for many waits:
    to set one for each would be a good part of the work of sending a token."""

    def __init__(self, ring: Callable[[], None], seconds: float) -> None:
        self.since = time.monotonic()
        self._ring, self._seconds = ring, seconds
        self._wait(seconds)

    def __enter__(self) -> _Alarm:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()

    def _wait(self, seconds: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(seconds, self._check)

    def _check(self) -> None:
        left = self.since + self._seconds - time.monotonic()
        if left <= 0:
            self._ring()
        self._wait(left if left > 0 else self._seconds)


async def unless_left(request: Request, work: Awaitable[Result]) -> Result:
    """The result of some work, which is given up when the client leaves."""
    task, left = asyncio.ensure_future(work), asyncio.ensure_future(_left(request))
    try:
        await asyncio.wait({task, left}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientLeft
    finally:
        for each in (task, left):
            each.cancel()
        await asyncio.gather(task, left, return_exceptions=True)


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
