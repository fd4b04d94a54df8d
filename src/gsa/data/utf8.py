"""Bytes as text where some of them are not UTF-8: replaced, and counted."""

from __future__ import annotations

import codecs
from typing import NamedTuple


class Decoded(NamedTuple):
    """A text, and what had to be replaced in it."""

    text: str
    replaced: int = 0
    """Bytes that are not UTF-8: each run of them has become one U+FFFD."""
    first: int | None = None
    """Where the first of them stands."""


def decode(data: bytes) -> Decoded:
    """The text that bytes are, with U+FFFD for what is not UTF-8.

    >>> decode("né".encode("latin-1"))
    Decoded(text='n�', replaced=1, first=1)
    """
    try:
        return Decoded(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        first, replaced = error.start, [0]

        def replace(found: UnicodeError) -> tuple[str, int]:
            assert isinstance(found, UnicodeDecodeError)
            replaced[0] += found.end - found.start
            return "\ufffd", found.end

        codecs.register_error("gsa-counted", replace)
        return Decoded(data.decode("utf-8", "gsa-counted"), replaced[0], first)
