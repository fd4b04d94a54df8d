"""Python's garbage collector, told that what a server starts with stays."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def kept_for_good() -> Iterator[None]:
    """Around what is imported and loaded, and stays until the process ends.

    The collector would go through it again and again: while it is loaded, for a tenth of the start, and then whenever
    it goes through everything, which holds all answers up for 100 ms. What is made here, it leaves alone.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        if enabled:
            gc.enable()
