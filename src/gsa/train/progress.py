"""How a run tells where it is: a live bar on a terminal, now and then a line elsewhere; all of it to stderr."""

from __future__ import annotations

import time
from collections import deque
from types import TracebackType
from typing import TYPE_CHECKING, Any

from gsa.terminal import shown

if TYPE_CHECKING:
    from rich.console import Console

LINE_SECONDS = 10.0  # between lines where there is no terminal
RECENT = 50  # steps from which the time left is computed
WIDTH_FOR_BAR = 120


class Progress:
    """The display of a run; use it as a context.

    >>> with Progress(100, 0) as progress:
    ...     progress.update(1, loss=9.0, lr=3e-4, tokens_per_second=1e4, peak_share=0.5, grad_norm=1.0, skipped=0)
    """

    def __init__(self, total_steps: int, start_step: int, quiet: bool = False, console: Console | None = None):
        self.total, self.start, self.quiet = total_steps, start_step, quiet
        self._console = console
        self._times: deque[tuple[int, float]] = deque(maxlen=RECENT + 1)
        self._line_at: float | None = None
        self._bar: Any = None

    def __enter__(self) -> Progress:
        if self.quiet:
            return self
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as Bar
        from rich.table import Column

        if self._console is None:
            self._console = Console(stderr=True)
        self._times.append((self.start, time.monotonic()))
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            # What a narrow terminal cuts off is the end of the text, so the bar goes first.
            bar = [BarColumn()] if self._console.width >= WIDTH_FOR_BAR else []
            words = TextColumn("{task.fields[told]}", table_column=Column(no_wrap=True, overflow="ellipsis"))
            self._bar = Bar(*bar, words, console=self._console, expand=True, refresh_per_second=4)
            told = f"{self.start}/{self.total}"
            self._task = self._bar.add_task("", total=self.total, completed=self.start, told=told)
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def update(
        self,
        step: int,
        loss: float,
        lr: float,
        tokens_per_second: float,
        peak_share: float | None,
        grad_norm: float,
        skipped: int,
        eval_loss: float | None = None,
    ) -> None:
        """Shows where the run is after a step.

        `loss` is the average over recent steps; `skipped` counts all steps whose gradient was not finite.
        """
        if self.quiet:
            return
        now = time.monotonic()
        self._times.append((step, now))
        told = [f"{step}/{self.total}", f"smoothed loss {loss:.4f}"]
        if step < self.total:
            told.insert(1, f"{clock(self._left(step))} left")
        if eval_loss is not None:
            told.append(f"eval loss {eval_loss:.4f}")
        if skipped:
            told.append(f"{skipped} skipped")
        told.append(f"{_count(tokens_per_second)} tokens/s")
        if peak_share is not None:
            told.append(f"{peak_share:.0%} of peak")
        told += [f"lr {lr:.2e}", f"norm {grad_norm:.2f}"]
        if self._bar is not None:
            self._bar.update(self._task, completed=step, told="  ".join(told))
            if eval_loss is not None:
                self.note(f"step {step}: eval loss {eval_loss:.4f}")
        elif (
            self._line_at is None or now - self._line_at >= LINE_SECONDS or eval_loss is not None or step >= self.total
        ):
            self._line_at = now
            self.note(f"step {'  '.join(told)}")

    def note(self, message: str) -> None:
        """Prints a line, above the bar if there is one."""
        if self.quiet or self._console is None:
            return
        # No markup and no wrapping: messages have names and paths in them, and text that a model wrote.
        self._console.print(shown(message), markup=False, highlight=False, soft_wrap=True)

    def _left(self, step: int) -> float:
        """Seconds to the last step, at the rate of recent ones."""
        (first, then), (last, now) = self._times[0], self._times[-1]
        return (self.total - step) * (now - then) / max(last - first, 1)


def clock(seconds: float) -> str:
    """A time as hours, minutes and seconds, with days before them if there are any.

    >>> clock(59), clock(3725), clock(100000)
    ('0:00:59', '1:02:05', '1 d 3:46:40')
    """
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    return f"{f'{days} d ' if days else ''}{hour}:{minute:02}:{second:02}"


def _count(number: float) -> str:
    """A number with a unit, in three digits or so."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "K")):
        if number >= size:
            return f"{number / size:.1f}{unit}"
    return f"{number:.0f}"
