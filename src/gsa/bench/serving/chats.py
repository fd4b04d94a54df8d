"""Long conversations: the time to the first token when nothing is known of them, in their second turn, and in their
second turn after the server was started again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from gsa.bench.serving.answers import Answer
from gsa.bench.serving.clients import answered
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
    """Medians of so many conversations of about so many tokens. Those that go on after the restart are others than
    those that go on before it, so that their second turn is new to the server then, too."""
    tick(f"{called(contender.about)}: conversations")
    with TemporaryDirectory(dir=folder) as states:
        first: list[float] = []
        with contender.served(places=1, threads=threads, folder=Path(states)) as server:
            told = [_begun(server, opening(seed, number, tokens), first) for number in range(2 * repeats)]
            second = [_asked(server, messages)[0] for messages in told[:repeats]]
        with contender.served(places=1, threads=threads, folder=Path(states)) as server:
            restarted = [_asked(server, messages)[0] for messages in told[repeats:]]
    return {
        **contender.about,
        "tokens": tokens,
        "first_turn": median(first),
        "second_turn": median(map(_first_token, second)),
        "after_restart": median(map(_first_token, restarted)),
        "cached_after_restart": median(answer.cached for answer in restarted),
    }


def _begun(server: Server, messages: Messages, times: list[float]) -> Messages:
    """Has the first turn answered, notes when its first token came, and returns what the second one is asked with."""
    answer, text = _asked(server, messages)
    times.append(_first_token(answer))
    return second_turn(messages, text)


def _asked(server: Server, messages: Messages) -> tuple[Answer, str]:
    body = {"messages": messages, "max_tokens": REPLY_TOKENS, "temperature": 0}

    async def ask() -> tuple[Answer, str]:
        async with Connection(server.port) as connection:
            return await answered(connection, CHAT, body)

    answer, text = asyncio.run(ask())
    if not answer.arrivals:
        raise GSAError("bench: a server answered a conversation with nothing")
    return answer, text


def _first_token(answer: Answer) -> float:
    return answer.arrivals[0] - answer.asked
