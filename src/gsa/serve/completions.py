"""POST /v1/completions: texts that are continued, with log-probabilities of the prompt for those who score."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from fastapi import APIRouter, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from gsa.infer.detokenizer import Detokenizer, detokenized
from gsa.infer.reading import Prompt
from gsa.infer.stop_strings import StopStrings
from gsa.infer.text import Piece, Writing
from gsa.sampling import Sampling
from gsa.serve.asking import Asking, unless_left
from gsa.serve.bodies import CompletionBody
from gsa.serve.errors import JsonResponse, refused
from gsa.serve.logprobs import Legacy
from gsa.serve.parsing import body_of
from gsa.serve.serving import Ids, Serving, Start, summed, usage
from gsa.serve.streaming import DONE, PING, Events, EventStream, event

TOKENS = 16
"""Of an answer for which no number is asked, as OpenAI has it."""


@dataclass
class Choice:
    """One continuation on its way."""

    prompt: Prompt
    sampling: Sampling
    echoed: str
    """The prompt, if it is to stand in front."""
    logprobs: Legacy | None
    pieces: list[str] = field(default_factory=list)
    reason: str | None = None

    def take(self, piece: Piece) -> None:
        """Adds a piece."""
        self.pieces.append(piece.text)
        self.reason = piece.reason
        token = piece.token
        if self.logprobs is not None and token is not None:
            self.logprobs.add(token.id, token.logprob, token.top, piece.length)

    def taken(self, index: int) -> dict[str, Any]:
        """What has come since the last time, as clients get it."""
        text, self.pieces = "".join(self.pieces), []
        logprobs = None if self.logprobs is None else self.logprobs.taken()
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": self.reason}


class Completion:
    """The continuations that one request asks for."""

    def __init__(self, serving: Serving, body: CompletionBody) -> None:
        """Reads states and encodes texts: not for the event loop."""
        self.serving, self.body = serving, body
        self.start = serving.start(body.state, body.cache_salt)
        most = min(TOKENS, serving.settings.max_tokens) if body.max_tokens is None else body.max_tokens
        sampling = serving.sampling(body, most, body.logprobs)
        state = None if self.start is None else self.start.state
        echoes = body.logprobs if body.echo else None
        self.choices: list[Choice] = []
        for ids, text in _prompts(serving, body, self.start):
            prompt = serving.prompt(
                *(ids, state, "prompt"),
                salt=body.cache_salt,
                reuse=body.cache,
                logprobs=echoes,
                marks=body.cache_marks,
            )
            for each in sampling.several(body.n):
                logprobs = None if body.logprobs is None else Legacy(serving.texts.tokenizer)
                self.choices.append(Choice(prompt, each, text if body.echo else "", logprobs))
        self.facts = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": serving.name,
        }

    def asking(self) -> Asking:
        """Asks the engine; raises if the server is full."""
        starts = [lambda choice=choice: self._begun(choice) for choice in self.choices]
        return Asking(self.serving.worker, self.serving.metrics, starts)

    def _begun(self, choice: Choice) -> Writing:
        texts, body = self.serving.texts, self.body
        keep = body.return_state is not None
        if body.echo and body.logprobs is not None and body.max_tokens == 1:
            # Who scores a prompt leaves the one token behind it out, and so counts on it, even if it ends the text.
            text, stops = Detokenizer(texts.tokenizer, continues=True), StopStrings(body.stop)
            return Writing(texts.engine, choice.prompt, choice.sampling, text, stops, state=None, keep_state=keep)
        return texts.stream(choice.prompt, choice.sampling, stop=body.stop, keep_state=keep)

    def echo(self, choice: Choice) -> None:
        """Puts the prompt, which is read by now, in front of a choice."""
        if not self.body.echo:
            return
        if choice.logprobs is None:
            choice.pieces.insert(0, choice.echoed)
            return
        prompt, text = choice.prompt, Detokenizer(self.serving.texts.tokenizer, continues=self.start is not None)
        for id_, logprob, top in zip(prompt.source.ids.tolist(), prompt.logprobs or (), prompt.top or (), strict=True):
            piece = text.add(id_)
            choice.pieces.append(piece)
            choice.logprobs.add(id_, logprob, top, len(piece))
        choice.pieces.append(text.end())

    async def state(self, asking: Asking, index: int) -> dict[str, Any]:
        """The state behind a choice, if it was asked for."""
        kept, body = asking.generation(index).kept, self.body
        if body.return_state is None or kept is None:
            return {}
        give = self.serving.give_state
        return {"state": await run_in_threadpool(give, kept, body.return_state, body.cache_salt)}

    def usage(self, asking: Asking) -> dict[str, Any]:
        """The tokens of all prompts, each counted once, and of all continuations."""
        before = 0 if self.start is None else self.start.state.tokens
        counts = []
        for first in range(0, len(self.choices), self.body.n):
            prompt = self.choices[first].prompt
            written = sum(len(asking.generation(i).tokens) for i in range(first, first + self.body.n))
            counts.append(usage(before + len(prompt), before + prompt.cached_tokens, written))
        return summed(counts)


def _prompts(serving: Serving, body: CompletionBody, start: Start | None) -> Iterator[tuple[Ids, str]]:
    """The ids and the text of each prompt."""
    texts, size = serving.texts, serving.texts.engine.model.vocab_size
    for prompt in body.prompts:
        if isinstance(prompt, str):
            yield texts.encode(prompt, continues=start is not None), prompt
            continue
        if prompt and not 0 <= min(prompt) <= max(prompt) < size:
            raise refused("prompt", f"ids must be from 0 to {size - 1}, got {min(prompt)} to {max(prompt)}")
        yield np.array(prompt, np.int64), detokenized(texts.tokenizer, prompt) if body.echo else ""


async def _whole(completion: Completion) -> dict[str, Any]:
    choices = completion.choices
    async with completion.asking() as asking:
        begun = set[int]()
        async for pieces in asking.batches():
            for index, piece in pieces:
                if index not in begun:
                    begun.add(index)
                    completion.echo(choices[index])
                choices[index].take(piece)
        told = [{**each.taken(i), **await completion.state(asking, i)} for i, each in enumerate(choices)]
        return {**completion.facts, "choices": told, "usage": completion.usage(asking)}


async def _streamed(completion: Completion, asking: Asking) -> Events:
    choices, facts, options = completion.choices, completion.facts, completion.body.stream_options
    async with asking:
        begun = set[int]()
        async for pieces in asking.batches():
            if not pieces:
                yield PING
            changed = dict[int, None]()
            for index, piece in pieces:
                if index not in begun:
                    begun.add(index)
                    completion.echo(choices[index])
                choices[index].take(piece)
                changed[index] = None
            for index in changed:
                told = choices[index].taken(index)
                if told["finish_reason"] is not None:
                    told |= await completion.state(asking, index)
                elif not told["text"] and not (told["logprobs"] or {}).get("tokens"):
                    continue
                yield event({**facts, "choices": [told]})
        if options is not None and options.include_usage:
            yield event({**facts, "choices": [], "usage": completion.usage(asking)})
        yield DONE


def router(serving: Serving) -> APIRouter:
    """The route."""
    routes = APIRouter()

    @routes.post("/v1/completions")
    async def completions(request: Request) -> Response:
        body = await body_of(request, CompletionBody)
        serving.check_model(body.model)
        serving.worker.check(body.n * len(body.prompts))
        completion = await run_in_threadpool(Completion, serving, body)
        if body.stream:
            return EventStream(_streamed(completion, completion.asking()))
        return JsonResponse(await unless_left(request, _whole(completion)))

    return routes
