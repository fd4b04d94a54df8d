"""A model's chat template: from a conversation to the ids that the model was trained to read."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gsa import templates
from gsa.data.tokenizer import CONFIG, TEMPLATE, Tokenizer, read_template
from gsa.data.vocabulary import vocabulary
from gsa.errors import GSAError
from gsa.files import read_json

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
        folder, known = Path(tokenizer.name), dict[str, Any]()
        if folder.is_dir():
            config = read_json(folder / CONFIG) if (folder / CONFIG).exists() else {}
            known = read_json(folder / NAMES) if (folder / NAMES).exists() else {}
            template = _template(read_template(folder), config)
        else:  # one of the Hub
            files = tokenizer.files()
            config = json.loads(files[CONFIG])
            template = _template(files.get(TEMPLATE), config)
        if template is None:
            raise GSAError(
                f"chat: {folder} has no chat template ({TEMPLATE}, or chat_template in {CONFIG}): the model was not "
                "made for conversations; `gsa generate` continues texts with it, as does `generate` in Python"
            )
        if not template.strip():
            raise GSAError(f"chat: the chat template of {folder} is empty, expected one that tells a conversation")
        return cls(template, tokenizer, _names(known) | _names(config))

    @property
    def digest(self) -> str:
        """A hash of what decides how conversations are told."""
        return hashlib.sha256(json.dumps([self.template, sorted(self.names.items())]).encode()).hexdigest()

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
            raise type(error)(f"chat: the model's template cannot take this conversation: {error}") from None

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

    def conversation(self, messages: Sequence[Message]) -> NDArray[np.int64]:
        """The ids of a conversation whose last message is the assistant's, without the token that ends that."""
        *asked, answer = messages
        return self.encode([*self.render(asked), answer["content"]])

    def continues(self, after: Segment | None) -> bool:
        """Whether a text after this segment goes without the space that some tokenizers put in front of texts."""
        return isinstance(after, str) or (after is not None and self._vocabulary.prefix_once)


def _after_spaces(text: str, begin: int) -> int:
    found = re.compile(r"\s*").match(text, begin)
    assert found is not None
    return found.end()


def _template(own: str | None, config: dict[str, Any]) -> str | None:
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
