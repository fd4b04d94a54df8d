"""What commands that read and write text share: the model they open, files, and what a terminal shows."""

from __future__ import annotations

import os
import re
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from gsa.infer.text import TextEngine

Weights = Literal["auto", "fp32", "bf16", "int8", "int4"]
WORTH_SHOWING = 4096  # tokens; fewer are read before anyone would look
CLOSED_PIPE = 141  # the exit code of what SIGPIPE ends
# All that moves the cursor, changes the screen or turns the direction of writing, except line ends and tabs.
_CONTROL = re.compile("\r(?!\n)|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def open_model(model: str, weights: str, threads: int | None = None) -> TextEngine:
    """A model by name or folder with its tokenizer, ready to write; of a run's folder, the newest whole checkpoint."""
    import torch

    from gsa.errors import GSAError
    from gsa.infer.text import TextEngine

    if threads is not None and threads < 1:
        raise GSAError(f"threads must be at least 1, got {threads}")
    if threads is not None:
        torch.set_num_threads(threads)
    return TextEngine.load(_checkpoint(model), weights)


def _checkpoint(model: str) -> str | Path:
    """The folder to load: that of a run's newest checkpoint, or what was given."""
    from gsa.errors import GSAError
    from gsa.train.checkpoint import FOLDER, newest_checkpoint

    if not (Path(model) / FOLDER).is_dir():
        return model
    newest = newest_checkpoint(Path(model), lambda line: print(f"gsa: {line}", file=sys.stderr), set_aside=False)
    if newest is None:
        raise GSAError(f"{model} has no whole checkpoint")
    return newest.folder


def read_text(path: str) -> str:
    """The text of a file, or of standard input if it is `-`; it has to be UTF-8."""
    from gsa.errors import GSAError

    try:
        content = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
        return content.decode("utf-8")
    except OSError as error:
        raise GSAError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        name = "standard input" if path == "-" else path
        raise GSAError(f"{name} is not UTF-8 at byte {error.start}") from None


def check_place(path: str) -> None:
    """Raises if a file cannot be written there: better before long work than after it."""
    from gsa.errors import GSAError

    place = Path(path)
    if not path or place.is_dir() or not os.access(place.parent, os.W_OK | os.X_OK):
        raise GSAError(f"{path!r} cannot be written, expected a file in a folder that is there and may be written to")


def shown(text: str) -> str:
    """A text without anything that a terminal would take for more than text: control characters are spelt out.

    >>> shown("red \\x1b[31m")
    'red \\\\x1b[31m'
    """
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class Output:
    """Standard output for text as it is made, or nothing if `silent`. It is `closed` when nobody reads it any more."""

    def __init__(self, silent: bool = False) -> None:
        self.closed, self._silent = False, silent
        self._held = ""
        self._terminal = sys.stdout.isatty()
        self._encoding = sys.stdout.encoding or "utf-8"

    def write(self, text: str) -> None:
        """Shows a piece of text at once."""
        if self.closed or self._silent or not text:
            return
        text = self._for_terminal(text) if self._terminal else text
        try:
            sys.stdout.write(text.encode(self._encoding, "backslashreplace").decode(self._encoding))
            sys.stdout.flush()
        except BrokenPipeError:
            self.closed = True
            # What is left in the buffer would raise once more when the interpreter ends.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, sys.stdout.fileno())
            os.close(nowhere)

    def _for_terminal(self, text: str) -> str:
        """What can be shown so far: a return at the end waits, since it may be the first half of a line end."""
        text = self._held + text
        self._held = "\r" if text.endswith("\r") else ""
        return shown(text.removesuffix("\r"))


class ReadingBar:
    """A bar on the terminal while a long text is read; nothing elsewhere, or where it would only flash."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._bar: Any = None
        self._began = time.monotonic()

    def __enter__(self) -> ReadingBar:
        if self._total >= WORTH_SHOWING and sys.stderr.isatty():
            from rich import progress
            from rich.console import Console

            self._bar = progress.Progress(
                progress.TextColumn("reading"),
                progress.BarColumn(),
                progress.TextColumn("{task.completed:,.0f}/{task.total:,.0f} tokens"),
                progress.TextColumn("{task.fields[rate]}"),
                progress.TimeRemainingColumn(),
                console=Console(stderr=True),
                transient=True,
            )
            self._task = self._bar.add_task("reading", total=self._total, rate="")
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def update(self, tokens: int) -> None:
        """So many tokens have been read in all."""
        if self._bar is not None:
            rate = tokens / (time.monotonic() - self._began)
            self._bar.update(self._task, completed=tokens, rate=f"{rate:,.0f} tokens/s")

    def stop(self) -> None:
        """Takes the bar away."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
