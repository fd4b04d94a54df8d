"""From the raw parts of a portion to texts, and from those to tokens. What is wrong with a row is counted by kind."""

from __future__ import annotations

import codecs
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gsa.data.chat_template import ChatTemplate, Message
from gsa.data.portions import Missing, Part, read_portions
from gsa.data.sources import Input
from gsa.data.tokenizer import Tokenizer
from gsa.data.utf8 import decode
from gsa.errors import GSAError
from gsa.templates import Refused

if TYPE_CHECKING:
    from gsa.data.holdout import Side

INVALID, NO_FIELD, NO_STRING, EMPTY, DAMAGED, NO_CHAT, REFUSED = (
    "invalid JSON",
    "field missing",
    "not a string",
    "empty",
    "damaged file or row",
    "not a conversation",
    "refused by the chat template",
)
_SURROGATES = re.compile("[\ud800-\udfff]")


@dataclass
class Text:
    """A document, or a stretch of one."""

    text: str
    begins: bool = True
    ends: bool = True
    file: str | None = None
    """Path of the file that is this document, below its source; None for a row."""
    messages: list[Message] | None = None
    """Of a conversation: what was said, by whom. Its text is all of that."""
    where: str = ""
    """Of a conversation: the row it is in."""


@dataclass
class Findings:
    """Rows and bytes that could not be read, counted; if strict, the first of them raises."""

    strict: bool
    bad_rows: Counter[str] = field(default_factory=Counter)
    undecodable_bytes: int = 0

    def bad(self, kind: str, where: str, detail: str = "") -> None:
        if self.strict:
            raise GSAError(f"data: {where}: {detail or kind} (strict)")
        self.bad_rows[kind] += 1

    def replaced(self, count: int, where: str) -> None:
        if count and self.strict:
            raise GSAError(f"data: {where}: {count} bytes that are not UTF-8 (strict)")
        self.undecodable_bytes += count

    def told(self) -> list[str]:
        """What was found, in words."""
        found = [f"left out {count:,} rows or files: {kind}" for kind, count in sorted(self.bad_rows.items())]
        if self.undecodable_bytes:
            found.append(f"replaced {self.undecodable_bytes:,} bytes that are not UTF-8")
        return found


def texts(parts: Sequence[Part], text_field: str, findings: Findings, chat_field: str | None = None) -> Iterator[Text]:
    """The documents in the parts of a portion; rows of JSON that have a `chat_field` are conversations."""
    for part in parts:
        if part.kind == "text":
            yield from _of_text(part, findings)
        elif part.kind == "jsonl":
            yield from _of_lines(part, text_field, findings, chat_field)
        else:
            yield from _of_values(part, text_field, findings)
        if part.damage is not None:
            findings.bad(DAMAGED, _where(part, 0) if part.kind == "jsonl" else part.name, part.damage)


def no_text(sources: Sequence[str], inputs: Sequence[Input], text_field: str, bad_rows: dict[str, int]) -> GSAError:
    """The error for sources in which there is no text at all."""
    message = f"data: there is no text in {', '.join(sources)}"
    if bad_rows:
        message += f" ({', '.join(f'{kind}: {count}' for kind, count in sorted(bad_rows.items()))})"
    if NO_FIELD in bad_rows:
        message += f"; --field is {text_field!r}, the first row has {_first_fields(inputs) or 'no fields'}"
    return GSAError(message)


def _first_fields(inputs: Sequence[Input]) -> str:
    """The names of the fields in the first row of all that is a JSON object."""
    for portion in read_portions([entry for entry in inputs if entry.kind == "jsonl"], ""):
        for line in (line for part in portion.parts if isinstance(part.data, bytes) for line in part.data.split(b"\n")):
            try:
                row = json.loads(line.removeprefix(codecs.BOM_UTF8))
            except (ValueError, RecursionError):
                continue
            if isinstance(row, dict):
                return ", ".join(map(repr, list(row)[:20]))
    return ""


def _of_text(part: Part, findings: Findings) -> Iterator[Text]:
    assert isinstance(part.data, bytes)
    data = part.data.removeprefix(codecs.BOM_UTF8) if part.begins else part.data
    text = decoded(data, part, None, findings)
    if text or not (part.begins and part.ends):
        yield Text(text, part.begins, part.ends, part.below)
    else:
        findings.bad(EMPTY, part.name, "the file is empty")


def _of_lines(part: Part, text_field: str, findings: Findings, chat_field: str | None) -> Iterator[Text]:
    assert isinstance(part.data, bytes)
    for number, line in enumerate(part.data.split(b"\n")):
        line = line.removeprefix(codecs.BOM_UTF8) if part.line + number == 0 else line
        if not line.strip():
            continue  # as at the end of most files
        try:
            row = json.loads(decoded(line, part, number, findings))
        except (ValueError, RecursionError) as error:
            findings.bad(INVALID, _where(part, number), f"not JSON: {error}")
            continue
        if chat_field is not None and isinstance(row, dict) and chat_field in row:
            yield from _of_conversation(row[chat_field], part, number, chat_field, findings)
            continue
        value = row.get(text_field, Missing.FIELD) if isinstance(row, dict) else Missing.FIELD
        yield from _of_value(value, part, number, text_field, findings)


