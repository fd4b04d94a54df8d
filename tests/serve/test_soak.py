"""Hundreds of requests of all kinds at once: each answer is that of the request alone, and nothing is left behind."""

import asyncio
import json
import os
import random
import threading
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.serve.live import KEY, Live, events, served

REQUESTS = 600
TEXT = "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness"


def body_of(chance: random.Random, states: list[str]) -> dict[str, Any]:
    """A request that has one right answer."""
    begin = chance.randrange(20)
    body: dict[str, Any] = {
        "prompt": TEXT[begin : begin + chance.randrange(1, 80)],
        "max_tokens": chance.randrange(0, 24),
        "seed": chance.randrange(5),
        "temperature": chance.choice([0, 0.7, 1.5]),
        "cache_salt": chance.choice(["one", "two"]),
    }
    more = {
        "n": chance.randrange(1, 4),
        "stop": [chance.choice("aeiou")],
        "logprobs": chance.randrange(3),
        "echo": True,
        "frequency_penalty": 1.5,
        "presence_penalty": -1,
        "logit_bias": {str(chance.randrange(97, 120)): 8},
        "top_k": 5,
    }
    body |= {name: more[name] for name in chance.sample(list(more), chance.randrange(4))}
    if chance.random() < 0.3:
        body |= {"state": chance.choice(states), "cache_salt": "one"}
    return body


def answered(answer: dict[str, Any]) -> list[Any]:
    return [{name: value for name, value in choice.items() if name != "state"} for choice in answer["choices"]]


def joined(text: str) -> list[Any]:
    """The texts and ends of a stream."""
    found: dict[int, list[str]] = {}
    for event in events(text)[:-1]:
        choice = event["choices"][0]
        found.setdefault(choice["index"], []).append(choice["text"])
    return ["".join(found[index]) for index in sorted(found)]


async def ask(client: httpx2.AsyncClient, chance: random.Random, body: dict[str, Any], expected: list[Any]) -> str:
    """Sends a request in one of many ways, and checks what comes; says which way it was."""
    way = chance.choice(["whole", "whole", "stream", "stream", "leave", "leave early", "bad", "huge", "key"])
    path = "/v1/completions"
    if way == "whole":
        answer = await client.post(path, json=body)
        assert (answer.status_code, answered(answer.json())) == (200, expected), body
    elif way == "stream":
        answer = await client.post(path, json={**body, "stream": True})
        assert joined(answer.text) == [choice["text"] for choice in expected], body
    elif way.startswith("leave"):
        body = {**body, "max_tokens": 100_000, "stop": [], "stream": way == "leave"}
        try:
            async with client.stream("POST", path, json=body, timeout=0.1 + chance.random() / 5) as answer:
                async for _ in answer.aiter_lines():
                    if chance.random() < 0.2:
                        break
        except httpx2.TimeoutException:
            pass
    elif way == "bad":
        bad = json.dumps({**body, "n": "x"})[: chance.randrange(1, 200)]
        answer = await client.post(path, content=bad, headers={"Content-Type": "application/json"})
        assert answer.status_code == 400
    elif way == "huge":
        answer = await client.post(path, content=b"x" * (2**20 + 1), headers={"Content-Type": "application/json"})
        assert answer.status_code == 413
    else:
        answer = await client.post(path, json=body, headers={"Authorization": "Bearer wrong"})
        assert answer.status_code == 401
    return way


async def ask_all(live: Live, bodies: list[dict[str, Any]], expected: list[list[Any]]) -> list[str]:
    chance, places = random.Random(1), asyncio.Semaphore(24)
    headers = {"Authorization": f"Bearer {KEY}"}
    limits = httpx2.Limits(max_connections=64, max_keepalive_connections=8)

    async with httpx2.AsyncClient(base_url=live.address, headers=headers, timeout=60, limits=limits) as client:

        async def one(body: dict[str, Any], right: list[Any]) -> str:
            async with places:
                return await ask(client, chance, body, right)

        return await asyncio.gather(*(one(body, right) for body, right in zip(bodies, expected, strict=True)))


@pytest.mark.slow
def test_every_answer_is_that_of_the_request_alone(folder: Path, tmp_path: Path) -> None:
    chance = random.Random(0)
    options = {"state_dir": str(tmp_path), "api_key": KEY, "max_body_mb": 1, "max_tokens": 100_000, "max_queue": 999}
    with served(folder, **options) as live:
        made = [{"text": TEXT[:length], "cache_salt": "one"} for length in (5, 33, 70)]
        states = [live.post("/v1/states", body, 201)["id"] for body in made]
        bodies = [body_of(chance, states) for _ in range(REQUESTS)]
        expected = [answered(live.post("/v1/completions", {**body, "cache": False})) for body in bodies]
        before = threading.active_count(), len(os.listdir("/proc/self/fd"))
        for _ in range(2):
            ways = asyncio.run(ask_all(live, bodies, expected))
        assert len(set(ways)) == 7
        assert live.idle()
        assert live.serving.texts.engine._scheduler._running == {}
        live.http.get("/health")
        after = threading.active_count(), len(os.listdir("/proc/self/fd"))
        assert after[0] <= before[0] + 40  # of the pool that encodes; it does not grow further
        assert after[1] <= before[1] + 10
        assert live.metric("gsa_cached_tokens_total") > 0
