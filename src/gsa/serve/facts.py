"""What a server tells of itself: its model, whether it is well, and its counters."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from fastapi.routing import APIRoute
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from gsa import __version__
from gsa.serve.errors import ApiError, JsonResponse
from gsa.serve.serving import Serving


def model_facts(serving: Serving) -> dict[str, Any]:
    """The model as /v1/models tells it: OpenAI's fields, and ours."""
    model, settings = serving.texts.engine.model, serving.settings
    return {
        "id": serving.name,
        "object": "model",
        "created": serving.created,
        "owned_by": "gsa",
        "chat": serving.template is not None,
        "parameters": model.num_parameters,
        "weights": model.weights,
        "state_bytes": model.state_bytes,
        "sampling": serving.texts.advised,  # what the model's makers advise
        "max_tokens": settings.max_tokens,
        "max_prompt_tokens": settings.max_prompt_tokens,
    }


def router(serving: Serving) -> APIRouter:
    """The routes."""
    routes = APIRouter()

    @routes.get("/v1/models")
    def models() -> Response:
        return JsonResponse({"object": "list", "data": [model_facts(serving)]})

    @routes.get("/v1/models/{id:path}")
    def model(id: str) -> Response:
        serving.check_model(id)
        return JsonResponse(model_facts(serving))

    @routes.get("/health")
    def health() -> Response:
        worker = serving.worker
        try:
            worker.check(0)
            status = "ok"
        except ApiError as error:
            status = error.code or "failed"
        known = {"status": status, "model": serving.name, "version": __version__, "pending": worker.pending}
        return JsonResponse(known, status_code=200 if status == "ok" else 503)

    @routes.get("/metrics")
    def metrics() -> Response:
        return Response(serving.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    for route in [route for route in routes.routes if isinstance(route, APIRoute)]:
        routes.add_api_route(route.path, route.endpoint, methods=["HEAD"], include_in_schema=False)
    return routes
