"""Worker processes that encode portions: helpers, which hold a tokenizer and little else, torch least of all."""

from __future__ import annotations

import dataclasses
import queue
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import TracebackType
from typing import TYPE_CHECKING, Any

from gsa.data.documents import Encoded, encode_parts
from gsa.data.holdout import Side
from gsa.data.portions import PORTION_BYTES, Part, Portion
from gsa.data.streams import MAX_ROW_BYTES
from gsa.errors import GSAError, memory_errors
from gsa.helper import Helper

if TYPE_CHECKING:
    from gsa.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class Task:
    """What a worker has to know before the first portion."""

    tokenizer: str
    """Folder of the tokenizer."""
    fingerprint: str
    field: str
    strict: bool
    side: Side | None = None
    chat_field: str | None = None
    template: str = ""
    """What tells the conversations in that field."""
    template_names: dict[str, str] = dataclasses.field(default_factory=dict)
    """What it knows special tokens by."""


@dataclass(frozen=True)
class _Failure:
    """What went wrong in a worker."""

    message: str
    kind: type[Exception]
    """What is raised for it: a GSAError for what a user did, RuntimeError for a defect of our own."""


def serve(connection: Connection[Any, Any]) -> None:
    """What a worker process runs: it receives portions and sends their tokens, until the pipe is closed."""
    task: Task = connection.recv()
    encode = _tried(lambda: _encoder(task))
    while True:
        parts = connection.recv()
        connection.send(encode if isinstance(encode, _Failure) else _tried(lambda: encode(parts)))  # noqa: B023


def _encoder(task: Task) -> Callable[[list[Part]], Encoded]:
    """What turns parts into tokens."""
    from gsa.data.chat_template import ChatTemplate

    tokenizer, template = _tokenizer(task), None
    if task.chat_field is not None:
        template = ChatTemplate(task.template, tokenizer, task.template_names)
    return lambda parts: encode_parts(parts, task.field, task.strict, tokenizer, task.side, task.chat_field, template)


def _tokenizer(task: Task) -> Tokenizer:
    from gsa.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(task.tokenizer)
    if tokenizer.fingerprint != task.fingerprint:
        raise GSAError(f"data: the tokenizer in {task.tokenizer} is not the one that was asked for")
    return tokenizer


def _tried(work: Callable[[], Any]) -> Any:
    """The result of the work, or why it failed."""
    try:
        with memory_errors("data"):
            return work()
    except GSAError as error:
        return _Failure(str(error), type(error))
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        # Everything is caught, since the main process waits for an answer: `tokenizers` raises plain Exception for
        # what it cannot encode, and a panic in its Rust code is a BaseException.
        if type(error) is Exception:
            return _Failure(f"data: the tokenizer cannot encode this: {error}", GSAError)
        return _Failure(traceback.format_exc(), RuntimeError)


class _Worker:
    """One worker process and the pipe to it."""

    def __init__(self, task: Task) -> None:
        one_core = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        self.helper = Helper("gsa.data.worker:serve", environment=one_core)
        self.helper.connection.send(task)

    def encode(self, parts: list[Part]) -> Encoded:
        try:
            self.helper.connection.send(parts)
            result = self.helper.connection.recv()
        except (EOFError, OSError):
            names = ", ".join(dict.fromkeys(part.name for part in parts))
            raise GSAError(
                f"data: the process that encoded {names} ended: {self.helper.reason()}. What is finished stays, "
                "the same command goes on"
            ) from None
        if isinstance(result, _Failure):
            raise result.kind(result.message)
        return result


class Workers:
    """Processes that encode portions, of which only a few are under way at a time; results come in order."""

    def __init__(self, count: int, task: Task) -> None:
        self._workers: list[_Worker] = []
        self._free: queue.Queue[_Worker] = queue.Queue()
        self._threads = ThreadPoolExecutor(count)
        self._ahead = 2 * count
        self._max_bytes = 2 * PORTION_BYTES * self._ahead + MAX_ROW_BYTES
        try:
            for _ in range(count):
                self._workers.append(_Worker(task))
                self._free.put(self._workers[-1])
        except BaseException:
            self.__exit__(None, None, None)
            raise

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # The threads that wait for these processes then see them end.
        for worker in self._workers:
            worker.helper.process.kill()
        self._threads.shutdown(cancel_futures=True)
        for worker in self._workers:
            worker.helper.end()

    def encode(self, portions: Iterable[Portion]) -> Iterator[tuple[Portion, Encoded]]:
        """Each portion with its tokens, in order."""
        under_way: deque[tuple[Portion, Future[Encoded]]] = deque()
        for portion in portions:
            under_way.append((portion, self._threads.submit(self._encode, portion.parts)))
            while len(under_way) > self._ahead or sum(entry.size for entry, _ in under_way) > self._max_bytes:
                first, result = under_way.popleft()
                yield first, result.result()
        while under_way:
            first, result = under_way.popleft()
            yield first, result.result()

    def _encode(self, parts: list[Part]) -> Encoded:
        worker = self._free.get()
        try:
            return worker.encode(parts)
        finally:
            self._free.put(worker)
