"""Runs a server until it is told to stop: then it takes no more requests, finishes those it has, and saves states.

A second signal stops at once.
"""

from __future__ import annotations

import asyncio
import math
import os
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType

import uvicorn

from gsa.errors import GSAError
from gsa.files import byte_count, named
from gsa.infer.text import TextEngine
from gsa.serve.app import make_app
from gsa.serve.connections import Connection, most_connections
from gsa.serve.guard import LOCAL
from gsa.serve.serving import Serving
from gsa.serve.settings import MEGABYTE, ServeSettings
from gsa.serve.store import StateStore

Say = Callable[[str], None]
LAST_SECONDS = 5.0
"""For telling clients that their answers were ended, before connections are cut."""


def open_serving(
    model: str, settings: ServeSettings, *, name: str | None, weights: str, compute: str, device: str, say: Say
) -> Serving:
    """A model with its states, ready to be served; `close` ends it."""
    folder = None if settings.state_dir is None else named(settings.state_dir, "state_dir")
    if folder is not None:
        _make_private(folder)
    share = settings.state_dir_mb * MEGABYTE // 2  # for states that have an id, and for those of the cache
    texts = TextEngine.load(
        model,
        weights,
        compute=compute,
        device=device,
        batch_size=settings.max_concurrency,
        state_cache_bytes=settings.cache_mb * MEGABYTE,
        state_dir=None if folder is None or not settings.cache_mb else folder / "cache",
        state_dir_bytes=share,
        say=say,
    )
    states = None if folder is None else folder / "states"
    store = StateStore(texts.engine.model, settings.state_mb * MEGABYTE, states, share, say)
    return Serving(texts, name or _short(model), settings, store)


def _make_private(folder: Path) -> None:
    """Closes the folders of states to other users: they hold what was said. What cannot be done is told by those who
    use them."""
    with suppress(OSError):
        folder.mkdir(0o700, parents=True, exist_ok=True)
        for part in (folder / "states", folder / "cache"):
            part.mkdir(0o700, exist_ok=True)
            part.chmod(0o700)  # if it is of an earlier server


def _short(model: str) -> str:
    """What clients call a model: its name, or the last part of its folder."""
    return Path(model).resolve().name if Path(model).exists() else model


class Server(uvicorn.Server):
    """A server that tells when it is ready, and to which the first signal is a wish and the second an order."""

    def __init__(
        self,
        config: uvicorn.Config,
        serving: Serving,
        ready: Callable[[], None] = lambda: None,
        say: Say = lambda text: None,
    ) -> None:
        super().__init__(config)
        self.signal: int | None = None
        self._serving, self._ready, self._say = serving, ready, say

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # Answers that are not done in time are ended here, so that their clients are told: uvicorn just cuts them off.
        ending = asyncio.get_running_loop().call_later(self._serving.settings.drain_seconds, self._serving.worker.end)
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._serving.worker.draining = True
        if self.signal is None:
            left = self._serving.worker.pending
            self._say(f"stopping: {left} answers are finished first; {signal.Signals(sig).name} again stops at once")
        self.force_exit = self.signal is not None
        self.signal, self.should_exit = sig, True


def config_of(serving: Serving, host: str) -> uvicorn.Config:
    """How a server speaks HTTP."""
    most = most_connections()
    return uvicorn.Config(
        make_app(serving, host),
        http=type("LimitedConnection", (Connection,), {"most": most}),
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        backlog=min(most, 128),  # so many are opened at once, before the first of them can be closed
        timeout_graceful_shutdown=math.ceil(serving.settings.drain_seconds + LAST_SECONDS),
    )


def run(serving: Serving, host: str, listener: socket.socket, say: Say) -> None:
    """Serves until a signal, and closes all; raises SystemExit if a second signal cut it short."""
    with listener:
        place = _address(host, listener.getsockname()[1])
        config = config_of(serving, host)
        if host not in LOCAL and serving.settings.api_key is None:
            say(f"everyone who can reach {host} may ask; GSA_API_KEY sets a key")
        server = Server(config, serving, lambda: _welcome(serving, place, say), say)
        try:
            server.run(sockets=[listener])
        except OSError as error:  # two servers can have one address until the first of them listens
            raise _cannot_listen(host, listener.getsockname()[1], error) from None
        finally:
            serving.close(write=not server.force_exit)
    if server.force_exit and server.signal is not None:
        raise SystemExit(128 + server.signal)


def bound(host: str, port: int) -> socket.socket:
    """A socket with its address, which is taken before a model is loaded: until it listens, nobody can connect."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        raise _cannot_listen(host, port, error) from None
    return listener


def _cannot_listen(host: str, port: int, error: Exception) -> GSAError:
    return GSAError(f"serve: cannot listen on {host} port {port}: {error}")


def _address(host: str, port: int) -> str:
    """What to type into a browser on this machine."""
    name = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{name}:{port}"


def _welcome(serving: Serving, place: str, say: Say) -> None:
    """Says what is served and what to type next."""
    model, settings = serving.texts.engine.model, serving.settings
    size = model.state_bytes
    state = "a state that grows with the text" if size is None else f"a state of {byte_count(size)}"
    say(
        f"{serving.name}: {model.num_parameters:,} parameters, {model.weights} weights, {state}; "
        f"{settings.max_concurrency} answers at a time"
    )
    say(f"page: {place}/" + ("" if settings.api_key is None else "  (any user name, and the API key as password)"))
    say(f"try:  {example(serving, place)}")


def example(serving: Serving, place: str) -> str:
    """A line for a shell that asks this server something."""
    settings = serving.settings
    name = "$GSA_API_KEY" if os.environ.get("GSA_API_KEY") == settings.api_key else "KEY"
    key = "" if settings.api_key is None else f' -H "Authorization: Bearer {name}"'
    if serving.template is None:
        tokens = min(50, settings.max_tokens)
        route, body = "completions", f'{{"prompt": "It was a dark and stormy night", "max_tokens": {tokens}}}'
    else:
        route, body = "chat/completions", '{"messages": [{"role": "user", "content": "What is the moon made of?"}]}'
    return f"curl {place}/v1/{route}{key} -H 'Content-Type: application/json' -d '{body}'"
