"""Text of others on a terminal."""

from __future__ import annotations

import re

# All that moves the cursor, changes the screen or turns the direction of writing, except line ends and tabs.
_CONTROL = re.compile("\r(?!\n)|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def shown(text: str) -> str:
    """A text without anything that a terminal would take for more than text: control characters are spelt out.

    >>> shown("red \\x1b[31m")
    'red \\\\x1b[31m'
    """
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
