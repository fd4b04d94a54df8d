"""Connections on which nothing is asked: they end, and shut nobody out."""

import socket
import time
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import httpx2
import pytest

from gsa.serve import connections
from gsa.serve.connections import most_connections
from tests.serve.live import Live, served


def connected(live: Live) -> socket.socket:
    address = urlsplit(live.address)
    return socket.create_connection((address.hostname, address.port), timeout=30)


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
