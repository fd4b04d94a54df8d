"""Servers in processes of their own, which end with what they were started for."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from pathlib import Path

from gsa.bench.serving.http import HOST
from gsa.errors import GSAError

START_SECONDS = 180.0
"""For the start of a server on a busy machine."""
STOP_SECONDS = 60.0
_RUN = """
import runpy, signal, sys
if sys.platform == "linux":
    import ctypes
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # ends with the process that started it, however that ends
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""


@dataclass(frozen=True)
class Server:
    """A server that answers."""

    port: int
    pid: int
    seconds: float
    """From its start to its first answer."""


@contextmanager
def running(module: str, arguments: Sequence[str], health: str, folder: Path | None = None) -> Iterator[Server]:
    """`python -m MODULE ARGUMENTS --port PORT` in a folder, from when it answers at `health` on; at the end it is told
    to stop, and killed if something has gone wrong."""
    port = _free_port()
    command = [sys.executable, "-c", _RUN, module, *arguments, "--port", str(port)]
    keyless = {name: value for name, value in os.environ.items() if name != "GSA_API_KEY"}
    begun = time.perf_counter()
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=said, stderr=said, cwd=folder, env=keyless)
        try:
            while not _answers(port, health):
                if process.poll() is not None or time.perf_counter() - begun > START_SECONDS:
                    said.seek(0)
                    raise GSAError(f"bench: a server did not start: {_last_line(said.read())}")
                time.sleep(0.02)
            yield Server(port, process.pid, time.perf_counter() - begun)
            process.send_signal(signal.SIGTERM)
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            raise GSAError(f"bench: a server did not stop within {STOP_SECONDS:.0f} seconds") from None
        finally:
            process.kill()
            process.wait()


@contextmanager
def ended_in_order() -> Iterator[None]:
    """Has SIGTERM do what Ctrl-C does, so that what was begun is ended and removed."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        return int(listener.getsockname()[1])


def _answers(port: int, path: str) -> bool:
    connection = HTTPConnection(HOST, port, timeout=5)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == 200
    except (OSError, HTTPException):
        return False
    finally:
        connection.close()


def _last_line(said: bytes) -> str:
    lines = said.decode("utf-8", "replace").strip().splitlines()
    return lines[-1] if lines else "it said nothing"
