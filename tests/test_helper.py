"""Helpers: what happens to them is told, and happens to nobody else."""

from __future__ import annotations

import os
import signal
import time
from multiprocessing.connection import Connection
from typing import Any

import pytest

from gsa.helper import Helper, HelperEnded, ended_after


def serve(connection: Connection[Any, Any]) -> None:
    """Does as it is told."""
    connection.send_bytes(b"")
    while True:
        message = connection.recv_bytes()
        if message == b"loop":
            while True:
                pass
        elif message == b"memory":
            connection.send_bytes(bytes(2**33)[:1])
        elif message == b"slow":
            with ended_after(1):
                time.sleep(30)
        elif message.isdigit():
            os.kill(os.getpid(), int(message))
        connection.send_bytes(message)


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (b"loop", "it took more than 0.5 seconds"),
        (b"memory", "it ended with exit code 1"),
        (b"9", "it was killed, perhaps for want of memory"),
        (b"6", "SIGABRT ended it, perhaps for want of memory"),
        (b"11", "signal 11 ended it"),
    ],
)
def test_a_helper_that_ends_or_does_not_is_told_of(message: bytes, reason: str) -> None:
    helper = Helper("tests.test_helper:serve", memory=2**30)
    assert helper.ask(b"hello", 60) == b"hello"
    with pytest.raises(HelperEnded, match=f"^{reason}$"):
        helper.ask(message, 0.5 if message == b"loop" else 60)
    assert helper.process.poll() is not None
    with pytest.raises(HelperEnded):
        helper.ask(b"again", 60)


def test_a_helper_ends_with_who_asked_for_it() -> None:
    helper = Helper("tests.test_helper:serve")
    assert helper.ask(b"hello", 60) == b"hello"
    process = helper.process
    del helper
    assert process.poll() == -signal.SIGKILL


def test_the_error_of_a_signal_handler_reaches_who_asked() -> None:
    """Also one that looks as if it came from the pipe."""

    def handler(*_: object) -> None:
        raise TimeoutError("the handler's")

    helper, before = Helper("tests.test_helper:serve"), signal.signal(signal.SIGALRM, handler)
    try:
        assert helper.ask(b"hello", 60) == b"hello"
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(TimeoutError, match="the handler's"):
            helper.ask(b"loop", 60)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert helper.process.poll() is not None


def test_a_busy_helper_ends_when_its_time_is_over_although_nobody_ends_it() -> None:
    helper = Helper("tests.test_helper:serve")
    assert helper.ask(b"hello", 60) == b"hello"
    helper.connection.send_bytes(b"slow")
    assert helper.process.wait(20) == -signal.SIGALRM
