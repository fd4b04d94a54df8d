"""/v1/states: what a model remembers, as resources. They never change; going on from one leaves it as it is."""

from __future__ import annotations

from typing import Any

import numpy as np
from fastapi import APIRouter, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from gsa.infer.reading import Prompt
from gsa.infer.state import State
from gsa.infer.text import Writing
from gsa.sampling import Sampling
from gsa.serve.asking import Asking, unless_left
from gsa.serve.bodies import StateBody
from gsa.serve.chat import told
from gsa.serve.errors import JsonResponse, refused
from gsa.serve.parsing import body_of, media_type
from gsa.serve.serving import Ids, Serving, saved
from gsa.serve.store import Conversation, Entry
from gsa.serve.streaming import DONE, Events, EventStream, event

FILE = "application/octet-stream"
"""The type of a state's file, to and from the server."""
PROGRESS_SECONDS = 0.2
"""Between two events that tell how much of a document is read."""


def facts_of(serving: Serving, entry: Entry) -> dict[str, Any]:
    """A state as clients get it."""
    conversation = entry.conversation
    return {
        "id": entry.id,
        "object": "state",
        "created": int(entry.created),
        "model": serving.name,
        "tokens": entry.tokens,
        "bytes": entry.nbytes,
        "name": entry.name,
        "messages": None if conversation is None else len(conversation.messages),
    }


class StateReading:
    """A state that is being made of a text, messages or ids."""

    def __init__(self, serving: Serving, body: StateBody) -> None:
        """Reads states, renders and encodes: not for the event loop."""
        self.serving, self.body = serving, body
        start = serving.start(body.state, body.cache_salt, keep=body.messages is not None)
        state = None if start is None else start.state
        self._conversation: Conversation | None = None
        if body.text is not None:
            param, ids = "text", serving.texts.encode(body.text, continues=start is not None)
        elif body.ids is not None:
            param, ids = "ids", _checked(body.ids, serving.texts.engine.model.vocab_size)
        else:
            messages = [message.plain() for message in body.messages or ()]
            found = told(serving, messages, start, body.cache_salt, answer=False)
            param, ids, state, self._conversation = "messages", found.ids, found.state, found.conversation
        self._before = 0 if state is None else state.tokens
        self._prompt: Prompt = serving.prompt(ids, state, param, salt=body.cache_salt)

    def asking(self) -> Asking:
        """Asks the engine; raises if the server is full."""
        return Asking(self.serving.worker, self.serving.metrics, [self._begun])

    def _begun(self) -> Writing:
        return self.serving.texts.stream(self._prompt, Sampling(max_tokens=0), keep_state=True)

    def progress(self) -> dict[str, int]:
        """How much is read, of how much."""
        return {"read": self._before + self._prompt.position, "tokens": self._before + len(self._prompt)}

    def keep(self, state: State) -> dict[str, Any]:
        """Gives the state an id. Not for the event loop."""
        body, counts = self.body, {"cached_tokens": self._before + self._prompt.cached_tokens}
        kept = self.serving.store.put(
            state, salt=body.cache_salt or "", name=body.name or "", conversation=self._conversation
        )
        return {**facts_of(self.serving, kept), **counts}


def _checked(ids: list[int], size: int) -> Ids:
    if not 0 <= min(ids) <= max(ids) < size:
        raise refused("ids", f"expected ids of tokens from 0 to {size - 1}, got {min(ids)} to {max(ids)}")
    return np.array(ids, np.int64)


async def _whole(reading: StateReading) -> dict[str, Any]:
    async with reading.asking() as asking:
        async for _ in asking.batches():
            pass
        return await run_in_threadpool(reading.keep, _kept(asking))


async def _streamed(reading: StateReading, asking: Asking) -> Events:
    async with asking:
        async for _ in asking.batches(PROGRESS_SECONDS):
            yield event({"object": "state.progress", **reading.progress()})
        yield event(await run_in_threadpool(reading.keep, _kept(asking)))
        yield DONE


def _kept(asking: Asking) -> State:
    state = asking.generation(0).kept
    assert state is not None
    return state


def router(serving: Serving) -> APIRouter:
    """The routes."""
    routes, store = APIRouter(), serving.store

    @routes.post("/v1/states")
    async def create(request: Request, cache_salt: str | None = None, name: str = "") -> Response:
        if media_type(request) == FILE:
            entry = await run_in_threadpool(_uploaded, serving, await request.body(), cache_salt, name[:200])
            return JsonResponse(facts_of(serving, entry), status_code=201)
        body = await body_of(request, StateBody, f", or the file of a state with {FILE}")
        body = _with_address(body, cache_salt, name)
        serving.check_model(body.model)
        serving.worker.check(1)
        reading = await run_in_threadpool(StateReading, serving, body)
        if body.stream:
            return EventStream(_streamed(reading, reading.asking()))
        return JsonResponse(await unless_left(request, _whole(reading)), status_code=201)

    @routes.get("/v1/states")
    def all_states(cache_salt: str | None = None) -> Response:
        data = [facts_of(serving, entry) for entry in store.list(cache_salt or "")]
        return JsonResponse({"object": "list", "data": data})

    @routes.get("/v1/states/{id}")
    def facts(id: str, cache_salt: str | None = None) -> Response:
        return JsonResponse(facts_of(serving, serving.entry(id, cache_salt, "id")))

    @routes.get("/v1/states/{id}/content")
    def content(id: str, cache_salt: str | None = None) -> Response:
        start = serving.start(id, cache_salt, "id")
        assert start is not None
        disposition = f'attachment; filename="{id}.safetensors"'
        return Response(
            saved(start.state, start.conversation), media_type=FILE, headers={"Content-Disposition": disposition}
        )

    @routes.delete("/v1/states/{id}")
    def delete(id: str, cache_salt: str | None = None) -> Response:
        store.remove(serving.entry(id, cache_salt, "id"))
        return JsonResponse({"id": id, "object": "state", "deleted": True})

    return routes


def _with_address(body: StateBody, salt: str | None, name: str) -> StateBody:
    """The fields with those that stand in the address; raises if a field stands in both, and differs."""
    for field, value in (("cache_salt", salt), ("name", name[:200])):
        if value:
            if getattr(body, field) not in (None, value):
                raise refused(field, "the address says another than the body")
            body = body.model_copy(update={field: value})
    return body


def _uploaded(serving: Serving, content: bytes, salt: str | None, name: str) -> Entry:
    state, conversation = serving.uploaded(content)
    return serving.store.put(state, salt=salt or "", name=name, conversation=conversation)
