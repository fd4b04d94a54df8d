"""Connections on which nothing is asked, or read: they end, and shut nobody out."""

import json
import re
import socket
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from threading import Event
from urllib.parse import urlsplit

import httpx2
import pytest

from gsa.serve import connections
from gsa.serve.connections import Connection, most_connections
from tests.serve.live import Live, served


def connected(live: Live, buffer: int | None = None) -> socket.socket:
    """A connection to a server; `buffer` bytes wait here at most until they are read."""
    address = urlsplit(live.address)
    found = socket.socket()
    if buffer is not None:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    found.settimeout(30)
    found.connect((address.hostname, address.port))
    return found


@pytest.mark.parametrize("sent", [b"", b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Slow: "])
def test_a_connection_without_a_whole_head_is_closed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.2)
    with served(folder) as live, connected(live) as silent:
        silent.sendall(sent)
        assert silent.recv(1) == b""


@pytest.mark.slow  # uvicorn's own five seconds
def test_the_beginning_of_a_second_request_is_not_waited_for_either(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.5)
    with served(folder) as live, connected(live) as slow:
        slow.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nGET")
        answer = b""
        while more := slow.recv(2**16):
            answer += more
        assert answer.startswith(b"HTTP/1.1 200")


def test_an_answer_may_take_longer_than_a_head(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEAD_SECONDS", 1.0)
    with served(folder) as live:
        step = live.serving.worker._step

        def slower() -> object:
            time.sleep(0.05)
            return step()

        monkeypatch.setattr(live.serving.worker, "_step", slower)
        assert live.complete("Long", max_tokens=30)["usage"]["completion_tokens"] == 30


def test_an_answer_that_nobody_reads_is_given_up(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of megabytes, so that it does not fit into what the system itself keeps for a reader."""
    lost, ended = Connection.connection_lost, Event()

    def connection_lost(self: Connection, exc: Exception | None) -> None:
        lost(self, exc)
        ended.set()

    monkeypatch.setattr(connections, "READ_SECONDS", 0.2)
    monkeypatch.setattr(Connection, "connection_lost", connection_lost)
    with served(folder) as live, connected(live, buffer=4096) as reader:
        asked = {"prompt": "a" * 40_000, "max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 5}
        body = json.dumps(asked).encode()
        reader.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n")
        reader.sendall(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
        assert ended.wait(60)
        answer = reader.recv(2**16)
        assert answer.startswith(b"HTTP/1.1 200 OK")
        length = int(re.findall(rb"(?i)content-length: (\d+)", answer)[0])
        with suppress(ConnectionError):
            while more := reader.recv(2**20):
                answer += more
        assert len(answer) < length


def test_silent_connections_shut_nobody_out(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gsa.serve.run.most_connections", lambda: 4)
    with served(folder, max_tokens=10**6) as live, ExitStack() as stack:
        silent = [stack.enter_context(connected(live)) for _ in range(10)]
        assert live.http.get("/health").status_code == 200
        assert silent[0].recv(1) == b""  # the oldest have made room
        body = {"prompt": "a", "temperature": 0, "max_tokens": 10**6, "stream": True}
        for _ in range(4):
            stack.enter_context(live.http.stream("POST", "/v1/completions", json=body))
        with httpx2.Client(base_url=live.address) as other:  # all are at work: there is none to be closed
            assert other.get("/health").status_code == 503


def test_there_may_be_fewer_connections_than_files() -> None:
    resource = pytest.importorskip("resource")
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert 8 <= most_connections() <= 4096
    assert files == resource.RLIM_INFINITY or files < 200 or 2 * most_connections() < files
