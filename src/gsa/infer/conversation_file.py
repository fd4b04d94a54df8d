"""A file of conversations, a row of JSON each, which grows in the order of their numbers and goes on where it stopped.

    {"number": 0, "messages": [{"role": "user", "content": ...}, ...], "tokens": 812, "asked": "3f..."}

`asked` is a hash of the model as it computes, the settings and the questions, so that rows of others are not mixed
with these.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

from gsa.errors import GSAError
from gsa.files import full_disk_explained, open_file
from gsa.infer.conversations import ChatSettings, Conversation, converse
from gsa.infer.text import TextEngine
from gsa.locks import held


@dataclass(frozen=True)
class Written:
    """What is in a file of conversations."""

    conversations: int
    tokens: int


def write_conversations(
    path: Path,
    engine: TextEngine,
    questions: Sequence[str],
    settings: ChatSettings,
    tokens: int,
    advance: Callable[[int], None] = lambda tokens: None,
) -> Written:
    """Lets a model hold conversations until the file has so many tokens. `advance` is told how many more there are,
    those of an earlier run first."""
    asked = _digest(engine, questions, settings)
    with ExitStack() as stack:
        file, found = _opened(path, asked, stack)
        advance(found.tokens)
        if found.tokens >= tokens:
            return found
        for each in stack.enter_context(closing(converse(engine, questions, settings, found.conversations))):
            with full_disk_explained(path.parent):
                file.write(_row(each, asked))
                file.flush()
            found = Written(found.conversations + 1, found.tokens + each.tokens)
            advance(each.tokens)
            if found.tokens >= tokens:
                break
    return found


def _row(conversation: Conversation, asked: str) -> bytes:
    return json.dumps({**asdict(conversation), "asked": asked}, ensure_ascii=False).encode() + b"\n"


def _digest(engine: TextEngine, questions: Sequence[str], settings: ChatSettings) -> str:
    model = engine.engine.model
    decides = [model.fingerprint, model.weights, model.compute, model.device.type, engine.tokenizer.hashes()]
    return hashlib.sha256(json.dumps([decides, asdict(settings), list(questions)]).encode()).hexdigest()[:16]


def _opened(path: Path, asked: str, stack: ExitStack) -> tuple[BinaryIO, Written]:
    """The file at the end of its last whole row, held for this process, and what is in it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        stack.enter_context(held(path))
        found, whole = Written(0, 0), 0
        with open_file(path) as read:
            for line in read:
                if not line.endswith(b"\n"):
                    break  # what a kill has cut short is written anew
                found = Written(found.conversations + 1, found.tokens + _tokens(path, line, found.conversations, asked))
                whole += len(line)
        file = stack.enter_context(open(path, "r+b"))  # noqa: SIM115  (the stack closes it)
        file.truncate(whole)
        file.seek(whole)
    except BlockingIOError:
        raise GSAError(f"chats: {path}: another process is writing to it") from None
    except OSError as error:
        raise GSAError(f"chats: {path} cannot be written: {error.strerror}") from None
    return file, found


def _tokens(path: Path, line: bytes, number: int, asked: str) -> int:
    """The tokens of a row, if it is the next one of the same conversations."""
    place = f"chats: {path}, line {number + 1}"
    try:
        row = json.loads(line)
        by, its_number, tokens = row["asked"], row["number"], row["tokens"]
    except (ValueError, TypeError, KeyError, RecursionError):
        raise GSAError(f"{place}: this is no conversation that was written here; choose another file") from None
    if by != asked:
        raise GSAError(
            f"{place}: it was written by another model, with other questions or other settings; choose another file"
        )
    if its_number != number or type(tokens) is not int or tokens < 1:
        raise GSAError(f"{place}: expected conversation {number} with its tokens; the file was changed")
    return tokens
