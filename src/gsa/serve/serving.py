"""Serving: what all routes of a server share, and how the fields of a request become what the engine takes."""

from __future__ import annotations

import base64
import binascii
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from gsa import templates
from gsa.data.chat_template import ChatTemplate
from gsa.errors import GSAError
from gsa.files import parse_json
from gsa.infer.reading import Prompt
from gsa.infer.state import State
from gsa.infer.state_cache import CacheReport, StateCache
from gsa.infer.state_dir import DirReport
from gsa.infer.state_file import MAX_NOTE
from gsa.infer.text import ADVISED, TextEngine
from gsa.sampling import Sampling
from gsa.serve.bodies import AnswerBody, ChatMessage, ChoicesBody, ResponseBody
from gsa.serve.errors import ApiError, as_json, refused, validation_error
from gsa.serve.metrics import Metrics
from gsa.serve.settings import ServeSettings
from gsa.serve.store import BROUGHT, Conversation, Entry, StateStore, conversation_of
from gsa.serve.worker import Worker

Ids = NDArray[np.int64]
OPENAI = {"temperature": 1.0, "top_p": 1.0}
"""What clients of OpenAI's interface expect where nobody says anything."""


@dataclass(frozen=True)
class Start:
    """What a prompt goes on from: a state, and what is known of it."""

    state: State
    conversation: Conversation | None = None
    """What of it is a conversation."""
    id: str = BROUGHT
    """Its id, unless the client has brought the state itself, and it was not kept."""


