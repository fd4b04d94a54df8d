"""Clients that each ask one thing after another, with streaming; run by `measured_alone`, in a process of their own."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterator
from itertools import count
from typing import Any

from gsa.bench.memory import measurable, resident
from gsa.bench.serving.answers import Answer, summary
from gsa.bench.serving.http import Connection
from gsa.bench.serving.questions import question
from gsa.errors import GSAError

COMPLETIONS = "/v1/completions"
CACHE_BYTES = "gsa_cache_nbytes"
ANSWER_SECONDS = 600.0
"""For an answer at most, and the time that it waits for its turn."""
FAILURES = (GSAError, OSError, EOFError, ValueError, asyncio.LimitOverrunError, asyncio.TimeoutError)


def ask(setting: dict[str, Any]) -> dict[str, Any]:
    """What `clients` of a server at `port` see in `seconds`, behind `warm` seconds that do not count.

    `pid` is the server's process, whose memory is looked at when the window begins and when it ends. Clients finish
    what they have begun, because the number of its tokens is told at its end.
    """
    return asyncio.run(_ask(setting))


async def _ask(setting: dict[str, Any]) -> dict[str, Any]:
    begin = time.perf_counter() + setting["warm"]
    end = begin + setting["seconds"]
    crowd = Crowd(setting, end)
    tasks = crowd.begin()
    memory = {}
    for name, moment in (("begin", begin), ("end", end)):
        await asyncio.sleep(moment - time.perf_counter())
        memory[name] = await _memory(setting)
    await asyncio.gather(*tasks)
    answers = crowd.answers
    if setting.get("count") is not None:
        await _count(setting["port"], setting["count"], crowd)
    return {
        **summary(answers, begin, end),
        "clients": setting["clients"],
        "memory": memory,
        "errors": len(crowd.errors),
        "first_error": next(iter(crowd.errors), None),
    }


class Crowd:
    """So many `clients` of a server at `port`, who ask until `end`, and what came of it."""

    def __init__(self, setting: dict[str, Any], end: float = math.inf) -> None:
        self.answers: list[Answer] = []
        self.texts: list[str] = []
        self.errors: list[str] = []
        self.end = end
        self._setting = setting

    def begin(self) -> list[asyncio.Future[None]]:
        """Has all of them ask; each ends with its last answer."""
        return [asyncio.ensure_future(self._client(number)) for number in range(self._setting["clients"])]

    async def _client(self, number: int) -> None:
        """One client, until the end; one that meets an error waits a moment, and goes on."""
        async with Connection(self._setting["port"]) as connection:
            for body in self._questions(number):
                if time.perf_counter() >= self.end:
                    return
                try:
                    answer, text = await asyncio.wait_for(answered(connection, COMPLETIONS, body), ANSWER_SECONDS)
                except FAILURES as error:
                    self.errors.append(f"{type(error).__name__}: {error}")
                    await asyncio.sleep(0.2)
                else:
                    self.answers.append(answer)
                    self.texts.append(text)

    def _questions(self, number: int) -> Iterator[dict[str, Any]]:
        return (question(self._setting["seed"], number, turn, self._setting["temperature"]) for turn in count())


async def answered(connection: Connection, path: str, body: dict[str, Any]) -> tuple[Answer, str]:
    """An answer and its text; its tokens are what the server counts, if it tells."""
    answer, pieces = Answer(time.perf_counter()), []
    async for event in connection.stream(path, {**body, "stream_options": {"include_usage": True}}):
        for choice in event["choices"]:
            piece = choice["delta"].get("content") if "delta" in choice else choice["text"]
            if piece:
                answer.arrivals.append(time.perf_counter())
                pieces.append(piece)
        if event.get("usage"):
            usage = event["usage"]
            answer.tokens, answer.prompt = usage["completion_tokens"], usage["prompt_tokens"]
            answer.cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return answer, "".join(pieces)


async def _count(port: int, path: str, crowd: Crowd) -> None:
    """Has a server that tells no usage in streams count the tokens of its texts, when all is over."""
    async with Connection(port) as connection:
        for answer, text in zip(crowd.answers, crowd.texts, strict=True):
            answer.tokens = (await connection.post(path, {"input": text}))["count"]


async def _memory(setting: dict[str, Any]) -> dict[str, int | None]:
    """Bytes of the server that are in memory, and those of them that its cache of states has, as far as they are
    known."""
    bytes_, cached = None, None
    if setting.get("pid") is not None and measurable():
        bytes_ = resident(setting["pid"])
    if setting.get("metrics"):
        async with Connection(setting["port"]) as connection:
            lines = (await connection.get("/metrics")).decode().splitlines()
        cached = next((int(float(line.split()[1])) for line in lines if line.startswith(f"{CACHE_BYTES} ")), None)
    return {"bytes": bytes_, "cache_bytes": cached}
