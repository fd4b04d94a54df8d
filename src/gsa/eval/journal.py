"""Journal: figures of a long measurement in a file, a line each as they come; it goes on where it was stopped.

What models answer to requests is kept by `gsa.eval.answers`; this is for sums that are measured over text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from gsa.console import tell
from gsa.errors import GSAError
from gsa.files import open_file
from gsa.locks import held
from gsa.terminal import quoted

MOST_BYTES = 2**30


class Journal:
    """Answers by the number of their question. What was asked is part of the first line: other questions start anew.

    >>> with Journal(path, {"text": "a.txt"}, lambda answer: type(answer) is float) as journal:  # doctest: +SKIP
    ...     for number in set(range(10)) - set(journal.answers):
    ...         journal.add(number, measured(number))
    """

    def __init__(self, path: Path, asked: dict[str, Any], fits: Callable[[Any], bool]) -> None:
        """`fits` tells whether something is an answer to these questions, for files that others have changed."""
        self.path, self._fits = path, fits
        self.answers: dict[int, Any] = {}
        self.digest = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()
        """Of what was asked."""
        self._head = json.dumps({"asked": self.digest})
        self._stack = ExitStack()

    def __enter__(self) -> Journal:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.touch()
            with ExitStack() as stack:
                stack.enter_context(held(self.path))
                whole = self._read()
                self._file = stack.enter_context(open(self.path, "r+b"))
                # What a kill has cut short at the end, and a journal of other questions, is overwritten.
                self._file.truncate(whole)
                self._file.seek(whole)
                if not whole:
                    self._write(self._head)
                self._stack = stack.pop_all()
        except BlockingIOError:
            raise GSAError(f"{self.path}: another process is writing to it") from None
        except OSError as error:
            raise GSAError(f"{self.path}: answers cannot be kept there: {error.strerror}") from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
        if kind is KeyboardInterrupt:
            tell(f"{self.path}: what is measured so far; the same command goes on from there")

    def add(self, number: int, answer: Any) -> None:
        """Keeps an answer: it is in the file when this returns."""
        self.answers[number] = answer
        self._write(json.dumps([number, answer]))

    def remove(self) -> None:
        """Takes the file away, when the result is written."""
        self.path.unlink(missing_ok=True)

    def _write(self, line: str) -> None:
        self._file.write(line.encode() + b"\n")
        self._file.flush()

    def _read(self) -> int:
        """Takes in the answers of the file, if it is about the same; bytes of its whole lines."""
        with open_file(self.path) as file:
            content = file.read(MOST_BYTES)
        head, *lines = content[: content.rfind(b"\n") + 1].splitlines(keepends=True) or [b""]
        if head.rstrip(b"\n") != self._head.encode():
            return 0
        whole = len(head)
        for line in lines:
            try:
                number, answer = json.loads(line)
                if type(number) is not int or not self._fits(answer):
                    raise TypeError
            except (ValueError, TypeError, RecursionError):
                told = quoted(line.decode(errors="replace"))
                raise GSAError(
                    f"{self.path}: expected a number and an answer in each line, got {told}; remove it to start anew"
                ) from None
            self.answers[number] = answer
            whole += len(line)
        return whole
