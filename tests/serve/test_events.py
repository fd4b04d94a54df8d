"""How often a stream is told something: at once when it begins and ends, and between that as often as is allowed."""

import time

import pytest

from tests.serve.live import Live, events


def _events(server: Live, tokens: int, streams: int = 1) -> list[list[str]]:
    """The texts that come for each of so many answers of one request, event by event."""
    body = {"prompt": "Often", "max_tokens": tokens, "temperature": 0, "stream": True, "n": streams}
    told: list[list[str]] = [[] for _ in range(streams)]
    for event in events(server.http.post("/v1/completions", json=body).text):
        for choice in (event or {"choices": []})["choices"]:
            told[choice["index"]].append(choice["text"])
    return told


def test_events_that_are_rare_bring_several_tokens(server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = server.complete("Often", max_tokens=60)["choices"][0]["text"]
    monkeypatch.setattr(server.serving.worker, "_pace", 3600.0)
    rare = _events(server, 60, streams=2)
    # The first piece comes alone at once; the rest with the last, since nothing else may come within an hour.
    assert [len(texts) for texts in rare] == [2, 2]
    assert all("".join(texts) == whole for texts in rare)
    assert all(0 < len(texts[0]) < 5 for texts in rare)


def test_a_stream_alone_is_told_of_every_step(server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = server.serving.worker
    step = worker._step

    def slower() -> object:
        time.sleep(0.01)
        return step()

    monkeypatch.setattr(worker, "_step", slower)
    (texts,) = _events(server, 30)
    assert "".join(texts) == server.complete("Often", max_tokens=30)["choices"][0]["text"]
    assert len(texts) > 10  # one that is slow to be sent may bring several
