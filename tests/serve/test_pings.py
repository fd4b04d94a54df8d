"""Who waits long for a token is told that there is none yet, again and again, and only then."""

import asyncio
import time

import pytest

from gsa.serve.asking import Asking, _Alarm
from gsa.serve.streaming import PING
from tests.serve.live import Live, events


def test_a_slow_answer_has_pings(server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    step, slow = server.serving.worker._step, iter([0.5])

    def late() -> object:
        time.sleep(next(slow, 0))
        return step()

    monkeypatch.setattr(Asking.batches, "__defaults__", (0.1,))
    monkeypatch.setattr(server.serving.worker, "_step", late)
    body = {"prompt": "Slowly", "max_tokens": 4, "temperature": 0, "stream": True}
    told = server.http.post("/v1/completions", json=body).text
    first, _, _ = told.partition("data:")
    assert first.count(PING.decode()) >= 2
    assert events(told)[-1] is None


def test_the_alarm_rings_only_when_nothing_has_come_for_long() -> None:
    async def rings() -> list[int]:
        rung: list[None] = []
        counts = []
        with _Alarm(lambda: rung.append(None), 60) as alarm:
            for ago in (0, 61, 1, 61, 61):
                alarm.since = time.monotonic() - ago
                alarm._check()
                counts.append(len(rung))
            timer = alarm._timer
            assert not timer.cancelled()
        assert timer.cancelled()
        return counts

    assert asyncio.run(rings()) == [0, 1, 1, 2, 3]
