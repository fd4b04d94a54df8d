"""What a request for text is, from the user's side and from the engine's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from gsa.errors import GSAError
from gsa.infer.reading import Prompt, Source
from gsa.infer.sampling import Choice, Sampler
from gsa.infer.state import State
from gsa.sampling import Sampling

Alternatives = list[tuple[int, float]]
"""Tokens with their log-probabilities, the likeliest first."""
Until = Callable[[int], bool]
"""Called with the id of every token as it comes; says whether the text ends with it."""


@dataclass(frozen=True)
class Token:
    """A token that came out."""

    id: int
    logprob: float | None
    """Its log-probability, if asked for."""
    top: Alternatives | None
    """The likeliest tokens in its place, if asked for."""
    request: Generation
    """The request it belongs to."""


@dataclass(frozen=True)
class Completion:
    """What came of a request."""

    tokens: list[int]
    reason: str
    """Why it ended: "length", "stop" or "cancelled"."""
    logprobs: list[float] | None
    """Of every token, if asked for."""
    top: list[Alternatives] | None
    """Alternatives to every token, if asked for."""
    prompt_tokens: int
    cached_tokens: int
    """Tokens of the prompt that were not read again, because a state behind them was kept."""
    state: State | None
    """What follows can go on from here, if it was to be kept."""


class Owner(Protocol):
    """What runs a generation: a scheduler."""

    def cancel(self, generation: Generation) -> None:
        """Ends it, if it is not done."""

    def state_of(self, generation: Generation) -> State:
        """Its state."""


class Generation:
    """A request on its way, made by `Engine.submit`; it fills up while the engine steps."""

    def __init__(self, owner: Owner, id: int, prompt_tokens: int, settings: Sampling):
        self.id, self.prompt_tokens, self.cached_tokens = id, prompt_tokens, 0
        self.tokens: list[int] = []
        self.logprobs: list[float] | None = None if settings.logprobs is None else []
        self.top: list[Alternatives] | None = None if settings.logprobs is None else []
        self.reason: str | None = None
        """None while it goes on, then "length", "stop", "cancelled" or "error"."""
        self.error: str | None = None
        """What went wrong."""
        self.error_type: type[GSAError] = GSAError
        """What is raised for it: OutOfMemory, say."""
        self.kept: State | None = None
        """The state at the end, if it was to be kept."""
        self.abandoned = False
        """Whether nobody waits for it any more: the engine ends it as soon as it steps again."""
        self._owner = owner

    def __repr__(self) -> str:
        return f"Generation({self.id}, {self.prompt_tokens} + {len(self.tokens)} tokens, {self.reason or 'not done'})"

    @property
    def done(self) -> bool:
        """Whether nothing more will come."""
        return self.reason is not None

    def cancel(self) -> None:
        """Ends it and gives its place to another; what came out stays. Later calls do nothing."""
        self._owner.cancel(self)

    def abandon(self) -> None:
        """Lets the engine end it. Unlike `cancel` it waits for nothing, so that the garbage collector may call it."""
        self.abandoned = True

    def state(self) -> State:
        """The state after the prompt and all tokens so far: while it goes on, and at the end if it was to be kept."""
        return self._owner.state_of(self)

    def add(self, choice: Choice) -> Token:
        """Takes a token in."""
        if self.logprobs is not None and choice.logprob is not None:
            self.logprobs.append(choice.logprob)
        if self.top is not None and choice.top is not None:
            self.top.append(choice.top)
        self.tokens.append(choice.id)  # last: another thread may ask for a token as soon as it is counted
        return self.token(-1)

    def token(self, index: int) -> Token:
        """One of the tokens so far."""
        logprob = None if self.logprobs is None else self.logprobs[index]
        top = None if self.top is None else self.top[index]
        return Token(self.tokens[index], logprob, top, self)

    def completion(self) -> Completion:
        """What came of it; raises if it is not done, or if that was an error."""
        if self.reason is None or self.error is not None:
            raise self.error_type(self.error or f"request {self.id}: it is not done")
        return Completion(
            self.tokens, self.reason, self.logprobs, self.top, self.prompt_tokens, self.cached_tokens, self.kept
        )


@dataclass(eq=False)
class Request:
    """What the engine needs to know of a generation until it is done."""

    generation: Generation
    source: Source
    prompt: Prompt | None
    """While it is not read."""
    sampler: Sampler
    keep_state: bool
    until: Until | None = None
    place: int = -1
    """Where its state is, once it has been admitted."""
    unread: int | None = None
    """The last token, while the model has not read it yet."""
    logits: Tensor | None = None
    """Scores of the next token, while there is no last token to read."""

    @property
    def begun(self) -> bool:
        """Whether the prompt is read, and the place holds its state."""
        return self.prompt is None

    @property
    def done(self) -> bool:
        return self.generation.done