class Serving:
    """A model with its engine, its worker and its states."""

    def __init__(self, texts: TextEngine, name: str, settings: ServeSettings, store: StateStore) -> None:
        self.texts, self.name, self.settings, self.store = texts, name, settings, store
        self.created = int(time.time())
        self.metrics = Metrics()
        limit = settings.max_concurrency + settings.max_queue
        self.worker = Worker(texts.engine.step, limit, settings.events_per_second)
        try:
            self.template: ChatTemplate | None = ChatTemplate.of(texts.tokenizer)
            templates.start()
        except GSAError:
            self.template = None
        self._add_gauges()

    def close(self, *, write: bool = True) -> None:
        """Ends the worker, and saves what is to be saved, unless there is no time for it: states that have an id are
        on the disk already."""
        self.worker.close()
        self.texts.engine.close(write=write)
        self.store.close()

    def check_model(self, name: str | None) -> None:
        """Raises if a client asks for another model."""
        if name is not None and name != self.name:
            raise ApiError(
                404, f"there is no model {name!r} here, only {self.name!r}", param="model", code="model_not_found"
            )

    def chat_template(self, param: str) -> ChatTemplate:
        """The model's chat template; raises if it has none. `param` is the field with messages."""
        if self.template is None:
            raise ApiError(
                400,
                f"{self.name} has no chat template: it was not made for conversations; /v1/completions continues texts",
                param=param,
                code="no_chat_template",
            )
        return self.template

    def prompt(
        self,
        ids: Ids,
        state: State | None,
        param: str,
        *,
        salt: str | None,
        reuse: bool = True,
        logprobs: int | None = None,
        marks: Sequence[int] = (),
    ) -> Prompt:
        """What the engine reads for an answer; `param` is the field that it came in. A state is kept where messages
        end, and after as many tokens as each of `marks` says."""
        limit = self.settings.max_prompt_tokens
        if len(ids) > limit:
            raise refused(
                param, f"{len(ids):,} tokens, and this server reads {limit:,} at most", "context_length_exceeded"
            )
        if not len(ids) and state is None:
            raise refused(param, "it is empty, and there is no state to go on from")
        if max(marks, default=0) > len(ids):
            raise refused("cache_marks", f"{max(marks)} is behind the end of a prompt of {len(ids)} tokens")
        texts = self.texts
        try:
            return texts.engine.prompt(
                ids,
                state=state,
                marks=[*marks, *texts.message_ends(ids)],
                salt=salt or "",
                reuse=reuse,
                logprobs=logprobs,
            )
        except GSAError as error:
            raise refused(param, str(error)) from None

    def sampling(
        self, body: AnswerBody, max_tokens: int | None, logprobs: int | None = None, param: str = "max_tokens"
    ) -> Sampling:
        """How an answer is chosen: as the request says, with OpenAI's defaults. A request that says nothing of it, no
        temperature or the like, is answered as the model's makers advise. `param` is the field with `max_tokens`."""
        limit = self.settings.max_tokens
        if max_tokens is not None and max_tokens > limit:
            raise refused(param, f"{max_tokens:,} were asked for, and an answer here has {limit:,} at most")
        asked = body.model_dump(include=set(ADVISED), exclude_none=True)
        plain = Sampling(
            **{**OPENAI, **asked}, max_tokens=limit if max_tokens is None else max_tokens, logprobs=logprobs
        )
        if not asked:
            plain = self.texts.as_advised(plain, {})
        if isinstance(body, ChoicesBody | ResponseBody) and body.seed is not None:
            plain = replace(plain, seed=body.seed % 2**64)
        if isinstance(body, ChoicesBody):
            size = self.texts.engine.model.vocab_size
            for id_ in body.logit_bias:
                if id_ >= size:
                    raise refused("logit_bias", f"there is no token {id_}, the vocabulary ends with {size - 1}")
            plain = replace(
                plain,
                presence_penalty=body.presence_penalty,
                frequency_penalty=body.frequency_penalty,
                logit_bias=body.logit_bias,
            )
        return plain

    def start(
        self, wish: str | dict[str, str] | None, salt: str | None, param: str = "state", *, keep: bool = False
    ) -> Start | None:
        """The state that a request names or brings, if it does; `keep` gives an id to one that it brings."""
        if wish is None:
            return None
        if isinstance(wish, dict):
            state, conversation = self.uploaded(_decoded(wish["base64"]))
            if conversation is not None or not keep:  # what a conversation stands behind, it says itself
                return Start(state, conversation)
            return Start(state, None, self.store.put(state, salt=salt or "").id)
        entry = self.entry(wish, salt, param)
        try:
            return Start(self.store.load(entry), entry.conversation, entry.id)
        except GSAError as error:
            raise ApiError(404, str(error), param=param, code="state_not_found") from None

    def base(self, conversation: Conversation, salt: str | None, param: str = "state") -> Start | None:
        """The state that a conversation stands behind, if it does, for one that has to be read anew."""
        if conversation.behind == BROUGHT:
            message = (
                "the conversation has to be read anew, and the state that it began behind was brought and not kept; "
                "give that state an id (POST /v1/states), and begin behind it"
            )
            raise refused(param, message, "state_not_found")
        return self.start(conversation.behind, salt, param)

    def entry(self, id_: str, salt: str | None, param: str = "state") -> Entry:
        """What is known of a state; raises if there is none."""
        entry = self.store.find(id_, salt or "")
        if entry is None:
            raise ApiError(404, f"there is no state {id_!r} here", param=param, code="state_not_found")
        return entry

    def uploaded(self, content: bytes) -> tuple[State, Conversation | None]:
        """The state in the bytes of a file, and its conversation if it is of one, checked as every file is."""
        with tempfile.TemporaryDirectory(prefix="gsa-") as folder:
            path = Path(folder) / "state"
            path.write_bytes(content)
            try:
                state, note = State.load_noted(path, self.texts.engine.model)
                return state, _noted(note, self.texts.engine.model.vocab_size) if note else None
            except GSAError as error:
                raise refused("state", str(error).removeprefix(f"State.load: {path}: "), "bad_state") from None

    def give_state(
        self, state: State, form: str | None, salt: str | None, conversation: Conversation | None = None
    ) -> dict[str, Any] | None:
        """A state as an answer tells it: its id or its file, with what is known of it."""
        if form is None:
            return None
        facts = {"tokens": state.tokens, "bytes": state.nbytes}
        if form == "base64":
            return {"base64": base64.b64encode(saved(state, conversation)).decode(), **facts}
        return {"id": self.store.put(state, salt=salt or "", conversation=conversation).id, **facts}

    def _add_gauges(self) -> None:
        places, worker, store = self.settings.max_concurrency, self.worker, self.store
        gauge = self.metrics.gauge
        gauge("gsa_running", "Answers that are written.").set_function(lambda: min(worker.pending, places))
        gauge("gsa_waiting", "Answers that wait for a place.").set_function(lambda: max(worker.pending - places, 0))
        gauge("gsa_states", "States that have an id.").set_function(lambda: len(store))
        gauge("gsa_state_bytes", "Bytes of the states that have an id.").set_function(lambda: store.stored)
        gauge("gsa_state_memory_bytes", "Bytes of those that are in memory.").set_function(lambda: store.memory)
        cache = self.texts.engine.cache
        if cache is not None:
            for name in (field.name for field in fields(CacheReport) if field.name != "disk"):
                what = f"Of the cache of states: {name.replace('_', ' ')}."
                gauge(f"gsa_cache_{name}", what).set_function(partial(_reported, cache, name))
            for name in (field.name for field in fields(DirReport)):
                what = f"Of the cache of states on disk: {name.replace('_', ' ')}."
                gauge(f"gsa_cache_disk_{name}", what).set_function(partial(_reported_of_disk, cache, name))


