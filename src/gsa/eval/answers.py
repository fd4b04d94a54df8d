"""Answers: what a model has answered, on disk as it comes, so that an evaluation goes on where it was stopped.

The file has a line of JSON per answer: {"key": ..., "answer": ...}. A key is a hash of the model as it computes and of
all that was asked; so one file may hold the answers of several models and tasks, and none is taken for another's.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, TypeVar

import numpy as np

from gsa.errors import GSAError
from gsa.eval.progress import Progress
from gsa.eval.reader import Continuation, Reader, Score
from gsa.files import named, open_file
from gsa.locks import held

COMPUTED_BY = ("kind", "fingerprint", "weights", "compute", "device")
"""What of a reader decides its answers."""
Question = TypeVar("Question")
Stored = tuple[float, bool] | str


class Answers:
    """The answers in a file, or with None in memory only; use it as a context.

    >>> from gsa.eval.reader import open_reader
    >>> reader = open_reader("gsa-tiny")
    >>> request = Continuation(reader.tokenizer.encode("She was"), reader.tokenizer.encode(" very"))
    >>> with Answers(None) as answers:
    ...     scores = answers.scores(reader, [request, request], batch_size=16)
    >>> scores[0] == scores[1], len(answers)
    (True, 1)
    """

    def __init__(self, path: str | Path | None, *, quiet: bool = False) -> None:
        self.path = None if path is None else named(path, "answers")
        self.quiet = quiet
        """Whether no progress is shown."""
        self.title = ""
        """What progress says of all that is asked."""
        self._known: dict[str, Stored] = {}
        self._file: IO[bytes] | None = None
        self._stack = ExitStack()
        if self.path is not None:
            try:
                self._open(self.path)
            except BaseException:
                self._stack.close()
                raise

    def __enter__(self) -> Answers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self._known)

    def close(self) -> None:
        """Closes the file, and lets others write to it."""
        self._stack.close()
        self._file = None

    def scores(
        self,
        reader: Reader,
        requests: Sequence[Continuation],
        *,
        batch_size: int,
        reuse: bool = True,
        what: str = "requests",
    ) -> list[Score]:
        """The answer to each request: those that are known, and the others as the reader gives them."""

        def ask(left: Sequence[Continuation]) -> Iterator[tuple[int, Score]]:
            return reader.score(left, batch_size=batch_size, reuse=reuse)

        keys = [_key(reader, "score", request.context, request.continuation) for request in requests]
        found = self._answered(keys, requests, ask, what)
        for key, answer in found.items():
            if isinstance(answer, str):
                raise GSAError(f"{self.path}: the answer {key} is a text, expected a score")
        return [Score(*found[key]) for key in keys]

    def texts(
        self,
        reader: Reader,
        prompts: Sequence[Sequence[int]],
        *,
        max_tokens: int,
        until: Sequence[str],
        batch_size: int,
        what: str = "texts",
    ) -> list[str]:
        """How each prompt goes on: those that are known, and the others as the reader writes them."""

        def ask(left: Sequence[Sequence[int]]) -> Iterator[tuple[int, str]]:
            return reader.generate(left, max_tokens=max_tokens, until=until, batch_size=batch_size)

        settings = json.dumps({"max_tokens": max_tokens, "until": list(until)})
        keys = [_key(reader, "generate", settings, prompt) for prompt in prompts]
        found = self._answered(keys, prompts, ask, what)
        for key, answer in found.items():
            if not isinstance(answer, str):
                raise GSAError(f"{self.path}: the answer {key} is a score, expected a text")
        return [str(found[key]) for key in keys]

    def _answered(
        self,
        keys: Sequence[str],
        questions: Sequence[Question],
        ask: Callable[[Sequence[Question]], Iterator[tuple[int, Stored]]],
        what: str,
    ) -> dict[str, Stored]:
        """The answers by their keys. The same question is asked once."""
        left = {key: question for key, question in zip(keys, questions, strict=True) if key not in self._known}
        asked = list(left)
        with Progress(len(left), f"{self.title}: {what}" if self.title else what, quiet=self.quiet) as progress:
            for number, answer in ask(list(left.values())) if left else ():
                self._add(asked[number], answer)
                progress.advance()
        return {key: self._known[key] for key in keys}

    def _add(self, key: str, answer: Stored) -> None:
        self._known[key] = answer
        if self._file is not None:
            self._file.write(json.dumps({"key": key, "answer": answer}).encode() + b"\n")
            self._file.flush()

    def _open(self, path: Path) -> None:
        """Reads what is there, and holds the file."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
            self._stack.enter_context(held(path))
            with open_file(path) as file:
                whole = self._read(file, path)
            os.truncate(path, whole)  # a line that was cut off when a run was stopped
            self._file = self._stack.enter_context(path.open("ab"))
        except BlockingIOError:
            raise GSAError(f"answers: another process is writing to {path}") from None
        except OSError as error:
            raise GSAError(f"answers: {path} cannot be used: {error.strerror}") from None

    def _read(self, file: IO[bytes], path: Path) -> int:
        """Takes in all whole lines; how many bytes they have."""
        whole = 0
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                break
            key, answer = _parsed(line, f"{path}: line {number}")
            self._known[key] = answer
            whole += len(line)
        return whole


def _key(reader: Reader, kind: str, *asked: str | Sequence[int]) -> str:
    """A hash of a question to a model."""
    model = {name: reader.about.get(name) for name in COMPUTED_BY} | {"max_length": reader.max_length}
    digest = hashlib.sha256(json.dumps([model, kind]).encode())
    for part in asked:
        content = part.encode() if isinstance(part, str) else np.asarray(part, "<i8").tobytes()
        digest.update(f"\n{len(content)}\n".encode() + content)
    return digest.hexdigest()[:40]


def _parsed(line: bytes, what: str) -> tuple[str, Stored]:
    try:
        fields = json.loads(line)
        key, answer = fields["key"], fields["answer"]
    except (ValueError, TypeError, KeyError, RecursionError):
        raise GSAError(f'{what}: expected {{"key": ..., "answer": ...}}') from None
    if isinstance(key, str) and isinstance(answer, str):
        return key, answer
    score = isinstance(answer, list) and list(map(type, answer)) == [float, bool] and answer[0] < math.inf
    if isinstance(key, str) and score:
        return key, (answer[0], answer[1])
    raise GSAError(f"{what}: expected a text, or a log-likelihood and whether it is greedy, as the answer")
