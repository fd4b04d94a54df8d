"""A process beside this one for work that may run for ever, take all memory or crash: then it alone ends.

It is started bare, with nothing of the main script imported, and lives as long as the pipe to it: when the process that
started it is killed, it ends by itself, at the latest when its time for what it was asked is over. Ctrl-C does not
reach it.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any
from weakref import finalize

# Until Python's path is set here, the current folder is on it: only built-in modules may be imported before.
_START = "import sys; sys.path[:] = sys.argv[4:]; from gsa.helper import serve; serve(*sys.argv[1:4])"

START_SECONDS = 60.0
"""For the start of a helper, on a busy machine or from a slow disk."""


class HelperEnded(Exception):
    """A helper ended before it answered; the message says how."""


class Helper:
    """A process that runs a function, named as in "gsa.templates:serve", with one end of a pipe.

    `memory` is how many bytes it may take, 0 for as many as there are; where the system knows no such limit, there is
    none.
    """

    def __init__(self, function: str, *, memory: int = 0, environment: Mapping[str, str] | None = None) -> None:
        self.connection, theirs = Pipe()
        command = [sys.executable, "-c", _START, str(theirs.fileno()), function, str(memory), *sys.path]
        # With a limit, crashes are to be expected: a sentence tells them, not what they print.
        errors = subprocess.DEVNULL if memory else None
        with theirs:
            self.process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                env={**os.environ, **(environment or {})},
                start_new_session=True,
                stderr=errors,
            )
        self._ready = False
        self.end = finalize(self, _end, self.process, self.connection)
        """Ends it."""

    def ask(self, message: bytes, seconds: float) -> bytes:
        """Its answer to a message. If it takes longer, or ends, or the wait is interrupted, it is ended.

        Its function has to send an empty message first, when it is ready: the seconds count from then.
        """
        if not self.end.alive:
            raise HelperEnded("it has ended before")
        try:
            if not self._ready:
                self._receive(START_SECONDS)
                self._ready = True
            self.connection.send_bytes(message)
            return self._receive(seconds)
        except (EOFError, ConnectionError):
            raise HelperEnded(self.reason()) from None
        except BaseException:  # also of a signal handler
            self.end()
            raise

    def _receive(self, seconds: float) -> bytes:
        if not self.connection.poll(seconds):
            raise HelperEnded(f"it took more than {seconds:g} seconds")
        return self.connection.recv_bytes()

    def reason(self) -> str:
        """How it ended, once the pipe to it is closed."""
        code = self.process.wait()
        self.end()
        if code == -signal.SIGKILL:
            return "it was killed, perhaps for want of memory"
        if code == -signal.SIGABRT:
            return "SIGABRT ended it, perhaps for want of memory"
        return f"signal {-code} ended it" if code < 0 else f"it ended with exit code {code}"


def _end(process: subprocess.Popen[bytes], connection: Connection[Any, Any]) -> None:
    process.kill()
    process.wait()
    connection.close()


@contextmanager
def ended_after(seconds: float) -> Iterator[None]:
    """Around what a helper was asked: ends its process a second later than who asked would, who may be gone by then."""
    if hasattr(signal, "SIGALRM"):
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # which ends a process even inside one long operation
        signal.alarm(math.ceil(seconds) + 1)
    try:
        yield
    finally:
        if hasattr(signal, "SIGALRM"):
            signal.alarm(0)


def serve(descriptor: str, function: str, memory: str) -> None:
    """What the process runs."""
    if int(memory):
        try:
            import resource

            resource.setrlimit(resource.RLIMIT_AS, (int(memory), int(memory)))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        except (ImportError, ValueError, OSError):
            pass  # this system has no such limit; that of time holds
    module, _, name = function.partition(":")
    try:
        getattr(import_module(module), name)(Connection(int(descriptor)))
    except (EOFError, ConnectionError, KeyboardInterrupt):
        os._exit(0)
