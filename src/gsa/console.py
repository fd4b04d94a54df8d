"""What commands that read and write text share: the model they open, files, and what is shown and told."""

from __future__ import annotations

import codecs
import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TextIO, cast

from gsa.terminal import shown

if TYPE_CHECKING:
    from gsa.infer import State
    from gsa.infer.text import TextEngine

Weights = Literal["auto", "fp32", "bf16", "int8", "int4"]
Compute = Literal["auto", "fp32", "bf16", "int8"]
CLOSED_PIPE = 141  # the exit code of what SIGPIPE ends


def open_model(model: str, weights: str, compute: str, device: str, threads: int | None) -> TextEngine:
    """A model by name or folder with its tokenizer, ready to write."""
    from gsa.devices import use_device
    from gsa.infer.text import TextEngine
    from gsa.threads import use_threads

    use_threads(threads)
    engine = TextEngine.load(model, weights, compute=compute, device=device, say=tell)
    use_device(engine.engine.model.device)
    return engine


def load_state(path: str, engine: TextEngine) -> State:
    """A state from a file, by the name that the command line has for it."""
    from gsa.errors import GSAError
    from gsa.infer import State

    try:
        return State.load(path, engine.engine.model)
    except GSAError as error:
        raise type(error)(f"state: {str(error).removeprefix('State.load: ')}") from None


def read_text(path: str, *, strict: bool = False) -> str:
    """The text of a file, or of standard input if it is `-`.

    What is not UTF-8 is replaced, and told; if strict, it is refused. A mark of UTF-8 at the beginning is no text.
    """
    from gsa.data.utf8 import decode
    from gsa.errors import GSAError
    from gsa.files import named

    name = "standard input" if path == "-" else path
    if not path:
        raise GSAError("file must be the name of a file, or - for standard input, got ''")
    if path == "-" and sys.stdin is None:
        raise GSAError("standard input cannot be read: it is closed")
    try:
        content = sys.stdin.buffer.read() if path == "-" else named(path, "file").read_bytes()
    except OSError as error:
        raise GSAError(f"{name} cannot be read: {error.strerror}") from None
    content = content.removeprefix(codecs.BOM_UTF8)
    if strict:
        return decoded(content, name)
    found = decode(content)
    if found.first is not None:
        line = content.count(b"\n", 0, found.first) + 1
        tell(
            f"{name}: replaced {found.replaced:,} bytes that are not UTF-8, the first at byte {found.first} "
            f"in line {line}"
        )
    return found.text


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
    from gsa.files import named, unfinished

    place = named(path, "file")
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


def is_terminal(stream: TextIO | None) -> bool:
    """Whether someone sits before a stream; one that was closed is None."""
    return stream is not None and stream.isatty()


def tell(text: object, begin: str = "", name: str = "gsa") -> None:
    """Says something on standard error, in the name of a command; where it is closed or full, nobody wants to know."""
    if sys.stderr is None:
        return
    line = begin + (f"{name}: " if name else "") + str(text)
    with suppress(OSError):
        print(shown(line), file=sys.stderr, flush=True)


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

    @property
    def terminal(self) -> bool:
        """Whether someone reads it as it comes."""
        return self._terminal

    def write(self, text: str, *, dim: bool = False) -> None:
        """Shows a piece of text at once; `dim` where a terminal can."""
        if self.closed or not text:
            return
        text = self._for_terminal(text) if self._terminal else text
        if dim and self._terminal and os.environ.get("TERM") != "dumb" and not os.environ.get("NO_COLOR"):
            text = f"\x1b[2m{text}\x1b[22m"
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
        if self._failure is not None:
            _end_with(self._failure)

    def _for_terminal(self, text: str) -> str:
        """What can be shown so far: a return at the end waits, since it may be the first half of a line end."""
        text = self._held + text
        self._held = "\r" if text.endswith("\r") else ""
        return shown(text.removesuffix("\r"))


def _lead_nowhere(stream: TextIO) -> None:
    """Throws away what is left in a buffer, which would raise once more when the interpreter ends."""
    with suppress(OSError):  # it is closed, and has no buffer
        place = stream.fileno()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, place)
        os.close(nowhere)


class _Watched:
    """Standard output that remembers whether it could be written; one that was closed cannot."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self.encoding = (None if stream is None else stream.encoding) or "utf-8"
        self.failure: OSError | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with self._remembered():
            if self._stream is None:
                raise OSError(errno.EBADF, "it is closed")
            # Names of files may have what cannot be written.
            return self._stream.write(text.encode(self.encoding, "backslashreplace").decode(self.encoding))

    def flush(self) -> None:
        with self._remembered():
            if self._stream is not None:
                self._stream.flush()

    def isatty(self) -> bool:
        return is_terminal(self._stream)

    def fileno(self) -> int:
        if self._stream is None:
            raise OSError(errno.EBADF, "it is closed")
        return self._stream.fileno()

    @contextmanager
    def _remembered(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.failure = self.failure or error
            raise


@contextmanager
def watched_output() -> Iterator[None]:
    """While entered, print as you like: what cannot be written ends the command as `Output.end` does."""
    before, watched = sys.stdout, _Watched(sys.stdout)
    sys.stdout = cast(TextIO, watched)
    try:
        yield
        watched.flush()
    except BaseException as error:
        with suppress(OSError):
            watched.flush()
        if watched.failure is not None:
            _lead_nowhere(sys.stdout)
            if error is watched.failure or isinstance(error, SystemExit):
                _end_with(watched.failure)
        raise
    finally:
        sys.stdout = before


def _end_with(failure: OSError) -> NoReturn:
    """Raises what a command ends with if its output cannot be written: in silence if nobody reads any more."""
    from gsa.errors import GSAError

    if isinstance(failure, BrokenPipeError):
        raise SystemExit(CLOSED_PIPE) from None
    raise GSAError(f"standard output cannot be written: {failure.strerror}") from None
