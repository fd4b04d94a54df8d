"""How far an evaluation is, and the time left: a bar on a terminal, now and then a line elsewhere; all to stderr."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any

LINE_SECONDS = 30.0  # between lines where there is no terminal
BAR = 50  # characters of a line on a terminal that are kept for the bar, the counts and the time left
SOON = 2.0  # seconds: what is done by then shows nothing


class Progress:
    """Counts what has to be done; what an earlier run has done is no part of it. Use it as a context.

    >>> with Progress(100, "piqa") as progress:
    ...     progress.advance()
    """

    def __init__(self, total: int, what: str, quiet: bool = False) -> None:
        self.total, self.what, self.quiet, self.done = total, what, quiet, 0
        self._began = self._told = time.monotonic()
        self._bar: Any = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def advance(self, count: int = 1) -> None:
        """So many more are done."""
        self.done += count
        now = time.monotonic()
        if self.quiet or now - self._began < SOON:
            return
        if self._bar is not None:
            self._bar.update(self._task, completed=self.done)
        elif self._told == self._began or now - self._told >= LINE_SECONDS:
            self._tell(now)

    def _tell(self, now: float) -> None:
        from rich import progress
        from rich.console import Console

        self._told = now
        console = Console(stderr=True)
        if console.is_terminal and not console.is_dumb_terminal:
            self._bar = progress.Progress(
                progress.TextColumn("{task.description}", markup=False),
                progress.BarColumn(),
                progress.TextColumn("{task.completed:,.0f}/{task.total:,.0f}"),
                progress.TimeRemainingColumn(),
                console=console,
                transient=True,
            )
            room = max(console.width - BAR, 20)
            what = self.what if len(self.what) <= room else f"{self.what[: room - 1]}…"
            self._task = self._bar.add_task(what, total=self.total, completed=self.done)
            self._bar.start()
        elif self.done < self.total:
            left = (now - self._began) / self.done * (self.total - self.done)
            console.print(
                f"{self.what}: {self.done:,}/{self.total:,}, {duration(left)} left", markup=False, highlight=False
            )


def duration(seconds: float) -> str:
    """A time in the largest units that matter.

    >>> duration(59.6), duration(3 * 3600 + 120)
    ('1 min', '3 h 2 min')
    """
    if seconds < 59.5:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
