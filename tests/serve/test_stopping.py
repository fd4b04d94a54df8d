"""Full, failing and stopping servers: what runs is finished, what comes then is told to wait or to go elsewhere."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import httpx2
import pytest

from gsa.serve.worker import MAX_FAILURES
from tests.serve.live import Live, events, served
from tests.serve.test_complaints import text


def test_a_full_server_says_so_and_counts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with served(folder, max_concurrency=1, max_queue=1, max_tokens=10**6) as live:
        body = {"prompt": "a", "temperature": 0, "max_tokens": 10**6, "stream": True}
        streams = [live.http.stream("POST", "/v1/completions", json=body) for _ in range(2)]
        for stream in streams:
            stream.__enter__()
        live.wait_for(2)
        assert (live.metric("gsa_running"), live.metric("gsa_waiting")) == (1, 1)
        answer = live.http.post("/v1/completions", json={"prompt": "a"})
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
        assert answer.json()["error"]["type"] == "rate_limit_error"
        assert "3 answers at once" in live.complete("a", 400, n=3)["error"]["message"]
        for stream in streams:
            stream.__exit__(None, None, None)
        assert live.idle()
        assert text(live.complete("a"))


def test_a_server_that_stops_finishes_its_answers_and_takes_no_more(folder: Path) -> None:
    with served(folder, max_tokens=1000) as live:
        expected = live.complete("Long", max_tokens=1000)
        body = {"prompt": "Long", "temperature": 0, "max_tokens": 1000, "stream": True}
        with live.http.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            live.serving.worker.draining = True
            live.server.should_exit = True
            deadline = time.monotonic() + 30
            told = events("\n".join(lines))
        assert told[-1] is None
        while any(listening.is_serving() for listening in live.server.servers):  # it looks ten times a second
            assert time.monotonic() < deadline
            time.sleep(0.01)
        with pytest.raises(httpx2.ConnectError):
            httpx2.get(f"{live.address}/health")
    assert live.serving.worker.pending == 0
    assert told[-2]["choices"][0]["finish_reason"] == expected["choices"][0]["finish_reason"]
    assert not live.serving.worker._thread.is_alive()


def test_a_draining_server_refuses(folder: Path) -> None:
    with served(folder) as live:
        live.serving.worker.draining = True
        assert live.complete("a", 503)["error"]["code"] == "draining"
        answer = live.http.get("/health")
        assert (answer.status_code, answer.json()["status"]) == (503, "draining")


def test_an_engine_that_fails_for_good_is_told(folder: Path) -> None:
    with served(folder) as live:

        def fail() -> None:
            raise RuntimeError("broken")

        live.serving.worker._step = fail
        error = live.complete("a", 503)["error"]
        assert "RuntimeError: broken" in error["message"]
        assert live.complete("a", 503)["error"]["code"] == "engine_failed"
        assert live.http.get("/health").json()["status"] == "engine_failed"
        assert live.serving.worker._failures == MAX_FAILURES


def test_a_step_that_fails_once_leaves_the_server_well(server: Live) -> None:
    step = server.serving.worker._step

    def fail() -> None:
        server.serving.worker._step = step
        raise RuntimeError("once")

    server.serving.worker._step = fail
    assert text(server.complete("The engine has not lost it"))


def test_want_of_memory_is_told_as_such(server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    read = server.serving.texts.engine._runner.read

    def without(*given: object) -> object:
        monkeypatch.setattr(server.serving.texts.engine._runner, "read", read)
        raise MemoryError("none left")

    monkeypatch.setattr(server.serving.texts.engine._runner, "read", without)
    assert server.complete("Never read before", 503)["error"]["code"] == "out_of_memory"
    assert text(server.complete("Never read before"))


def test_a_fault_of_the_worker_itself_leaves_nobody_waiting(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with served(folder) as live:
        monkeypatch.setattr(live.serving.worker, "_collect", lambda answer: 1 / 0)
        assert "ZeroDivisionError" in live.complete("a", 503)["error"]["message"]
        assert live.complete("a", 503)["error"]["code"] == "engine_failed"
    with served(folder) as live:
        monkeypatch.setattr(live.serving.texts, "stream", lambda *given, **named: 1 / 0)
        assert "cannot be submitted" in live.complete("a", 503)["error"]["message"]
        monkeypatch.undo()
        assert text(live.complete("a"))


def test_closing_in_the_midst_tells_the_clients(folder: Path) -> None:
    with served(folder, max_tokens=10**6) as live:
        body = {"prompt": "a", "temperature": 0, "max_tokens": 10**6, "stream": True}
        with live.http.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            live.serving.worker.close()
            told = events("\n".join(lines))
    assert told[-1]["error"]["code"] == "draining"


@pytest.mark.parametrize("stream", [False, True])
def test_answers_that_are_not_done_in_time_are_ended_with_a_word(folder: Path, stream: bool) -> None:
    """One is being written, the other waits; both clients are told why they get no more."""
    with served(folder, max_tokens=10**6, max_concurrency=1, drain_seconds=0.1) as live, ThreadPoolExecutor() as pool:
        body = {"prompt": "a", "temperature": 0, "max_tokens": 10**6, "stream": stream}
        asked = [pool.submit(live.http.post, "/v1/completions", json=body) for _ in range(2)]
        live.wait_for(2)
        live.server.should_exit = True
        answers = [each.result() for each in asked]
    for answer in answers:
        assert answer.status_code == (200 if stream else 503)
        told = events(answer.text)[-1] if stream else answer.json()
        assert told["error"]["code"] == "draining"


def test_a_request_that_is_cut_off_is_told_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gsa.serve.run.LAST_SECONDS", 0.5)
    with served(folder, drain_seconds=0.1) as live:
        address = urlsplit(live.address)
        with socket.create_connection((address.hostname, address.port), timeout=30) as slow:
            head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            slow.sendall(f"{head}Content-Length: 9\r\n\r\n{{".encode())
            time.sleep(0.2)
            live.server.should_exit = True
            assert slow.recv(12) == b"HTTP/1.1 503"


def test_an_answer_that_comes_when_the_worker_has_ended_is_refused(folder: Path) -> None:
    with served(folder) as live:
        live.serving.worker.close()
        live.serving.worker.draining = False  # as if it had been found to have room before
        assert live.complete("a", 503)["error"]["code"] == "draining"


@pytest.mark.slow
@pytest.mark.parametrize("again", [False, True])
def test_signals(tmp_path: Path, again: bool) -> None:
    """The first SIGTERM drains and saves, the second stops at once."""
    command = [sys.executable, "-m", "gsa", "serve", "gsa-tiny", "--port", "0", "--max-tokens", "100000"]
    process = subprocess.Popen([*command, "--state-dir", tmp_path], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    said = [process.stderr.readline() for _ in range(3)]
    address = re.search(r"http://127.0.0.1:\d+", said[1])[0]
    assert f"curl {address}/v1/completions" in said[2]
    length = 100000 if again else 2000
    bias = {"0": -100}  # the token that ends a text
    body = {"prompt": "a", "max_tokens": length, "stream": True, "return_state": "id", "logit_bias": bias}
    with httpx2.stream("POST", f"{address}/v1/completions", json=body, timeout=60) as answer:
        lines = answer.iter_lines()
        next(lines)
        os.kill(process.pid, signal.SIGTERM)
        if again:
            assert "stopping: 1 answers" in process.stderr.readline()
            os.kill(process.pid, signal.SIGTERM)
            with pytest.raises(httpx2.HTTPError):
                list(lines)
        else:
            *_, last, done = events("\n".join(lines))
            assert done is None
            id_ = last["choices"][0]["state"]["id"]
            assert (tmp_path / "states" / f"{id_}.safetensors").exists()
    process.stderr.close()
    assert process.wait(60) == (143 if again else 0)
