"""Work in several processes that may die: a compiler that crashes takes its process along, and nothing else."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

Task = Callable[[], Any]
"""A partial of a function at the top of a module; it and what it returns go from process to process."""


class WorkerDied(Exception):
    """A process ended in the midst of its work."""


@dataclass
class _Worker:
    process: BaseProcess
    connection: Connection
    task: int = -1


def results(tasks: Sequence[Task], jobs: int) -> Generator[tuple[int, Any], None, None]:
    """The place of each task and what it returns, or the exception it ends with, as they become ready.

    Kernels that processes import are compiled, not interpreted, whatever TRITON_INTERPRET says here. When the caller
    goes away, so do the processes and all that they have started.
    """
    waiting = iter(range(len(tasks)))
    workers: list[_Worker] = []
    with tempfile.TemporaryDirectory(prefix="gsa-") as folder:
        try:
            workers += (_start(folder) for _ in range(min(jobs, len(tasks))))
            busy = [worker for worker in workers if _give_task(worker, tasks, waiting)]
            while busy:
                for ready in wait([worker.connection for worker in busy]):
                    worker = next(worker for worker in busy if worker.connection is ready)
                    busy.remove(worker)
                    done = worker.task
                    try:
                        result = worker.connection.recv()
                    except (EOFError, ConnectionResetError):
                        worker.process.join()
                        result = WorkerDied(f"the compiler died ({_exit_reason(worker.process.exitcode)})")
                        workers.remove(worker)
                        worker = _start(folder)
                        workers.append(worker)
                    if _give_task(worker, tasks, waiting):
                        busy.append(worker)
                    yield done, result
        finally:
            for worker in workers:
                _end(worker)


def _start(folder: str) -> _Worker:
    context = get_context("spawn")  # what has been imported here, or is running in threads, stays here
    ours, theirs = context.Pipe()
    process = context.Process(target=_work, args=(theirs, folder), daemon=True)
    process.start()
    theirs.close()  # so that reading from ours ends when the process does
    return _Worker(process, ours)


def _give_task(worker: _Worker, tasks: Sequence[Task], waiting: Iterator[int]) -> bool:
    """Whether there was something left for the worker to do."""
    place = next(waiting, None)
    if place is None:
        return False
    worker.task = place
    with suppress(BrokenPipeError):  # it has died, which reading will tell
        worker.connection.send(tasks[place])
    return True


def _end(worker: _Worker) -> None:
    """Ends a process with what it has started: it leads a group of its own."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(worker.process.pid or 0, signal.SIGKILL)
    worker.process.kill()  # should it not have come to lead one
    worker.process.join()
    worker.connection.close()


def _work(connection: Connection, folder: str) -> None:
    """Does what comes through the connection until it closes."""
    os.setsid()  # Ctrl-C is for the process that reads the results
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Triton prints what cannot be assembled
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ["TMPDIR"] = tempfile.tempdir = folder  # assemblers that are ended leave their files behind
    with suppress(EOFError, BrokenPipeError):
        while True:
            task = connection.recv()
            try:
                result = task()
            except Exception as error:
                result = _sendable(error)
            connection.send(result)


def _sendable(error: Exception) -> Exception:
    """The error with nothing but words, since not every error can go to another process."""
    from gsa.errors import GSAError

    while isinstance(error.__cause__, type(error)):  # of calls within kernels, the innermost
        error = error.__cause__
    return GSAError(*error.args) if isinstance(error, GSAError) else RuntimeError(f"{type(error).__name__}: {error}")


def _exit_reason(code: int | None) -> str:
    return f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
