"""The bodies of requests: OpenAI's fields and a few of ours. A field that nobody knows is refused by its name.

A field that is null counts as left out, as OpenAI's clients mean it. Fields that make no difference to an answer are
ignored (`IGNORED`). Those that would, and are not supported, are refused unless they ask for nothing (`ONLY`).
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from gsa.serve.errors import UNSUPPORTED
from gsa.terminal import quoted

IGNORED = {
    "metadata",
    "parallel_tool_calls",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
    "verbosity",
}
"""Fields of OpenAI's that concern its own house: who pays, what is kept there, which machine answers."""
_EMPTY: tuple[Any, ...] = ([], {})
MAX_STOPS = 16
Role = Literal["system", "user", "assistant"]


_STRING, _INTEGER = {"type": "string"}, {"type": "integer"}


def _list_of(kind: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": kind}


def _told_as(*kinds: dict[str, Any]) -> WithJsonSchema:
    """What /openapi.json tells of a field that may come in several forms and is turned into one."""
    return WithJsonSchema({"anyOf": list(kinds)}, mode="validation")


class Body(BaseModel):
    """A JSON object of which every field is known."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    ONLY: ClassVar[dict[str, tuple[Any, ...]]] = {}
    """Fields that are not supported, with the values that ask for nothing."""

    @model_validator(mode="before")
    @classmethod
    def _without_what_makes_no_difference(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        for name, values in cls.ONLY.items():
            if fields.get(name) is not None and fields[name] not in values:
                told = {"name": name, "or": f", or be {' or '.join(map(quoted, values))}" if values else ""}
                raise PydanticCustomError(UNSUPPORTED, "is not supported here; it may be left out{or}", told)
        known = set(cls.model_fields)
        skipped = {*cls.ONLY, *IGNORED} - known
        kept = {name: value for name, value in fields.items() if value is not None and name not in skipped}
        # One field that nobody knows is enough to refuse: an error for each of a million would take gigabytes.
        unknown = [name for name in kept if name not in known]
        for name in unknown[1:]:
            del kept[name]
        return kept


def _stops(value: Any) -> list[str]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise ValueError("expected a text, or a list of texts, of at least one character each")
    if len(stops) > MAX_STOPS:
        raise ValueError(f"expected at most {MAX_STOPS} texts")
    return [_unicode(stop) for stop in stops]


def _unicode(text: str) -> str:
    """The text, if it is one: JSON can spell halves of surrogates, which no encoding has."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("expected text in Unicode, without halves of surrogates") from None
    return text


def _biases(value: Any) -> dict[int, float]:
    if not isinstance(value, dict):
        raise ValueError("expected an object of token ids with numbers from -100 to 100")
    biases = {}
    for name, bias in value.items():
        if not (isinstance(name, str) and name.isascii() and name.isdigit() and len(name) < 12):
            raise ValueError("expected ids of tokens as names")
        if type(bias) not in (int, float) or not -100 <= bias <= 100:
            raise ValueError("expected numbers from -100 to 100")
        biases[int(name)] = float(bias)
    return biases


def _texts(value: Any) -> dict[str, str]:
    """Checked here and not by pydantic, which would tell of every value that is none."""
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise ValueError("expected an object of names with texts")
    return value


def _state(value: Any) -> str | dict[str, str]:
    if isinstance(value, str) and value:
        return value
    if isinstance(value, dict) and value.keys() == {"base64"} and isinstance(value["base64"], str):
        return value
    raise ValueError('expected the id of a state, or {"base64": "..."}')


class StreamOptions(Body):
    """`stream_options`."""

    ONLY: ClassVar[dict[str, tuple[Any, ...]]] = {"include_obfuscation": (False, True)}
    include_usage: bool = False


class AnswerBody(Body):
    """What all kinds of answers have in common."""

    model: str | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    stream: bool = False
    # ours
    top_k: int | None = Field(None, ge=0, le=2**31)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    cache: bool = True
    cache_salt: str | None = Field(None, max_length=256)


class ChoicesBody(AnswerBody):
    """What completions and chat completions have in common."""

    n: int = Field(1, ge=1, le=128)
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    stop: Annotated[list[str], BeforeValidator(_stops), _told_as(_STRING, _list_of(_STRING))] = Field(
        default_factory=list
    )
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    logit_bias: Annotated[dict[int, float], BeforeValidator(_biases)] = Field(default_factory=dict)
    stream_options: StreamOptions | None = None
    # ours
    state: Annotated[str | dict[str, str] | None, BeforeValidator(_state)] = None
    return_state: Literal["id", "base64"] | None = None

    @model_validator(mode="after")
    def _options_of_a_stream(self) -> ChoicesBody:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options are for stream: true")
        return self


Prompts = list[str] | list[list[int]]
"""One or several: texts, or ids of tokens."""


def _prompts(value: Any) -> Prompts:
    """A text, several, ids, or several lists of ids, always as several."""
    if isinstance(value, str):
        return [_unicode(value)]
    if isinstance(value, list) and value:
        if all(isinstance(each, str) for each in value):
            return [_unicode(each) for each in value]
        if all(type(each) is int for each in value):
            return [value]
        if all(isinstance(each, list) and all(type(id_) is int for id_ in each) for each in value):
            return value
    raise ValueError("expected a text, a list of texts, a list of token ids, or a list of such lists")


class CompletionBody(ChoicesBody):
    """POST /v1/completions."""

    ONLY: ClassVar[dict[str, tuple[Any, ...]]] = {"suffix": ("",), "best_of": (1,)}
    prompt: Annotated[
        Any,
        BeforeValidator(_prompts),
        _told_as(_STRING, _list_of(_STRING), _list_of(_INTEGER), _list_of(_list_of(_INTEGER))),
    ]
    max_tokens: int | None = Field(None, ge=0)
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=20)
    # ours
    cache_marks: Annotated[list[Annotated[int, Field(ge=1)]], Field(fail_fast=True, max_length=16)] = Field(
        default_factory=list
    )

    @property
    def prompts(self) -> Prompts:
        return self.prompt


