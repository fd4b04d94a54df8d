"""The instruction sets of the native engine, and tests that run with one of them."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from gsa.errors import GSAError
from gsa.ops.native import library

NATIVE = library.unavailable(None) is None
ISAS = library.isas() if NATIVE else ("none",)
needs_native = pytest.mark.skipif(not NATIVE, reason="the native engine cannot run here")


@contextmanager
def used(name: str) -> Iterator[None]:
    """Uses an instruction set for a while; skips the test if this machine does not have it."""
    before = library.isa()
    try:
        library.use_isa(name)
    except GSAError as error:
        pytest.skip(str(error))
    try:
        yield
    finally:
        library.use_isa(before)
