"""POST /v1/chat/completions: conversations, whole or behind a state."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from gsa.data.chat_template import ChatTemplate, Message, Segment
from gsa.infer.chat import rest_of, with_reply
from gsa.infer.reading import Prompt
from gsa.infer.requests import Token
from gsa.infer.state import State
from gsa.infer.text import Piece, Writing
from gsa.sampling import Sampling
from gsa.serve.asking import Asking, unless_left
from gsa.serve.bodies import AnswerBody, ChatBody, ResponseBody
from gsa.serve.errors import JsonResponse, refused
from gsa.serve.logprobs import chat_logprobs
from gsa.serve.parsing import body_of
from gsa.serve.serving import Ids, Serving, Start, check_room, usage
from gsa.serve.store import Conversation
from gsa.serve.streaming import DONE, PING, Events, EventStream, event


@dataclass(frozen=True)
class Asked:
    """A conversation that waits for the model's next message."""

    prompt: Prompt
    before: int
    """Tokens of the state that it goes on from."""
    conversation: Conversation
    """All messages, and what they stand behind."""

    def usage(self, written: int) -> dict[str, Any]:
        """Counts of tokens; those of the state did not have to be read."""
        prompt = self.prompt
        return usage(self.before + len(prompt), self.before + prompt.cached_tokens, written)

    def answered(self, text: str, ids: list[int]) -> Conversation:
        """The conversation with the model's answer."""
        messages = [*self.conversation.messages, {"role": "assistant", "content": text}]
        return replace(self.conversation, messages=messages, reply=list(ids))


@dataclass(frozen=True)
class Told:
    """What of a conversation the model has to read."""

    ids: Ids
    state: State | None
    """What the ids go on from."""
    conversation: Conversation
    """All of it."""


def told(
    serving: Serving,
    messages: list[Message],
    start: Start | None,
    salt: str | None,
    *,
    answer: bool = True,
    param: str = "messages",
) -> Told:
    """What has to be read so that `messages` of the field `param` go on from `start`, up to where an answer begins
    unless there is to be none. Not for the event loop.

    What a state has read is not read again, unless the template tells the past differently later; then all is read
    from where the conversation began.
    """
    template = serving.chat_template(param)
    render = template.render if answer else partial(without_answer, template)
    earlier = None if start is None else start.conversation
    state = None if start is None else start.state
    if not messages and (earlier is None or earlier.reply is not None):
        raise refused(param, "there is none that could be answered")
    rest: list[Segment] | None
    after: Segment | None
    if earlier is None:
        behind = None if start is None else start.id
        rest, after = render(messages), None if start is None else ""
    else:
        behind, messages = earlier.behind, [*earlier.messages, *messages]
        whole, read = render(messages), read_segments(template, earlier)
        rest, after = rest_of(whole, read), read[-1]
        if rest is None:
            base = serving.base(earlier, salt)
            state = None if base is None else base.state
            rest, after = whole, None if base is None else ""
    return Told(template.encode(rest, after), state, Conversation(messages, None, behind))


def asked(serving: Serving, messages: list[Message], start: Start | None, body: AnswerBody) -> Asked:
    """The question that messages ask which go on from `start`. Not for the event loop."""
    param = "input" if isinstance(body, ResponseBody) else "messages"
    found = told(serving, messages, start, body.cache_salt, param=param)
    prompt = serving.prompt(found.ids, found.state, param, salt=body.cache_salt, reuse=body.cache)
    return Asked(prompt, 0 if found.state is None else found.state.tokens, found.conversation)


def read_segments(template: ChatTemplate, conversation: Conversation) -> list[Segment]:
    """What a model has read of a conversation that is kept."""
    if conversation.reply is None:
        return without_answer(template, conversation.messages)
    return with_reply(template, template.render(conversation.messages[:-1]), conversation.reply)


def without_answer(template: ChatTemplate, messages: list[Message]) -> list[Segment]:
    """A conversation without the beginning of an answer: all that is the same if another message of the user follows.

    Text that differs is cut behind the last line end before that.
    """
    ended, goes_on = template.render(messages), template.render([*messages, {"role": "user", "content": "?"}])
    same: list[Segment] = []
    for one, other in zip(ended, goes_on, strict=False):
        if one == other:
            same.append(one)
            continue
        if isinstance(one, str) and isinstance(other, str):
            count = next((i for i, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), len(one))
            same += filter(None, [one[: one.rfind("\n", 0, count) + 1]])
        break
    if not same:
        raise refused("messages", "the model's chat template tells nothing of them before an answer begins")
    return same


@dataclass
class Choice:
    """One answer on its way."""

    sampling: Sampling
    text: list[str] = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list)
    sent: tuple[int, int] = (0, 0)
    """Pieces and tokens of it that were sent."""
    reason: str | None = None

    def take(self, piece: Piece) -> None:
        self.text.append(piece.text)
        self.reason = piece.reason
        if piece.token is not None:
            self.tokens.append(piece.token)

    def new(self) -> tuple[str, list[Token]]:
        """What has come since the last time."""
        text, tokens = self.sent
        self.sent = len(self.text), len(self.tokens)
        return "".join(self.text[text:]), self.tokens[tokens:]


