"""Errors as OpenAI's clients know them: {"error": {"message", "type", "param", "code"}} with a fitting status."""

from __future__ import annotations

import json
import logging
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from gsa.errors import GSAError, OutOfMemory
from gsa.terminal import quoted, shortened, shown

LOG = logging.getLogger("gsa.serve")

CLIENT_LEFT = 499
"""The status of a request whose client left, as nginx has it."""

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}
"""The type of an error by its status; all others are faults of the request."""
UNSUPPORTED = "unsupported_field"
"""Of pydantic's errors the one that says so of a field of OpenAI's; its context has the field's `name`."""


class ApiError(Exception):
    """An error that is told to a client, with the field it is about."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.headers = status, message, param, code, headers

    def body(self) -> dict[str, Any]:
        """What the client gets."""
        type_ = _TYPES.get(self.status, "invalid_request_error")
        message = shortened(shown(self.message))
        return {"error": {"message": message, "type": type_, "param": self.param, "code": self.code}}


class ClientLeft(Exception):
    """Nobody waits for the answer any more."""


class EngineFailed(GSAError):
    """The engine does not work any more, or failed at one request; the request is not to blame."""


class StorageFailed(GSAError):
    """The disk of the server is full or cannot be written; the request is not to blame. What failed is in the log."""


def refused(param: str, message: str, code: str | None = None) -> ApiError:
    """A field of a request that cannot be taken."""
    return ApiError(400, f"{param}: {message}", param=param, code=code)


def error_of(error: Exception) -> ApiError:
    """What a client is told of an error; of one that nobody foresaw, no more than that there was one."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, OutOfMemory):
        return ApiError(503, str(error), code="out_of_memory", headers={"Retry-After": "5"})
    if isinstance(error, EngineFailed):
        return ApiError(503, str(error), code="engine_failed")
    if isinstance(error, StorageFailed):
        return ApiError(503, str(error), code="storage_failed", headers={"Retry-After": "60"})
    if isinstance(error, GSAError):
        return ApiError(400, str(error))
    LOG.error("a request failed", exc_info=error)
    return ApiError(500, f"the server failed on this request ({type(error).__name__}); its log tells more")


_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
"""Made once: `json.dumps` would make one for every token that is sent."""


def as_json(content: Any) -> str:
    """JSON as it goes out, in which halves of surrogates are written as JSON writes them."""
    return _ENCODER.encode(content).encode("utf-8", "backslashreplace").decode()


class JsonResponse(Response):
    """An answer in JSON, which any text can stand in."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return as_json(content).encode()


def response_of(error: ApiError) -> JsonResponse:
    """The answer that tells an error."""
    return JsonResponse(error.body(), status_code=error.status, headers=error.headers)


def _of_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = shortened(shown(request.url.path), 200)
    told = {
        404: f"there is nothing at {path}",
        405: f"{request.method} is not for {path}",
        400: "the body cannot be read as JSON",
    }
    message = told.get(error.status_code, str(error.detail))
    return response_of(ApiError(error.status_code, message, headers=dict(error.headers or {})))


def validation_error(error: RequestValidationError | ValidationError) -> ApiError:
    """What a client is told of the first field that cannot be taken."""
    first = error.errors()[0]
    kind, got = first["type"], first.get("input")
    place = [str(part) for part in first["loc"] if part not in ("body", "query", "path")]
    if kind == UNSUPPORTED:
        place.append(first["ctx"]["name"])
    elif kind == "json_invalid":
        place = []  # where in the text, not in which field
    name = ".".join(place) or None
    said = first["msg"].removeprefix("Value error, ")
    if kind == "extra_forbidden":
        message = f"there is no field {place[-1]!r} here; docs/serving.md lists what is known and what is ignored"
    elif kind == UNSUPPORTED:
        message = f"{name} {said}"
    elif kind == "json_invalid":
        message = f"the body is not JSON: {first['ctx']['error']}"
    elif kind == "missing":
        message = f"{name or 'a body in JSON (Content-Type: application/json)'} is required"
    elif name is None and kind == "value_error":
        message = said
    elif name is None:
        message = f"expected a JSON object with Content-Type: application/json, got {quoted(got)}"
    else:
        message = f"{name}: {said[:1].lower()}{said[1:]}, got {quoted(got)}"
    return ApiError(400, message, param=name)


def _of_validation(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return response_of(validation_error(error))


def _of_any(request: Request, error: Exception) -> Response:
    return response_of(error_of(error))


def _of_nobody(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_LEFT)  # for the counters: nobody reads it


def add_handlers(app: FastAPI) -> None:
    """Has every error of an app told in this form."""
    app.add_exception_handler(HTTPException, _of_http)
    app.add_exception_handler(RequestValidationError, _of_validation)
    app.add_exception_handler(ClientLeft, _of_nobody)
    for kind in (ApiError, GSAError, Exception):
        app.add_exception_handler(kind, _of_any)
