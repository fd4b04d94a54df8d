"""A streaming client of a server on this machine, as light as can be: it runs beside the server that is measured."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from types import TracebackType
from typing import Any

from gsa.errors import GSAError

HOST = "127.0.0.1"
MAX_READ = 2**16


class Connection:
    """One connection, kept open from request to request; use it as a context, asynchronous."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def __aenter__(self) -> Connection:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends it; the next request begins another."""
        if self._writer is not None:
            self._writer.close()
        self._reader = self._writer = None

    async def get(self, path: str) -> bytes:
        """What there is at a path."""
        return b"".join([part async for part in self._parts("GET", path, b"")])

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        """The answer to a body, all of it."""
        return json.loads(b"".join([part async for part in self._parts("POST", path, json.dumps(body).encode())]))

    async def stream(self, path: str, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """The server-sent events of an answer as they come; raises if one of them is an error, or the last is not
        [DONE]."""
        rest, done = b"", False
        async for part in self._parts("POST", path, json.dumps({**body, "stream": True}).encode()):
            *lines, rest = (rest + part).split(b"\n")
            for line in lines:
                data = line.strip().removeprefix(b"data:").strip() if line.startswith(b"data:") else b""
                if data == b"[DONE]":
                    done = True
                elif data:
                    event = json.loads(data)
                    if "error" in event:
                        raise GSAError(f"the answer ended with an error: {event['error']}")
                    yield event
        if not done:
            raise GSAError("the answer ended in the midst")

    async def _parts(self, method: str, path: str, body: bytes) -> AsyncGenerator[bytes, None]:
        """The body of an answer in the parts that it comes in; the connection is closed unless all of it was taken."""
        whole = False
        try:
            reader, writer = await self._open()
            head = f"{method} {path} HTTP/1.1\r\nHost: {HOST}:{self._port}\r\nContent-Type: application/json\r\n"
            writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            status, headers = await _head(reader)
            parts = _chunks(reader) if headers.get("transfer-encoding") == "chunked" else _sized(reader, headers)
            if status != 200:
                said = b"".join([part async for part in parts])
                raise GSAError(f"{method} {path}: status {status}: {said[:500].decode('utf-8', 'replace')}")
            async for part in parts:
                yield part
            whole = headers.get("connection") != "close"
        finally:
            if not whole:
                self.close()

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._reader is None or self._writer is None or self._reader.at_eof():
            self.close()
            self._reader, self._writer = await asyncio.open_connection(HOST, self._port)
        return self._reader, self._writer


async def _head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    """The status of an answer, and its headers with small letters."""
    lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    pairs = (line.partition(":") for line in lines[1:] if line)
    return int(lines[0].split(" ")[1]), {name.lower(): value.strip().lower() for name, _, value in pairs}


async def _chunks(reader: asyncio.StreamReader) -> AsyncGenerator[bytes, None]:
    """The parts of a body that tells their sizes; all that has come by now is read at once, for there are many."""
    held = b""
    while True:
        head, found, rest = held.partition(b"\r\n")
        size = int(head.partition(b";")[0], 16) if found else 0
        if found and len(rest) >= size + 2:
            if size == 0:
                return
            yield rest[:size]
            held = rest[size + 2 :]
            continue
        more = await reader.read(MAX_READ)
        if not more:
            raise EOFError("the connection ended in the midst of an answer")
        held += more


async def _sized(reader: asyncio.StreamReader, headers: dict[str, str]) -> AsyncGenerator[bytes, None]:
    yield await reader.readexactly(int(headers.get("content-length", 0)))
