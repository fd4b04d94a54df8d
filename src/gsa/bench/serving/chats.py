"""Long conversations: the time to the first token when nothing is known of them, in their second turn, and in their
second turn after the server was started again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from gsa.bench.serving.answers import Answer
from gsa.bench.serving.clients import ANSWER_SECONDS, FAILURES, answered
from gsa.bench.serving.http import Connection
from gsa.bench.serving.processes import Server
from gsa.bench.serving.questions import opening, second_turn
from gsa.bench.serving.servers import Contender, called
from gsa.errors import GSAError

CHAT = "/v1/chat/completions"
REPLY_TOKENS = 16
Messages = list[dict[str, str]]


def turns(
    contender: Contender,
    folder: Path,
    tick: Callable[[str], None],
    tokens: int,
    repeats: int,
    seed: int,
    threads: int | None,
) -> dict[str, Any]:
    """Medians of so many times two conversations of about so many tokens: one goes on at once, the other is begun last
    before a restart and goes on first after it, so that a server that remembers little can remember it, too."""
    first: list[Answer] = []
    second: list[Answer] = []
    restarted: list[Answer] = []
    for number in range(repeats):
        tick(f"{called(contender.about)}: conversations, {number + 1} of {repeats}")
        serve = partial(contender.served, places=1, threads=threads)
        with TemporaryDirectory(dir=folder) as kept:
            with serve(folder=Path(kept)) as server:
                messages = _begun(server, opening(seed, 2 * number, tokens), first)
                second.append(_asked(server, messages)[0])
                messages = _begun(server, opening(seed, 2 * number + 1, tokens), first)
            with serve(folder=Path(kept)) as server:
                restarted.append(_asked(server, messages)[0])
    return {
        **contender.about,
        "tokens": tokens,
        "first_turn": median(map(_first_token, first)),
        "second_turn": median(map(_first_token, second)),
        "after_restart": median(map(_first_token, restarted)),
        "cached_after_restart": median(answer.cached for answer in restarted),
    }


def _begun(server: Server, messages: Messages, answers: list[Answer]) -> Messages:
    """Has the first turn answered, notes its answer, and returns what the second one is asked with."""
    answer, text = _asked(server, messages)
    answers.append(answer)
    return second_turn(messages, text)


def _asked(server: Server, messages: Messages) -> tuple[Answer, str]:
    body = {"messages": messages, "max_tokens": REPLY_TOKENS, "temperature": 0}

    async def ask() -> tuple[Answer, str]:
        async with Connection(server.port) as connection:
            return await asyncio.wait_for(answered(connection, CHAT, body), ANSWER_SECONDS)

    try:
        answer, text = asyncio.run(ask())
    except FAILURES as error:
        raise GSAError(f"bench: a conversation failed: {type(error).__name__}: {error}") from None
    if not answer.arrivals:
        raise GSAError("bench: a server answered a conversation with nothing")
    return answer, text


def _first_token(answer: Answer) -> float:
    return answer.arrivals[0] - answer.asked
