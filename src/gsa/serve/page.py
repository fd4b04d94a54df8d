"""The page: static files of the package, and the headers that keep it from running anything else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fastapi import APIRouter
from starlette.responses import Response

POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ]
)
"""Scripts and styles of this server alone, nothing inline, no frames: text of a model can never become a program."""
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


def router() -> APIRouter:
    """The routes: `/` and a route for each file."""
    routes = APIRouter()
    for path in sorted((Path(__file__).parent / "static").iterdir()):
        place = "/" if path.name == "index.html" else f"/static/{path.name}"
        routes.add_api_route(place, _giver(path), methods=["GET", "HEAD"], include_in_schema=False)
    return routes


def _giver(path: Path) -> Callable[[], Response]:
    content, type_ = path.read_bytes(), _TYPES[path.suffix]

    def give() -> Response:
        headers = {"Content-Security-Policy": POLICY, "Cache-Control": "no-cache", "X-Frame-Options": "DENY"}
        return Response(content, media_type=f"{type_}; charset=utf-8", headers=headers)

    return give