class ChatCompletion:
    """The answers that one request asks for."""

    def __init__(self, serving: Serving, body: ChatBody) -> None:
        """Reads states, renders and encodes: not for the event loop."""
        self.serving, self.body = serving, body
        if None not in (body.max_tokens, body.max_completion_tokens):
            raise refused("max_tokens", "it is the old name of max_completion_tokens, and both were given")
        start = serving.start(body.state, body.cache_salt, keep=body.return_state == "id")
        self.asked = asked(serving, [message.plain() for message in body.messages], start, body)
        if body.return_state == "base64":
            check_room(self.asked.conversation)
        name = "max_completion_tokens" if body.max_tokens is None else "max_tokens"
        alternatives = (body.top_logprobs or 0) if body.logprobs else None
        sampling = serving.sampling(body, getattr(body, name), alternatives, name)
        self.choices = [Choice(each) for each in sampling.several(body.n)]
        self.facts = {
            "id": f"chatcmpl-{secrets.token_hex(12)}",
            "object": "chat.completion.chunk" if body.stream else "chat.completion",
            "created": int(time.time()),
            "model": serving.name,
        }

    def asking(self) -> Asking:
        """Asks the engine; raises if the server is full."""
        starts = [lambda choice=choice: self._begun(choice) for choice in self.choices]
        return Asking(self.serving.worker, self.serving.metrics, starts)

    def _begun(self, choice: Choice) -> Writing:
        keep = self.body.return_state is not None
        return self.serving.texts.stream(
            self.asked.prompt, choice.sampling, stop=self.body.stop, keep_state=keep, continues=False
        )

    def logprobs(self, tokens: list[Token]) -> dict[str, Any] | None:
        """Log-probabilities, if they were asked for."""
        return chat_logprobs(self.serving.texts.tokenizer, tokens) if self.body.logprobs else None

    async def state(self, asking: Asking, index: int) -> dict[str, Any]:
        """The state behind an answer, if it was asked for."""
        generation, body = asking.generation(index), self.body
        if body.return_state is None or generation.kept is None:
            return {}
        conversation = self.asked.answered("".join(self.choices[index].text), generation.tokens)
        return {"state": await run_in_threadpool(_given, self.serving, generation.kept, body, conversation)}

    def usage(self, asking: Asking) -> dict[str, Any]:
        return self.asked.usage(sum(len(asking.generation(i).tokens) for i in range(len(self.choices))))


def _given(serving: Serving, state: State, body: ChatBody, conversation: Conversation) -> dict[str, Any] | None:
    return serving.give_state(state, body.return_state, body.cache_salt, conversation)


async def _whole(chat: ChatCompletion) -> dict[str, Any]:
    async with chat.asking() as asking:
        async for pieces in asking.batches():
            for index, piece in pieces:
                chat.choices[index].take(piece)
        choices = []
        for index, choice in enumerate(chat.choices):
            message = {"role": "assistant", "content": "".join(choice.text), "refusal": None}
            logprobs = chat.logprobs(choice.tokens)
            known = {"index": index, "message": message, "logprobs": logprobs, "finish_reason": choice.reason}
            choices.append({**known, **await chat.state(asking, index)})
        return {**chat.facts, "choices": choices, "usage": chat.usage(asking)}


async def _streamed(chat: ChatCompletion, asking: Asking) -> Events:
    def chunk(index: int, delta: dict[str, str], **more: Any) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **more}
        return event({**chat.facts, "choices": [choice]})

    async with asking:
        for index in range(len(chat.choices)):
            yield chunk(index, {"role": "assistant", "content": ""})
        async for pieces in asking.batches():
            if not pieces:
                yield PING
            changed = dict[int, None]()
            for index, piece in pieces:
                chat.choices[index].take(piece)
                changed[index] = None
            for index in changed:
                choice = chat.choices[index]
                text, tokens = choice.new()
                if text or (chat.body.logprobs and tokens):
                    yield chunk(index, {"content": text}, logprobs=chat.logprobs(tokens))
                if choice.reason is not None:
                    yield chunk(index, {}, finish_reason=choice.reason, **await chat.state(asking, index))
        if chat.body.stream_options is not None and chat.body.stream_options.include_usage:
            yield event({**chat.facts, "choices": [], "usage": chat.usage(asking)})
        yield DONE


def router(serving: Serving) -> APIRouter:
    """The route."""
    routes = APIRouter()

    @routes.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        body = await body_of(request, ChatBody)
        serving.check_model(body.model)
        serving.worker.check(body.n)
        chat = await run_in_threadpool(ChatCompletion, serving, body)
        if body.stream:
            return EventStream(_streamed(chat, chat.asking()))
        return JsonResponse(await unless_left(request, _whole(chat)))

    return routes