def _reported(cache: StateCache, name: str) -> float:
    return float(getattr(cache.report(), name))


def _reported_of_disk(cache: StateCache, name: str) -> float:
    return float(getattr(cache.report().disk, name))


def saved(state: State, conversation: Conversation | None = None) -> bytes:
    """The file of a state, with its conversation if it is of one: without, a chat could not go on from it."""
    with tempfile.TemporaryDirectory(prefix="gsa-") as folder:
        path = Path(folder) / "state"
        state.save(path, note="" if conversation is None else as_json(asdict(conversation)))
        return path.read_bytes()


def check_room(conversation: Conversation) -> None:
    """Raises if a conversation is so long that the file of a state has no room for it and an answer."""
    length, most = len(json.dumps(as_json(asdict(conversation)))), MAX_NOTE * 7 // 8
    if length > most:
        raise refused(
            "return_state", f"the conversation has {length:,} bytes, a file has room for {most:,}; ask for an id"
        )


def _noted(note: str, vocab_size: int) -> Conversation:
    """The conversation that was saved with a state. Its client may have written it: all is checked that a request
    would be checked for."""
    found = conversation_of(parse_json(note, "conversation"), "conversation")
    ids, last = found.reply, found.messages[-1]["role"] if found.messages else None
    if not found.messages or (ids is not None and last != "assistant"):
        raise GSAError("conversation: expected messages, of which the last is the assistant's if it was written")
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        raise GSAError(f"conversation: expected ids of tokens from 0 to {vocab_size - 1} as its reply")
    try:
        for message in found.messages:
            ChatMessage.model_validate(message)
    except ValidationError as error:
        raise GSAError(f"conversation: {validation_error(error).message}") from None
    return found


def usage(prompt_tokens: int, cached_tokens: int, written: int) -> dict[str, Any]:
    """Counts of tokens as completions tell them."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": written,
        "total_tokens": prompt_tokens + written,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def summed(usages: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The counts of several prompts together."""
    cached = sum(each["prompt_tokens_details"]["cached_tokens"] for each in usages)
    return usage(
        sum(each["prompt_tokens"] for each in usages), cached, sum(each["completion_tokens"] for each in usages)
    )


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise refused("state", "its base64 cannot be read", "bad_state") from None
