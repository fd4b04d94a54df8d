"""What `prepare` shows while it works: a bar on a terminal, a line now and then elsewhere, and a summary."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any

from gsa.data.documents import Findings
from gsa.data.shards import Manifest
from gsa.data.tokenizer import Tokenizer
from gsa.terminal import shown

LINE_SECONDS = 30.0
LETTERS = ["a", "Z", "7", "\n", "\t", "~", "é", "я", "א", "東", "ไ", "😀"]
"""Characters of many scripts, to try a tokenizer with."""


class Report:
    """Shows bytes read, tokens made and the time left; with `show=False` nothing."""

    def __init__(self, total_bytes: int | None, first: tuple[int, int], *, show: bool) -> None:
        """`first`: bytes and tokens that an earlier run has done."""
        self.total, self.show = total_bytes, show
        self._began = time.monotonic()
        self._spoke = self._began
        self._first = first
        self._bytes, self._tokens = first
        self._bar: Any = None

    def __enter__(self) -> Report:
        if self.show and sys.stderr.isatty():
            from rich import progress
            from rich.console import Console

            self._bar = progress.Progress(
                progress.BarColumn(),
                progress.DownloadColumn(),
                progress.TransferSpeedColumn(),
                progress.TextColumn("{task.fields[tokens]}"),
                progress.TimeRemainingColumn(),
                console=Console(stderr=True),
            )
            self._task = self._bar.add_task("prepare", total=self.total, tokens="")
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, bytes_read: int, tokens: int) -> None:
        """Tells how far the work is: bytes of the inputs read, tokens made, both in all."""
        self._bytes, self._tokens = bytes_read, tokens
        now = time.monotonic()
        if self._bar is not None:
            self._bar.update(self._task, completed=bytes_read, tokens=f"{self._rate(now)[1] / 1e6:.2f}M tokens/s")
        elif self.show and now - self._spoke >= LINE_SECONDS:
            self._spoke = now
            print(self._line(now), file=sys.stderr, flush=True)

    def _rate(self, now: float) -> tuple[float, float]:
        """Bytes and tokens per second since the beginning of this run."""
        seconds = max(now - self._began, 1e-9)
        return (self._bytes - self._first[0]) / seconds, (self._tokens - self._first[1]) / seconds

    def _line(self, now: float) -> str:
        speed, tokens = self._rate(now)
        line = f"data: {self._bytes / 1e6:.0f} MB read, {self._tokens / 1e6:.1f}M tokens, {tokens / 1e6:.2f}M tokens/s"
        if self.total is None or not speed:
            return line
        left = (self.total - self._bytes) / speed
        return f"{line}, {100 * self._bytes / max(self.total, 1):.0f}%, {left / 60:.0f} min left"

    def summary(self, manifest: Manifest, folder: str, tokenizer: Tokenizer) -> None:
        """Prints counts, speed, and what was left out."""
        if not self.show:
            return
        seconds = time.monotonic() - self._began
        made = manifest.tokens - self._first[1]
        lines = [
            f"{folder}: {manifest.tokens:,} tokens in {manifest.documents:,} documents and {len(manifest.shards)} "
            f"shards, {manifest.text_bytes / manifest.tokens:.2f} bytes per token",
            f"{seconds:.1f} s, {made / max(seconds, 1e-9):,.0f} tokens/s",
        ]
        lines += problems(manifest) + losses(tokenizer)
        print(shown("\n".join(lines)), file=sys.stderr, flush=True)


def problems(found: Manifest | Findings) -> list[str]:
    """A line for each kind of thing that was left out or replaced."""
    lines = [f"left out: {count:,} rows ({kind})" for kind, count in sorted(found.bad_rows.items())]
    if found.undecodable_bytes:
        lines.append(f"replaced: {found.undecodable_bytes:,} bytes that are not UTF-8")
    return lines


def losses(tokenizer: Tokenizer) -> list[str]:
    """A line if there are characters, of a few of all kinds, that do not come back from the tokenizer's ids."""
    encoded = zip(LETTERS, tokenizer.encode(LETTERS), strict=True)
    lost = [repr(letter) for letter, ids in encoded if letter not in tokenizer.decode(ids)]
    return [f"note: the tokenizer loses or changes characters; of those tried: {', '.join(lost)}"] if lost else []
