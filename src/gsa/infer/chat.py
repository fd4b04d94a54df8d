"""Conversations: a model's chat template, and turns that go on from the state of the one before."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gsa import templates
from gsa.data.tokenizer import CONFIG, TEMPLATE, Tokenizer, read_template
from gsa.errors import GSAError
from gsa.files import read_json
from gsa.infer.detokenizer import detokenized
from gsa.infer.state import State
from gsa.infer.stop_strings import StopStrings
from gsa.infer.text import Piece, Text, TextEngine, Writing
from gsa.infer.vocabulary import vocabulary
from gsa.sampling import DEFAULT, Sampling

NAMES = "special_tokens_map.json"
MARK = "\U000f0000"
"""A character that means nothing, around what stands for a name that is not to be taken for a special token."""

Message = dict[str, str]
"""With a `role` and a `content`."""
Segment = str | int
"""Text, or a special token by its id."""


class ChatTemplate:
    """Turns conversations into what the model was trained to read.

    Special tokens of the template become their ids. Their names within messages are only text.
    """

    def __init__(self, template: str, tokenizer: Tokenizer, names: dict[str, str] | None = None) -> None:
        """`names`: what the template knows special tokens by, as in {"bos_token": "<s>"}."""
        self.template, self.tokenizer, self.names = template, tokenizer, names or {}
        self._vocabulary = vocabulary(tokenizer)
        self._special = {token.name: token for token in self._vocabulary.special}
        longest_first = sorted(self._special, key=len, reverse=True)
        self._in_text = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> ChatTemplate:
        """The template beside a tokenizer: in a file of its own, or in tokenizer_config.json."""
        folder = Path(tokenizer.name)
        config = read_json(folder / CONFIG) if (folder / CONFIG).exists() else {}
        known = read_json(folder / NAMES) if (folder / NAMES).exists() else {}
        template = _template(folder, config)
        if template is None:
            raise GSAError(
                f"chat: {folder} has no chat template ({TEMPLATE}, or chat_template in {CONFIG}): the model was not "
                "made for conversations; `gsa generate` continues texts with it, as does `generate` in Python"
            )
        if not template.strip():
            raise GSAError(f"chat: the chat template of {folder} is empty, expected one that tells a conversation")
        return cls(template, tokenizer, _names(known) | _names(config))

    def render(self, messages: Sequence[Message]) -> list[Segment]:
        """A conversation up to where the assistant's next message begins."""
        text, mark = "".join(message["content"] for message in messages) + self.template, MARK
        while mark in text:
            mark += MARK
        typed: list[str] = []

        def put_aside(found: re.Match[str]) -> str:
            typed.append(found[0])
            return f"{mark}{len(typed) - 1}{mark}"

        guarded = [{**message, "content": self._in_text.sub(put_aside, message["content"])} for message in messages]
        rendered, segments, end = self._rendered(guarded), list[Segment](), 0
        for found in self._in_text.finditer(rendered):
            token, before = self._special[found[0]], rendered[end : found.start()]
            segments += [before.rstrip() if token.takes_left else before, token.id]
            end = _after_spaces(rendered, found.end()) if token.takes_right else found.end()
        segments.append(rendered[end:])
        numbers = {str(i): name for i, name in enumerate(typed)}  # others between marks are the template's own
        put_back = re.compile(f"{mark}(\\d+){mark}")
        texts = [
            put_back.sub(lambda found: numbers.get(found[1], found[0]), s) if isinstance(s, str) else s
            for s in segments
        ]
        return [segment for segment in texts if segment != ""]

    def _rendered(self, messages: list[Message]) -> str:
        try:
            return templates.render(self.template, messages, self.names)
        except GSAError as error:
            raise GSAError(f"chat: the model's template cannot take this conversation: {error}") from None

    def encode(self, segments: Sequence[Segment], after: Segment | None = None) -> NDArray[np.int64]:
        """The ids of segments that come after another one, or begin."""
        parts = [np.empty(0, np.int64)]
        for segment in segments:
            if isinstance(segment, int):
                parts.append(np.array([segment]))
            else:
                parts += self.tokenizer.encode([segment], continues=self.continues(after))
            after = segment
        return np.concatenate(parts).astype(np.int64)

    def continues(self, after: Segment | None) -> bool:
        """Whether a text after this segment goes without the space that some tokenizers put in front of texts."""
        return isinstance(after, str) or (after is not None and self._vocabulary.prefix_once)


