"""Ctrl-C and SIGTERM as a wish that the loop sees between two steps."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class StopWish:
    """While entered, the first SIGINT or SIGTERM is remembered, and said; a second SIGINT interrupts at once."""

    def __init__(self, quiet: bool = False) -> None:
        self.signal: int | None = None
        self._quiet = quiet
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopWish:
        if threading.current_thread() is threading.main_thread():  # Python takes signals nowhere else
            self._before = {number: signal.signal(number, self._heard) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _heard(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        if self.signal is None and not self._quiet:
            os.write(2, b"\ngsa: stopping after this step; Ctrl-C again stops at once\n")  # print is not for handlers
        self.signal = self.signal or number
