"""/openapi.json: what every route takes and gives, for machines. Bodies are checked by ourselves (`parsing.py`), so
they are described here."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from gsa.serve.bodies import Body, ChatBody, CompletionBody, ResponseBody, StateBody

BODIES: dict[str, type[Body]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/v1/responses": ResponseBody,
    "/v1/states": StateBody,
}
_PLACE = "#/components/schemas/"
_TEXT = {"anyOf": [{"type": "string"}, {"type": "null"}]}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {"message": {"type": "string"}, "type": {"type": "string"}, "param": _TEXT, "code": _TEXT},
        }
    },
}


def describe(app: FastAPI) -> None:
    """Has an app tell of its routes in this way."""

    def described() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _description(app)
        return app.openapi_schema

    app.openapi = described  # type: ignore[method-assign]


def _description(app: FastAPI) -> dict[str, Any]:
    told = get_openapi(title=app.title, version=app.version, routes=app.routes)
    _, kinds = models_json_schema([(kind, "validation") for kind in BODIES.values()], ref_template=_PLACE + "{model}")
    told["components"] = {"schemas": {"Error": _ERROR, **kinds["$defs"]}}
    for path, methods in told["paths"].items():
        for method, operation in methods.items():
            # FastAPI tells of 422 for what it would refuse; errors of any status have one form here.
            operation["responses"].pop("422", None)
            operation["responses"]["default"] = {"description": "An error", "content": _json("Error")}
            if method == "post":
                operation["requestBody"] = {"required": True, "content": _content(path)}
    return told


def _content(path: str) -> dict[str, Any]:
    content = _json(BODIES[path].__name__)
    if BODIES[path] is StateBody:  # or the file of one
        content["application/octet-stream"] = {"schema": {"type": "string", "format": "binary"}}
    return content


def _json(kind: str) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": _PLACE + kind}}}
