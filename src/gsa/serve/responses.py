"""POST /v1/responses: OpenAI's newer form of a conversation. An earlier response that is named is a state.

The response resp_X has left the state state_X, unless it was not to be stored.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from gsa.infer.requests import Generation
from gsa.infer.text import Writing
from gsa.serve.asking import Asking, unless_left
from gsa.serve.bodies import ResponseBody
from gsa.serve.chat import Asked, asked
from gsa.serve.errors import ApiError, JsonResponse, error_of
from gsa.serve.parsing import body_of
from gsa.serve.serving import Serving, Start
from gsa.serve.streaming import PING, Events, EventStream, event

_RESPONSE, _STATE = "resp_", "state_"


class ModelResponse:
    """A response on its way."""

    def __init__(self, serving: Serving, body: ResponseBody) -> None:
        """Reads states, renders and encodes: not for the event loop."""
        self.serving, self.body = serving, body
        self.token, self.created = secrets.token_hex(16), int(time.time())
        self.asked = _asked(serving, body)
        self.sampling = serving.sampling(body, body.max_output_tokens, param="max_output_tokens")

    def asking(self) -> Asking:
        """Asks the engine; raises if the server is full."""
        return Asking(self.serving.worker, self.serving.metrics, [self._begun])

    def _begun(self) -> Writing:
        texts, keep = self.serving.texts, self.body.store
        return texts.stream(self.asked.prompt, self.sampling, keep_state=keep, continues=False)

    def keep(self, text: str, generation: Generation) -> None:
        """Keeps the state behind the response, if it is to be stored. Not for the event loop."""
        if generation.kept is not None:
            conversation = self.asked.answered(text, generation.tokens)
            salt, id_ = self.body.cache_salt or "", _STATE + self.token
            self.serving.store.put(generation.kept, salt=salt, conversation=conversation, id=id_)

    def message(self, text: str | None, status: str) -> dict[str, Any]:
        """The model's message; without a text, before it begins."""
        content = [] if text is None else [self.part(text)]
        known = {"type": "message", "id": f"msg_{self.token}", "role": "assistant"}
        return {**known, "status": status, "content": content}

    def part(self, text: str) -> dict[str, Any]:
        """The text of the message."""
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def told(self, status: str, text: str | None = None, generation: Generation | None = None) -> dict[str, Any]:
        """The response as clients get it."""
        body, asked = self.body, self.asked
        counts = None
        if generation is not None:
            plain = asked.usage(len(generation.tokens))
            counts = {
                "input_tokens": plain["prompt_tokens"],
                "input_tokens_details": plain["prompt_tokens_details"],
                "output_tokens": plain["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": plain["total_tokens"],
            }
        cut = status == "incomplete"
        return {
            "id": _RESPONSE + self.token,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata,
            "model": self.serving.name,
            "output": [] if text is None else [self.message(text, status)],
            "parallel_tool_calls": False,
            "previous_response_id": body.previous_response_id,
            "store": body.store,
            "temperature": self.sampling.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": "none",
            "tools": [],
            "top_p": self.sampling.top_p,
            "truncation": "disabled",
            "usage": counts,
        }


def _asked(serving: Serving, body: ResponseBody) -> Asked:
    """The conversation: the earlier response's, but its instructions, which hold for one response only."""
    start, instructions = _previous(serving, body), body.instructions
    earlier = None if start is None else start.conversation
    told = [] if instructions is None else [{"role": "system", "content": instructions}]
    if start is not None and earlier is not None:
        before = earlier.messages[: int(earlier.instructed)]
        if told != before:  # all is read anew, with other words at the beginning
            rest = earlier.messages[int(earlier.instructed) :]
            base = serving.base(earlier, body.cache_salt, "previous_response_id")
            start, told = base, [*told, *rest]
        else:
            told = []
    found = asked(serving, [*told, *body.input], start, body)
    return replace(found, conversation=replace(found.conversation, instructed=instructions is not None))


def _previous(serving: Serving, body: ResponseBody) -> Start | None:
    id_, param = body.previous_response_id, "previous_response_id"
    if id_ is None:
        return None
    if not id_.startswith(_RESPONSE):
        raise ApiError(404, f"there is no response {id_!r} here", param=param, code="previous_response_not_found")
    try:
        return serving.start(_STATE + id_.removeprefix(_RESPONSE), body.cache_salt, param)
    except ApiError:
        message = f"the response {id_!r} was not stored, or has made room for others"
        raise ApiError(404, message, param=param, code="previous_response_not_found") from None


def _status(reason: str | None) -> str:
    return "incomplete" if reason == "length" else "completed"


async def _whole(response: ModelResponse) -> dict[str, Any]:
    text, reason = [], None
    async with response.asking() as asking:
        async for pieces in asking.batches():
            for _, piece in pieces:
                text.append(piece.text)
                reason = piece.reason
        generation, said = asking.generation(0), "".join(text)
        await run_in_threadpool(response.keep, said, generation)
        return response.told(_status(reason), said, generation)


async def _streamed(response: ModelResponse, asking: Asking) -> Events:
    number = -1
    item = {"item_id": f"msg_{response.token}", "output_index": 0, "content_index": 0}

    def told(kind: str, **content: Any) -> bytes:
        nonlocal number
        number += 1
        return event({"type": kind, "sequence_number": number, **content}, kind)

    text: list[str] = []
    reason = None
    try:
        async with asking:
            yield told("response.created", response=response.told("in_progress"))
            yield told("response.in_progress", response=response.told("in_progress"))
            yield told("response.output_item.added", output_index=0, item=response.message(None, "in_progress"))
            yield told("response.content_part.added", **item, part=response.part(""))
            async for pieces in asking.batches():
                if not pieces:
                    yield PING
                reason = pieces[-1][1].reason if pieces else None
                delta = "".join(piece.text for _, piece in pieces)
                if delta:
                    text.append(delta)
                    yield told("response.output_text.delta", **item, delta=delta, logprobs=[])
            said, generation, status = "".join(text), asking.generation(0), _status(reason)
            await run_in_threadpool(response.keep, said, generation)
            yield told("response.output_text.done", **item, text=said, logprobs=[])
            yield told("response.content_part.done", **item, part=response.part(said))
            yield told("response.output_item.done", output_index=0, item=response.message(said, status))
            yield told(f"response.{status}", response=response.told(status, said, generation))
    except Exception as error:
        why = error_of(error)
        failed = {**response.told("failed"), "error": {"code": why.code or "server_error", "message": why.message}}
        yield told("response.failed", response=failed)


def router(serving: Serving) -> APIRouter:
    """The routes."""
    routes = APIRouter()

    @routes.post("/v1/responses")
    async def responses(request: Request) -> Response:
        body = await body_of(request, ResponseBody)
        serving.check_model(body.model)
        serving.worker.check(1)
        response = await run_in_threadpool(ModelResponse, serving, body)
        if body.stream:
            return EventStream(_streamed(response, response.asking()))
        return JsonResponse(await unless_left(request, _whole(response)))

    @routes.delete("/v1/responses/{id}")
    def delete(id: str, cache_salt: str | None = None) -> Response:
        state = _STATE + id.removeprefix(_RESPONSE)
        entry = serving.store.find(state, cache_salt or "") if id.startswith(_RESPONSE) else None
        if entry is None:
            raise ApiError(404, f"there is no response {id!r} here", param="id", code="response_not_found")
        serving.store.remove(entry)
        return JsonResponse({"id": id, "object": "response", "deleted": True})

    return routes
