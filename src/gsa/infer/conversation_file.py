"""A file of conversations, a row of JSON each, which grows in the order of their numbers and goes on where it stopped.

    {"number": 0, "messages": [{"role": "user", "content": ...}, ...], "tokens": 812, "asked": "3f..."}

`asked` is a hash of the model as it computes, the settings and the questions, so that rows of others are not mixed
with these.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict
from pathlib import Path
from types import TracebackType

from gsa.errors import GSAError
from gsa.files import full_disk_explained, open_file
from gsa.infer.conversations import ChatSettings, Conversation, converse
from gsa.infer.text import TextEngine
from gsa.locks import held


class ConversationFile:
    """A file that conversations of one kind are added to; use it as a context, which holds it for this process.

    with ConversationFile(path, engine, questions, settings) as file:
        for conversation in file.extend(100_000):
            print(conversation.tokens)
    """

    def __init__(self, path: Path, engine: TextEngine, questions: Sequence[str], settings: ChatSettings) -> None:
        self.path = path
        self.conversations = 0
        """How many are in the file."""
        self.tokens = 0
        """Their tokens."""
        self._engine, self._questions, self._settings = engine, questions, settings
        self._asked = _digest(engine, questions, settings)
        self._stack = ExitStack()

    def __enter__(self) -> ConversationFile:
        try:
            with ExitStack() as stack:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self.path.touch()
                stack.enter_context(held(self.path))
                whole = self._read()
                self._file = stack.enter_context(open(self.path, "r+b"))
                self._file.truncate(whole)
                self._file.seek(whole)
                self._stack = stack.pop_all()
        except BlockingIOError:
            raise GSAError(f"chats: {self.path}: another process is writing to it") from None
        except OSError as error:
            raise GSAError(f"chats: {self.path} cannot be written: {error.strerror}") from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def extend(self, tokens: int) -> Iterator[Conversation]:
        """Lets the model hold conversations until the file has so many tokens; each is in the file when it is given."""
        if self.tokens >= tokens:
            return
        with closing(converse(self._engine, self._questions, self._settings, self.conversations)) as conversations:
            for each in conversations:
                self._add(each)
                yield each
                if self.tokens >= tokens:
                    return

    def _add(self, conversation: Conversation) -> None:
        row = json.dumps({**asdict(conversation), "asked": self._asked}, ensure_ascii=False)
        with full_disk_explained(self.path.parent):
            self._file.write(row.encode() + b"\n")
            self._file.flush()
        self.conversations += 1
        self.tokens += conversation.tokens

    def _read(self) -> int:
        """Counts what is in the file; bytes of its whole rows. What a kill has cut short is written anew."""
        whole = 0
        with open_file(self.path) as file:
            for line in file:
                if line.endswith(b"\n"):
                    self.tokens += self._tokens(line)
                    self.conversations += 1
                    whole += len(line)
        return whole

    def _tokens(self, line: bytes) -> int:
        """The tokens of a row, if it is the next one of these conversations."""
        place = f"chats: {self.path}, line {self.conversations + 1}"
        try:
            row = json.loads(line)
            asked, number, tokens = row["asked"], row["number"], row["tokens"]
        except (ValueError, TypeError, KeyError, RecursionError):
            raise GSAError(f"{place}: this is no conversation that was written here; choose another file") from None
        if asked != self._asked:
            raise GSAError(f"{place}: another model, other questions or other settings wrote it; choose another file")
        if number != self.conversations or type(tokens) is not int or tokens < 1:
            raise GSAError(f"{place}: expected conversation {self.conversations} and its tokens; the file was changed")
        return tokens


def _digest(engine: TextEngine, questions: Sequence[str], settings: ChatSettings) -> str:
    model = engine.engine.model
    decides = [model.fingerprint, model.weights, model.compute, model.device.type, engine.tokenizer.hashes()]
    return hashlib.sha256(json.dumps([decides, asdict(settings), list(questions)]).encode()).hexdigest()[:16]
