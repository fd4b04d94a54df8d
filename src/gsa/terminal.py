"""Text of others, made fit to be shown: control characters spelt out, long values cut."""

from __future__ import annotations

import re
from reprlib import Repr
from typing import Any

# All that moves the cursor, changes the screen or turns the direction of writing, except line ends and tabs; and halves
# of surrogates, which cannot be written at all.
_UNFIT = re.compile("\r(?!\n)|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
LONGEST = 2000
"""Characters of a message that are shown."""
_QUOTED = 80
"""Characters of a value that a message quotes."""
_CUT = " ... "


def shown(text: str) -> str:
    """A text without anything that a terminal would take for more than text: control characters are spelt out.

    >>> shown("red \\x1b[31m")
    'red \\\\x1b[31m'
    """
    return _UNFIT.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def shortened(text: str, most: int = LONGEST) -> str:
    """A text that is not too long; of one that is, beginning and end.

    >>> shortened("abcdefghijklmnopqrstuvwxyz", 17)
    'abcdefgh ... wxyz'
    """
    if len(text) <= most:
        return text
    end = (most - len(_CUT)) // 3
    return text[: most - len(_CUT) - end] + _CUT + text[len(text) - end :]


def quoted(value: Any) -> str:
    """A value of any kind and size as an error quotes it.

    >>> quoted("gsa"), quoted([1, [2]]), quoted(10**5000)
    ("'gsa'", '[1, [2]]', 'a number of about 5001 digits')
    """
    return shortened(shown(_SHORT.repr(value)), _QUOTED)


class _Short(Repr):
    """`repr` that looks at no more than the first entries of the first levels."""

    def repr_int(self, x: int, level: int) -> str:
        # Python refuses to write out numbers of some thousand digits.
        bits = x.bit_length()
        return str(x) if bits < 4 * _QUOTED else f"a number of about {int(bits * 0.30103) + 1} digits"


_SHORT = _Short()
_SHORT.maxlevel = 4
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 2 * _QUOTED
_SHORT.maxdict = _SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxset = 10
