"""Connections: how many there may be, how long one may take until the head of its request has come, and how long until
its client has read what was sent."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS = 10.0
"""Until all of a request's head has come; a client that has something to ask sends it at once."""
READ_SECONDS = 120.0
"""Until a client has read what waits to be sent, if that is more than the few ten thousand bytes that may wait."""
FILES = 64
"""Open files that a server needs for itself."""
FULL = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


def most_connections() -> int:
    """Connections that there may be: as many as the system lets a process have files, with room for those that come
    before others are closed."""
    try:
        import resource
    except ImportError:  # Windows, which has no such limit
        return 1024
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 4096 if most == resource.RLIM_INFINITY else min(max((most - FILES) // 2, 8), 4096)


class Connection(H11Protocol):
    """A connection that is closed if the head of a request does not come soon, and sooner if there are too many; and
    one whose client does not read what it has asked for, and so holds an answer for ever.

    Where there are, the one makes room that has sent no request for longest: a client that asks is never shut out by
    those that do not.
    """

    most = 4096
    """Of all connections together."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._timer: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None
        self._since = time.monotonic()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.most and not self._made_room():
            transport.write(FULL)
            transport.close()
            return
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_watching()
        self._was_read()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._unread is None:
            self._unread = self.loop.call_later(READ_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        self._was_read()
        super().resume_writing()

    def _was_read(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    @property
    def _silent(self) -> bool:
        """Whether it has no request that is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def _made_room(self) -> bool:
        """Closes the connection that is silent for longest, if there is another one that is."""
        others = min(self._silent_others(), key=lambda each: each._since, default=None)
        if others is None:
            return False
        others.transport.abort()
        self.connections.discard(others)
        return True

    def _silent_others(self) -> Iterator[Connection]:
        for each in self.connections:
            if isinstance(each, Connection) and each is not self and each._silent:
                yield each

    def _watch(self) -> None:
        """Sets the timer while a head is waited for. More bytes of it do not put the end off."""
        if not self._silent:
            self._stop_watching()
        elif self._timer is None:
            self._since = time.monotonic()
            self._timer = self.loop.call_later(HEAD_SECONDS, self._end)

    def _stop_watching(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end(self) -> None:
        self._timer = None
        if self._silent and not self.transport.is_closing():
            self.transport.close()
