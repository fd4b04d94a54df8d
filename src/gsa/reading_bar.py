"""How far a long text is read, on a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any

from gsa.console import is_terminal

if TYPE_CHECKING:
    from gsa.infer.text import Piece

WORTH_SHOWING = 4096  # tokens; fewer are read before anyone would look


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


def with_reading_bar(pieces: Iterable[Piece], total: Callable[[], int]) -> Iterator[Piece]:
    """Passes on the pieces of a text; on the terminal a bar shows how far a long prompt of `total` tokens is read."""
    from gsa.infer.runner import MAX_READ

    bar, read = None, 0
    try:
        for piece in pieces:
            if piece.token is None and piece.reason is None:
                bar = bar or ReadingBar(total()).__enter__()
                read += MAX_READ
                bar.update(min(read, total()))
            elif bar is not None:
                bar.stop()
            yield piece
    finally:
        if bar is not None:
            bar.stop()
