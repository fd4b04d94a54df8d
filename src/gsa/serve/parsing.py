"""Bodies of requests: from the bytes that came to fields that are checked, without holding up other clients."""

from __future__ import annotations

import json
from typing import TypeVar

from fastapi import Request
from pydantic import ValidationError
from starlette.concurrency import run_in_threadpool

from gsa.serve.bodies import Body
from gsa.serve.errors import ApiError, validation_error
from gsa.terminal import quoted

Kind = TypeVar("Kind", bound=Body)
JSON = "application/json"
SMALL = 2**16
"""Bytes of a body that is checked sooner than a thread would begin to."""


def media_type(request: Request) -> str:
    """What a request says that its body is, without parameters."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


async def body_of(request: Request, kind: type[Kind], other: str = "") -> Kind:
    """The fields of a request's body; raises for the first that cannot be taken. `other` is what else may come here,
    for the error."""
    media = media_type(request)
    if media != JSON and not media.endswith("+json"):
        got = quoted(media) if media else "none"
        raise ApiError(415, f"expected a JSON object with Content-Type: {JSON}{other}, got {got}")
    content = await request.body()
    if len(content) <= SMALL:
        return _parsed(content, kind)
    return await run_in_threadpool(_parsed, content, kind)  # of a million messages it takes seconds


def _parsed(content: bytes, kind: type[Kind]) -> Kind:
    try:
        fields = json.loads(content)
    except RecursionError:
        raise ApiError(400, "the body is not JSON that can be read: brackets are nested too deep") from None
    except ValueError as error:  # also a number of thousands of digits, and what is no text
        raise ApiError(400, f"the body is not JSON: {error}") from None
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise validation_error(error) from None
