"""A very long prompt among other requests: how long those wait for their next token while it is read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

from gsa.bench.memory import measured_alone
from gsa.bench.serving.answers import Answer, percentiles
from gsa.bench.serving.clients import ANSWER_SECONDS, COMPLETIONS, FAILURES, Crowd, answered
from gsa.bench.serving.http import Connection
from gsa.bench.serving.load import Load
from gsa.bench.serving.questions import document
from gsa.bench.serving.servers import Ours, called
from gsa.errors import GSAError

CLIENTS = 4
"""Who write meanwhile, at most."""


def among_others(contender: Ours, load: Load, tick: Callable[[str], None], tokens: int, repeats: int) -> dict[str, Any]:
    """Times between tokens of a few clients before prompts of about so many tokens, and while each of them is read."""
    clients = min(load.clients, CLIENTS)
    tick(f"{called(contender.about)}: prompts of {tokens:,} tokens, {clients} clients beside them")
    with contender.served(places=clients + 1, threads=load.threads) as server:
        setting = {"clients": clients, "seconds": load.warm, **load.asked, "tokens": tokens, "repeats": repeats}
        found = measured_alone("gsa.bench.serving.long_prompts:ask", {**setting, **contender.clients(server)})
    return {**contender.about, "clients": clients, **found}


def ask(setting: dict[str, Any]) -> dict[str, Any]:
    """What `clients` of a server at `port` see in `seconds`, and then while prompts of `tokens` are read, `repeats`
    times one after another."""
    return asyncio.run(_ask(setting))


async def _ask(setting: dict[str, Any]) -> dict[str, Any]:
    crowd = Crowd(setting)
    tasks = crowd.begin()
    windows, read = [], []
    try:
        for number in range(setting["repeats"]):
            await asyncio.sleep(setting["seconds"])
            prompt = document(setting["seed"], number, setting["tokens"])
            answer = await _read(setting["port"], prompt)
            read.append(answer)
            windows.append((answer.asked, answer.arrivals[0]))
    finally:
        crowd.end = 0.0
        await asyncio.gather(*tasks)
    if crowd.errors:
        raise GSAError(f"bench: clients beside a long prompt met {len(crowd.errors)} errors, first {crowd.errors[0]}")
    gaps = [gap for answer in crowd.answers for gap in pairwise(answer.arrivals)]
    meanwhile = [gap for gap in gaps if any(begin < gap[1] and gap[0] < end for begin, end in windows)]
    others = [gap for gap in gaps if all(gap[1] <= begin or end <= gap[0] for begin, end in windows)]
    seconds = [end - begin for begin, end in windows]
    return {
        "prompt_tokens": min(answer.prompt for answer in read),
        "prompt_seconds": min(seconds),
        "prompt_tokens_per_second": sum(answer.prompt for answer in read) / sum(seconds),
        "between_tokens": _times(others),
        "between_tokens_meanwhile": _times(meanwhile),
    }


async def _read(port: int, prompt: str) -> Answer:
    """Has a prompt read, and one word written, which tells that it was."""
    body = {"prompt": prompt, "max_tokens": 8, "temperature": 0}
    try:
        async with Connection(port) as connection:
            answer, _ = await asyncio.wait_for(answered(connection, COMPLETIONS, body), ANSWER_SECONDS)
    except FAILURES as error:
        raise GSAError(f"bench: a long prompt failed: {type(error).__name__}: {error}") from None
    if not answer.arrivals:
        raise GSAError("bench: a server answered a long prompt with nothing")
    return answer


def _times(gaps: Iterable[tuple[float, float]]) -> dict[str, float | None]:
    times = [later - earlier for earlier, later in gaps]
    return {**percentiles(times), "longest": max(times, default=None)}
