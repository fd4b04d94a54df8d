"""The app: all routes of a server behind its guard, and what is counted of every request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gsa import __version__
from gsa.serve import chat, completions, facts, page, responses, states
from gsa.serve.errors import CLIENT_LEFT, ApiError, add_handlers, response_of
from gsa.serve.guard import Guard
from gsa.serve.openapi import describe
from gsa.serve.serving import Serving


def make_app(serving: Serving, host: str = "127.0.0.1") -> ASGIApp:
    """The app of a server that listens on this host; any ASGI server runs it. It starts and ends the worker."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        serving.worker.start()
        yield
        serving.worker.close()

    app = FastAPI(
        title="gsa",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,  # they would be fetched from elsewhere
        redoc_url=None,
        openapi_url="/openapi.json",
    )
    add_handlers(app)
    app.router.routes.extend(routes_of(serving))
    describe(app)
    return _Counted(Guard(app, serving.settings, host), serving)


def routes_of(serving: Serving) -> list[BaseRoute]:
    """All routes of a server."""
    parts = [part.router(serving) for part in (completions, chat, responses, states, facts)]
    return [route for part in (*parts, page.router()) for route in part.routes]


class _Counted:
    """Counts requests and their time by route."""

    def __init__(self, app: ASGIApp, serving: Serving) -> None:
        self._app, self._metrics = app, serving.metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun, status = time.perf_counter(), CLIENT_LEFT

        async def sent(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, sent)
        except asyncio.CancelledError:  # by a server that stops, of what is neither done nor ended by the worker
            if status == CLIENT_LEFT:
                stopped = ApiError(503, "the server stopped before the answer was complete", code="draining")
                await response_of(stopped)(scope, receive, sent)
        finally:
            # The route's pattern, not the path: others could make any number of those.
            route = getattr(scope.get("route"), "path", "none")
            self._metrics.requests.labels(route, status).inc()
            self._metrics.seconds.labels(route).observe(time.perf_counter() - begun)
