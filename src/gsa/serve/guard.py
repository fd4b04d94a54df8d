"""What stands before every route: who may ask, from where, and how much. Nothing is answered to others.

With a key, a request brings it as `Authorization: Bearer KEY`, or as the password of HTTP's basic authentication (any
user name), which is how a browser asks for it before it shows the page.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import secrets
import time
from collections.abc import Awaitable, Callable
from urllib.parse import SplitResult, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gsa.errors import GSAError
from gsa.serve.errors import ApiError, response_of
from gsa.serve.settings import ServeSettings

LOCAL = ("localhost", "127.0.0.1", "::1")
_SAFE_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class Guard:
    """Lets through who has the key and no web page of others, counts bytes, and adds headers of safety and CORS.

    `host` is where the server listens. Where that is this machine only and there is no key, a name that is not this
    machine's is refused: a web site can have its own name lead here, and would then pass for our page.
    """

    def __init__(self, app: ASGIApp, settings: ServeSettings, host: str) -> None:
        self._app, self._settings = app, settings
        self._local = host in LOCAL and settings.api_key is None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            raise GSAError(f"serve: {scope['type']} is not spoken here")
        headers = Headers(scope=scope)
        allowed = headers.get("origin") if headers.get("origin") in self._settings.origins else None
        try:
            self._check_host(headers)
            if allowed is not None and scope["method"] == "OPTIONS":  # a browser asks whether it may ask
                asked = headers.get("access-control-request-headers", "Authorization, Content-Type")
                await _preflight(asked)(scope, receive, _with_headers(send, allowed))
                return
            self._check_key(headers)
            self._check_origin(headers)
            self._check_length(headers)
        except ApiError as error:
            await response_of(error)(scope, receive, _with_headers(send, allowed))
            return
        await self._app(scope, self._counted(receive), _with_headers(send, allowed))

    def _check_host(self, headers: Headers) -> None:
        host = headers.get("host")
        if self._local and host is not None and _parsed(f"//{host}").hostname not in LOCAL:
            raise ApiError(403, f"this server is for this machine only, and the request was sent to {host!r}")

    def _check_key(self, headers: Headers) -> None:
        key = self._settings.api_key
        if key is None:
            return
        given = _given_key(headers.get("authorization", ""))
        # Compared as bytes, in a time that does not depend on how much of it is right.
        if given is None or not secrets.compare_digest(given.encode(), key.encode()):
            told = "is missing" if given is None else "is not the right one"
            raise ApiError(
                401,
                f"the API key {told}: Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": 'Basic realm="gsa: any name, and the API key as password"'},
            )

    def _check_origin(self, headers: Headers) -> None:
        """Refuses pages of other sites: with the key that a browser remembers, they could act in its user's name."""
        origin = headers.get("origin")
        if origin is None or origin in self._settings.origins:
            return
        if _parsed(origin).netloc != headers.get("host"):
            raise ApiError(403, f"pages of {origin} may not ask here; --origins allows them")

    def _check_length(self, headers: Headers) -> None:
        length = headers.get("content-length", "0")
        if not (length.isascii() and length.isdigit()) or int(length[:20]) > self._settings.max_body_bytes:
            raise self._too_large()

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body is larger than {self._settings.max_body_mb} MB (--max-body-mb)")

    def _counted(self, receive: Receive) -> Receive:
        """The body as it comes, if it is not too large and not too slow."""
        left, until, complete = self._settings.max_body_bytes, time.monotonic() + self._settings.body_seconds, False

        async def counted() -> Message:
            nonlocal left, complete
            if complete:  # now it tells when the client leaves
                return await receive()
            try:
                message = await asyncio.wait_for(receive(), until - time.monotonic())
            except asyncio.TimeoutError:
                raise HTTPException(408, f"the body took more than {self._settings.body_seconds:g} seconds") from None
            left -= len(message.get("body", b""))
            complete = message["type"] != "http.request" or not message.get("more_body", False)
            if left < 0:
                raise HTTPException(413, self._too_large().message)
            return message

        return counted


def _parsed(address: str) -> SplitResult:
    """The parts of an address from a header; of what is none, nothing."""
    try:
        return urlsplit(address)
    except ValueError:
        return urlsplit("")


def _given_key(authorization: str) -> str | None:
    """The key of an Authorization header; None if it has none."""
    scheme, _, value = authorization.partition(" ")
    if scheme.lower() == "bearer":
        return value.strip()
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(value.strip(), validate=True).decode().partition(":")[2]
        except (binascii.Error, ValueError):
            return None
    return None


def _preflight(asked: str) -> Response:
    """Allows the headers that a page wants to send: a client of OpenAI's tells of itself in a dozen of its own."""
    return Response(
        status_code=204,
        headers={
            "Access-Control-Allow-Methods": "GET, POST, DELETE",
            "Access-Control-Allow-Headers": asked,
            "Access-Control-Max-Age": "600",
        },
    )


def _with_headers(send: Send, origin: str | None) -> Callable[[Message], Awaitable[None]]:
    """Adds headers to what is sent; `origin` is a site whose pages may read it."""

    async def sent(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in _SAFE_HEADERS.items():
                headers.setdefault(name, value)
            headers.setdefault("Cache-Control", "no-store")
            if origin is not None:
                headers["Access-Control-Allow-Origin"] = origin
                headers["Cross-Origin-Resource-Policy"] = "cross-origin"
                headers.add_vary_header("Origin")
        await send(message)

    return sent