class Part(Body):
    """A part of a message."""

    type: Literal["text", "input_text", "output_text"] = "text"
    text: Annotated[str, AfterValidator(_unicode)]
    ONLY: ClassVar[dict[str, tuple[Any, ...]]] = {"annotations": _EMPTY, "logprobs": _EMPTY}


def _content(value: Any) -> str:
    """A text, whole or in parts."""
    if isinstance(value, str):
        return _unicode(value)
    if isinstance(value, list):
        return "".join(Part.model_validate(part).text for part in value)
    raise ValueError('expected a text, or a list of parts {"type": "text", "text": "..."}')


def _role(value: Any) -> Any:
    return "system" if value == "developer" else value


class ChatMessage(Body):
    """A message of a conversation. `developer` is a newer word for `system`."""

    ONLY: ClassVar[dict[str, tuple[Any, ...]]] = {
        "annotations": _EMPTY,
        "audio": (),
        "function_call": (),
        "refusal": ("",),
        "tool_calls": _EMPTY,
    }
    role: Annotated[Role, BeforeValidator(_role)]
    content: Annotated[str, BeforeValidator(_content), _told_as(_STRING, _list_of(Part.model_json_schema()))]
    name: str | None = None  # of who speaks, which templates have no place for

    def plain(self) -> dict[str, str]:
        return {"role": self.role, "content": self.content}


Messages = Annotated[list[ChatMessage], Field(fail_fast=True)]
"""Of which the first fault is told, not each of a million."""
_NO_TOOLS: dict[str, tuple[Any, ...]] = {"tools": _EMPTY, "tool_choice": ("none", "auto")}


class ChatBody(ChoicesBody):
    """POST /v1/chat/completions."""

    ONLY: ClassVar[dict[str, tuple[Any, ...]]] = {
        **_NO_TOOLS,
        "audio": (),
        "function_call": ("none", "auto"),
        "functions": _EMPTY,
        "modalities": (["text"],),
        "moderation": (),
        "prediction": (),
        "reasoning_effort": ("none",),
        "response_format": ({"type": "text"},),
        "web_search_options": (),
    }
    messages: Messages
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)

    @model_validator(mode="after")
    def _alternatives(self) -> ChatBody:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs are for logprobs: true")
        return self


def _input(value: Any) -> list[dict[str, str]]:
    """The messages of a response's `input`."""
    if isinstance(value, str):
        return [{"role": "user", "content": _unicode(value)}]
    if not isinstance(value, list) or not value:
        raise ValueError("expected a text, or a list of messages")
    return [InputItem.model_validate(item).plain() for item in value]


class InputItem(ChatMessage):
    """A message of a response's `input`, which may be an `output` of an earlier one."""

    ONLY: ClassVar[dict[str, tuple[Any, ...]]] = {**ChatMessage.ONLY, "type": ("message",)}
    id: str | None = None
    status: str | None = None
    phase: str | None = None


class ResponseBody(AnswerBody):
    """POST /v1/responses."""

    ONLY: ClassVar[dict[str, tuple[Any, ...]]] = {
        **_NO_TOOLS,
        "background": (False,),
        "context_management": _EMPTY,
        "conversation": (),
        "include": _EMPTY,
        "max_tool_calls": (),
        "prompt": (),
        "reasoning": _EMPTY,
        "stream_options": _EMPTY,
        "text": ({}, {"format": {"type": "text"}}),
        "top_logprobs": (0,),
        "truncation": ("disabled", "auto"),
    }
    input: Annotated[Any, BeforeValidator(_input), _told_as(_STRING, _list_of({"type": "object"}))]
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    store: bool = True
    metadata: Annotated[dict[str, str], BeforeValidator(_texts)] = Field(default_factory=dict)
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)


class StateBody(Body):
    """POST /v1/states: what is read, behind an earlier state if one is named."""

    text: Annotated[str, AfterValidator(_unicode)] | None = None
    messages: Annotated[Messages, Field(min_length=1)] | None = None
    ids: Annotated[list[int], Field(fail_fast=True, min_length=1)] | None = None
    state: Annotated[str | dict[str, str] | None, BeforeValidator(_state)] = None
    name: str | None = Field(None, max_length=200)
    model: str | None = None
    stream: bool = False
    cache_salt: str | None = Field(None, max_length=256)

    @model_validator(mode="after")
    def _one_of_three(self) -> StateBody:
        if sum(each is not None for each in (self.text, self.messages, self.ids)) != 1:
            raise ValueError("expected one of text, messages and ids")
        return self
