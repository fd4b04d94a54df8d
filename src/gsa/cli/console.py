"""What commands that read and write text share: the model they open, files, and what is shown and told."""

from __future__ import annotations

import errno
import os
import re
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TextIO

if TYPE_CHECKING:
    from gsa.infer.text import TextEngine

Weights = Literal["auto", "fp32", "bf16", "int8", "int4"]
WORTH_SHOWING = 4096  # tokens; fewer are read before anyone would look
CLOSED_PIPE = 141  # the exit code of what SIGPIPE ends
# All that moves the cursor, changes the screen or turns the direction of writing, except line ends and tabs.
_CONTROL = re.compile("\r(?!\n)|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def open_model(model: str, weights: str, threads: int | None = None) -> TextEngine:
    """A model by name or folder with its tokenizer, ready to write."""
    from gsa.infer.text import TextEngine
    from gsa.threads import use_threads

    use_threads(threads)
    return TextEngine.load(model, weights, say=tell)


def read_text(path: str) -> str:
    """The text of a file, or of standard input if it is `-`; it has to be UTF-8."""
    from gsa.errors import GSAError

    name = "standard input" if path == "-" else path
    if not path:
        raise GSAError("file must be the name of a file, or - for standard input, got ''")
    if path == "-" and sys.stdin is None:
        raise GSAError("standard input cannot be read: it is closed")
    try:
        content = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    except OSError as error:
        raise GSAError(f"{name} cannot be read: {error.strerror}") from None
    return decoded(content, name)


def decoded(content: bytes, name: str) -> str:
    """The text that some bytes are, which have to be UTF-8."""
    from gsa.errors import GSAError

    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise GSAError(f"{name} is not UTF-8 at byte {error.start}") from None


def check_typed(text: str, name: str) -> None:
    """Raises if a text from the command line or a terminal was not UTF-8: such bytes come as halves of surrogates."""
    decoded(text.encode("utf-8", "surrogatepass"), name)


def check_place(path: str) -> None:
    """Raises if a file cannot be written there: better before long work than after it."""
    from gsa.errors import GSAError
    from gsa.files import unfinished

    place = Path(path)
    try:
        other = place.exists() and not place.is_file()
        if not path or other or not os.access(place.parent, os.W_OK | os.X_OK):
            raise GSAError(
                f"{path!r} cannot be written, expected a file in a folder that is there and may be written to"
            )
        os.lstat(unfinished(place))  # which raises for a name that would be too long
    except FileNotFoundError:
        return
    except OSError as error:
        raise GSAError(f"{path!r} cannot be written: {error.strerror}") from None


def shown(text: str) -> str:
    """A text without anything that a terminal would take for more than text: control characters are spelt out.

    >>> shown("red \\x1b[31m")
    'red \\\\x1b[31m'
    """
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def is_terminal(stream: TextIO | None) -> bool:
    """Whether someone sits before a stream; one that was closed is None."""
    return stream is not None and stream.isatty()


def tell(text: object, begin: str = "", name: str = "gsa") -> None:
    """Says something on standard error, in the name of a command; where it is closed or full, nobody wants to know."""
    if sys.stderr is None:
        return
    line = begin + (f"{name}: " if name else "") + str(text)
    with suppress(OSError):
        print(shown(line) if is_terminal(sys.stderr) else line, file=sys.stderr, flush=True)


class Output:
    """Standard output for text as it is made. It is `closed` when nothing can be written to it any more."""

    def __init__(self) -> None:
        self._failure: OSError | None = None
        self._held = ""
        self._terminal = is_terminal(sys.stdout)

    @property
    def closed(self) -> bool:
        """Whether a text could not be written."""
        return self._failure is not None

    def write(self, text: str) -> None:
        """Shows a piece of text at once."""
        if self.closed or not text:
            return
        text = self._for_terminal(text) if self._terminal else text
        try:
            if sys.stdout is None:
                raise OSError(errno.EBADF, "it is closed")
            encoding = sys.stdout.encoding or "utf-8"
            sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
            sys.stdout.flush()
        except OSError as error:
            self._failure = error
            if sys.stdout is not None:
                _lead_nowhere(sys.stdout)

    def end(self) -> None:
        """Raises what a command ends with if not all could be written: in silence if nobody reads any more."""
        from gsa.errors import GSAError

        if isinstance(self._failure, BrokenPipeError):
            raise SystemExit(CLOSED_PIPE)
        if self._failure is not None:
            raise GSAError(f"standard output cannot be written: {self._failure.strerror}")

    def _for_terminal(self, text: str) -> str:
        """What can be shown so far: a return at the end waits, since it may be the first half of a line end."""
        text = self._held + text
        self._held = "\r" if text.endswith("\r") else ""
        return shown(text.removesuffix("\r"))


def _lead_nowhere(stream: TextIO) -> None:
    """Throws away what is left in a buffer, which would raise once more when the interpreter ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


class ReadingBar:
    """A bar on the terminal while a long text is read; nothing elsewhere, or where it would only flash."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._bar: Any = None
        self._began = time.monotonic()

    def __enter__(self) -> ReadingBar:
        if self._total >= WORTH_SHOWING and is_terminal(sys.stderr):
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
