"""Server-sent events: an answer as it is written. It ends when the client leaves, also while nothing is sent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi.sse import KEEPALIVE_COMMENT
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gsa.serve.asking import unless_left
from gsa.serve.errors import ClientLeft, as_json, error_of

PING = KEEPALIVE_COMMENT
"""A comment, so that nobody between takes a connection for dead on which nothing is sent for long."""
DONE = b"data: [DONE]\n\n"
Events = AsyncGenerator[bytes, None]


def event(content: Any, name: str | None = None) -> bytes:
    """One event as it goes over the wire; JSON has no line breaks, so its data is one line."""
    named = "" if name is None else f"event: {name}\n"
    return f"{named}data: {as_json(content)}\n\n".encode()


class EventStream(Response):
    """Events of a generator. An error that comes midway becomes the last of them."""

    def __init__(self, events: Events) -> None:
        super().__init__(media_type="text/event-stream", headers={"X-Accel-Buffering": "no"})
        del self.headers["content-length"]  # which nobody knows yet
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            await unless_left(Request(scope, receive), self._sent(send))
        except (ClientLeft, OSError):
            return
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _sent(self, send: Send) -> None:
        async with aclosing(self._events) as events:
            try:
                async for part in events:
                    await send({"type": "http.response.body", "body": part, "more_body": True})
            except (OSError, asyncio.CancelledError):
                raise
            except Exception as error:
                await send({"type": "http.response.body", "body": event(error_of(error).body()), "more_body": True})