def _of_values(part: Part, text_field: str, findings: Findings) -> Iterator[Text]:
    for number, value in enumerate(part.data):
        value = decoded(value, part, number, findings) if isinstance(value, bytes) else value
        yield from _of_value(value, part, number, text_field, findings)


def _of_value(value: Any, part: Part, number: int, text_field: str, findings: Findings) -> Iterator[Text]:
    if value is Missing.FIELD:
        findings.bad(NO_FIELD, _where(part, number), f"there is no field {text_field!r}")
    elif not isinstance(value, str):
        findings.bad(NO_STRING, _where(part, number), f"{text_field!r} is no string but {value!r:.40}")
    elif not value:
        findings.bad(EMPTY, _where(part, number), f"{text_field!r} is empty")
    else:
        yield Text(_whole(value, _where(part, number), findings))


def _whole(text: str, where: str, findings: Findings) -> str:
    """A text without halves of surrogate pairs, which JSON can spell: they are no characters."""
    text, count = (text, 0) if text.isascii() else _SURROGATES.subn("\ufffd", text)
    findings.replaced(3 * count, where)  # in UTF-8, each would have three bytes
    return text


def _of_conversation(value: Any, part: Part, number: int, chat_field: str, findings: Findings) -> Iterator[Text]:
    where = _where(part, number)
    messages = _messages(value, where, findings)
    if messages is None:
        expected = "a list of messages with role and content, of which the last is the assistant's"
        findings.bad(NO_CHAT, where, f"{chat_field!r} must be {expected}, got {value!r:.60}")
    else:
        yield Text("\n".join(message["content"] for message in messages), messages=messages, where=where)


def _messages(value: Any, where: str, findings: Findings) -> list[Message] | None:
    """The messages of a row, if they are a question or more and an answer."""
    if not isinstance(value, list) or len(value) < 2:
        return None
    messages = []
    for entry in value:
        role, content = (entry.get("role"), entry.get("content")) if isinstance(entry, dict) else (None, None)
        if not isinstance(role, str) or not isinstance(content, str):
            return None
        role, content = (_whole(text, where, findings) for text in (role, content))
        messages.append({"role": role, "content": content})
    return messages if messages[-1]["role"] == "assistant" else None


def decoded(data: bytes, part: Part, number: int | None, findings: Findings) -> str:
    """Bytes as text; what is not UTF-8 becomes U+FFFD, and is counted."""
    found = decode(data)
    if found.first is not None:
        line = data.count(b"\n", 0, found.first) if number is None else number
        findings.replaced(found.replaced, _where(part, line))
    return found.text


def _where(part: Part, number: int) -> str:
    return f"{part.name}, {'row' if part.kind == 'values' else 'line'} {part.line + number + 1}"


@dataclass
class Encoded:
    """A portion as tokens: ids with end of text after each document, where documents begin, and what was counted."""

    tokens: NDArray[Any]
    starts: NDArray[np.int64]
    text_bytes: int
    bad_rows: dict[str, int]
    undecodable_bytes: int


def encode_parts(
    parts: Sequence[Part],
    text_field: str,
    strict: bool,
    tokenizer: Tokenizer,
    side: Side | None = None,
    chat_field: str | None = None,
    template: ChatTemplate | None = None,
) -> Encoded:
    """The tokens of a portion, or of those of its documents that are on one side of a split.

    What could not be read is counted on the side of training alone. Conversations are told by the template.
    """
    findings = Findings(strict)
    found = texts(parts, text_field, findings, chat_field)
    documents = [text for text in found if side is None or side.has(text)]
    findings = Findings(strict) if side is not None and side.heldout else findings
    continues = bool(documents) and not documents[0].begins
    # A portion ends where a text is cut, so only its first text can go on from the portion before.
    assert all(document.begins for document in documents[1:])
    plain = iter(tokenizer.encode([entry.text for entry in documents if entry.messages is None], continues=continues))
    end = np.array([tokenizer.eos_id], tokenizer.dtype)
    rows: list[NDArray[Any]] = [np.empty(0, tokenizer.dtype)]
    starts = []
    position = text_bytes = 0
    for document in documents:
        row = next(plain) if document.messages is None else _told(document, template, findings)
        if row is None:
            continue
        if document.begins:
            starts.append(position)
        rows += [row, end] if document.ends else [row]
        position += len(row) + document.ends
        text_bytes += len(document.text.encode())
    return Encoded(
        tokens=np.concatenate(rows, dtype=tokenizer.dtype),
        starts=np.array(starts, np.int64),
        text_bytes=text_bytes,
        bad_rows=dict(findings.bad_rows),
        undecodable_bytes=findings.undecodable_bytes,
    )


def _told(document: Text, template: ChatTemplate | None, findings: Findings) -> NDArray[Any] | None:
    """The tokens of a conversation, if the template takes it."""
    assert template is not None
    assert document.messages is not None
    try:
        return template.conversation(document.messages).astype(template.tokenizer.dtype)
    except Refused as error:
        findings.bad(REFUSED, document.where, str(error))
        return None