class Chat:
    """A conversation. What was read once is not read again, unless the template tells the past differently later.

    chat = gsa.load("models/assistant").chat()
    print(chat.say("What is a slot?"))
    for text in chat.stream("And a gate?"):
        print(text, end="", flush=True)
    """

    def __init__(
        self,
        engine: TextEngine,
        sampling: Sampling = DEFAULT,
        system: str | None = None,
        stop: str | Sequence[str] | None = (),
    ) -> None:
        self.engine, self.sampling, self.stop = engine, sampling, stop
        StopStrings(stop)  # refused now rather than with the first reply
        self.template = ChatTemplate.of(engine.tokenizer)
        templates.start()
        self._system: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        self._writing: Writing | None = None
        self.reset()

    def reset(self) -> None:
        """Begins anew."""
        self.messages: list[Message] = list(self._system)
        self.state: State | None = None
        """After the last reply."""
        self._read: list[Segment] = []

    def __repr__(self) -> str:
        read = 0 if self.state is None else self.state.tokens
        return f"Chat(messages={len(self.messages)}, tokens={read})"

    def say(self, text: str) -> Text:
        """The assistant's answer to a message."""
        said = "".join(self.stream(text))
        assert self._writing is not None
        return Text.of(said, self._writing)

    def stream(self, text: str) -> Iterator[str]:
        """The same as it is written. The conversation goes on from it when all of it was taken."""
        return (piece.text for piece in self.reply(text) if piece.text)

    def reply(self, text: str) -> Iterator[Piece]:
        """The assistant's answer, piece by piece; the conversation goes on from it when the last piece was taken."""
        if not isinstance(text, str):
            raise GSAError(f"chat: a message must be a text, got {type(text).__name__}")
        asked = [*self.messages, {"role": "user", "content": text}]
        whole = self.template.render(asked)
        rest = None if self.state is None else rest_of(whole, self._read)
        state, after = (None, None) if rest is None else (self.state, self._read[-1])
        ids = self.template.encode(whole if rest is None else rest, after)
        self._writing = writing = self.engine.stream(
            ids, self.sampling, stop=self.stop, state=state, keep_state=True, continues=False
        )
        said = []
        try:
            for piece in writing:
                said.append(piece.text)
                yield piece
        finally:
            writing.close()
        if writing.generation.kept is not None:  # else it was cancelled before all of the question was read
            self.messages = [*asked, {"role": "assistant", "content": "".join(said)}]
            self.state, self._read = writing.generation.kept, self._with_reply(whole, writing.generation.tokens)

    def _with_reply(self, asked: list[Segment], ids: list[int]) -> list[Segment]:
        """What the model has read after a reply; special tokens in that stand for themselves."""
        segments, special = list(asked), {token.id for token in vocabulary(self.engine.tokenizer).special}
        for is_special, group in groupby(ids, special.__contains__):
            if is_special:
                segments += group
                continue
            text = detokenized(self.engine.tokenizer, group, continues=self.template.continues(segments[-1]))
            segments[-1:] = [segments[-1] + text] if isinstance(segments[-1], str) else [segments[-1], text]
        return segments

    @property
    def prompt_tokens(self) -> int:
        """Tokens that are read for the reply that is being written, or was written last."""
        return 0 if self._writing is None else self._writing.generation.prompt_tokens

    def cancel(self) -> None:
        """Ends the reply that is being written; what there is of it counts."""
        if self._writing is not None:
            self._writing.cancel()


def rest_of(whole: list[Segment], read: list[Segment]) -> list[Segment] | None:
    """What of a conversation comes after what was read of it; None if it does not begin with that."""
    *before, last = read
    if whole[: len(before)] != before or len(whole) < len(read):
        return None
    here, later = whole[len(before)], whole[len(read) :]
    if isinstance(here, str) and isinstance(last, str):
        return [*filter(None, [here[len(last) :]]), *later] if here.startswith(last) else None
    return later if here == last else None


def _after_spaces(text: str, begin: int) -> int:
    found = re.compile(r"\s*").match(text, begin)
    assert found is not None
    return found.end()


def _template(folder: Path, config: dict[str, Any]) -> str | None:
    own = read_template(folder)
    if own is not None:
        return own
    found = config.get("chat_template")
    if isinstance(found, list):  # several by name
        named = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
        found = named.get("default")
    return found if isinstance(found, str) else None


def _names(config: dict[str, Any]) -> dict[str, str]:
    """The special tokens that a file names, as in eos_token."""
    found = {}
    for key, token in config.items():
        content = token.get("content") if isinstance(token, dict) else token
        if key.endswith("_token") and isinstance(content, str):
            found[key] = content
    return found
