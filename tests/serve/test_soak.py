"""10,000 requests of all kinds at once: each answer is that of the request alone, and nothing is left behind."""

import asyncio
import json
import os
import random
import re
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.serve.live import KEY, Live, events, served

BODIES, ROUNDS = 2500, 4
WAYS = ("whole", "stream", "slow", "keep", "leave", "leave early", "stall", "salt", "bad", "huge", "key")
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


async def ask(client: httpx2.AsyncClient, way: str, chance: random.Random, body: dict[str, Any], expected: Any) -> None:
    """Sends a request in one of many ways, and checks what comes."""
    path, texts = "/v1/completions", [choice["text"] for choice in expected]
    if way == "whole":
        answer = await client.post(path, json=body)
        assert (answer.status_code, answered(answer.json())) == (200, expected), body
    elif way == "stream":
        answer = await client.post(path, json={**body, "stream": True})
        assert joined(answer.text) == texts, body
    elif way == "slow":
        lines = []
        async with client.stream("POST", path, json={**body, "stream": True}) as answer:
            async for line in answer.aiter_lines():
                lines.append(line)
                await asyncio.sleep(chance.random() / 20)
        assert joined("\n".join(lines)) == texts, body
    elif way == "keep":
        answer = await client.post(path, json={**body, "return_state": "id"})
        assert (answer.status_code, answered(answer.json())) == (200, expected), body
        for choice in answer.json()["choices"]:
            place, salt = f"/v1/states/{choice['state']['id']}", {"cache_salt": body["cache_salt"]}
            assert (await client.get(place, params=salt)).json()["tokens"] == choice["state"]["tokens"]
            assert (await client.get(place, params={"cache_salt": "another"})).status_code == 404
            assert (await client.delete(place, params=salt)).status_code == 200
    elif way in ("leave", "leave early", "stall"):
        body = {**body, "max_tokens": 100_000, "stop": [], "stream": way != "leave early"}
        try:
            async with client.stream("POST", path, json=body, timeout=0.1 + chance.random() / 5) as answer:
                if way == "stall":
                    await asyncio.sleep(chance.random() / 2)
                    return
                async for _ in answer.aiter_lines():
                    if chance.random() < 0.2:
                        break
        except httpx2.TimeoutException:
            pass
    elif way == "salt":
        answer = await client.post(path, json={**body, "cache_salt": "another"})
        if "state" in body:
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "state_not_found")
        else:
            assert (answer.status_code, answered(answer.json())) == (200, expected), body
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


async def ask_all(live: Live, seed: int, bodies: list[dict[str, Any]], expected: list[list[Any]]) -> Counter[str]:
    """Asks all of them, 24 at a time; says how many in which way."""
    chance, places, ways = random.Random(seed), asyncio.Semaphore(24), Counter[str]()
    headers = {"Authorization": f"Bearer {KEY}"}
    limits = httpx2.Limits(max_connections=64, max_keepalive_connections=8)

    async with httpx2.AsyncClient(base_url=live.address, headers=headers, timeout=60, limits=limits) as client:

        async def one(body: dict[str, Any], right: list[Any]) -> None:
            async with places:
                way = chance.choice(WAYS)
                await ask(client, way, chance, body, right)
                ways[way] += 1

        await asyncio.gather(*(one(body, right) for body, right in zip(bodies, expected, strict=True)))
    return ways


@pytest.mark.slow
def test_every_answer_is_that_of_the_request_alone(folder: Path, tmp_path: Path) -> None:
    chance = random.Random(0)
    options = {"state_dir": str(tmp_path), "api_key": KEY, "max_body_mb": 1, "max_tokens": 100_000, "max_queue": 999}
    with served(folder, **options) as live:
        made = [{"text": TEXT[:length], "cache_salt": "one"} for length in (5, 33, 70)]
        states = [live.post("/v1/states", body, 201)["id"] for body in made]
        bodies = [body_of(chance, states) for _ in range(BODIES)]
        expected = [answered(live.post("/v1/completions", {**body, "cache": False})) for body in bodies]
        before = threading.active_count(), len(os.listdir("/proc/self/fd"))
        asked = Counter[str]()
        for seed in range(ROUNDS):
            asked += asyncio.run(ask_all(live, seed, bodies, expected))
        assert asked.keys() == set(WAYS)
        assert asked.total() == BODIES * ROUNDS
        assert live.idle()
        scheduler = live.serving.texts.engine._scheduler
        assert (scheduler._running, len(scheduler._waiting), len(scheduler._reading)) == ({}, 0, 0)
        assert sorted(entry.id for entry in live.serving.store.list("one")) == sorted(states)  # the others are deleted
        assert (
            live.complete(bodies[0]["prompt"], cache_salt="new")["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        )
        after = threading.active_count(), len(os.listdir("/proc/self/fd"))
        assert after[0] <= before[0] + 40  # of the pool that encodes; it does not grow further
        assert after[1] <= before[1] + 10
        assert live.metric("gsa_cached_tokens_total") > 0
        assert not re.search(r'status="5\d\d"', live.http.get("/metrics").text)
