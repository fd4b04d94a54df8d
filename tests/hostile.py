"""Values that once broke something, or might: too large, too long, too deep, not a number, not text."""

from typing import Any
from unicodedata import category

from hypothesis import strategies as st

from gsa.bench.memory import forget_peak, measurable, peak, resident
from gsa.errors import GSAError

DEEP: list = []
for _ in range(5000):
    DEEP = [DEEP]
NUMBERS = (0, -1, 1, 2, 10**6, 10**9, 2**31, 2**63, 2**64, -(2**70), 10**400, 10**5000)
FRACTIONS = (0.5, -0.0, 1e-320, 1e-9, 1e30, 1e308, float("inf"), float("-inf"), float("nan"))
TEXTS = (
    "",
    " ",
    "gsa",
    "none",
    "x" * 100_000,
    "9" * 5000,
    "a\0b",
    "a\ud800b",
    "a\udcffb",
    "\x1b[2J",
    "../" * 3000,
    "[" * 5000,
)
OTHERS = (None, True, False, [], {}, [10**5000], DEEP, {"a": DEEP}, b"bytes", ("a",))

numbers = st.sampled_from(NUMBERS) | st.integers() | st.sampled_from(FRACTIONS) | st.floats()
texts = st.sampled_from(TEXTS) | st.text(max_size=20)
values = numbers | texts | st.sampled_from(OTHERS)
"""Anything at all."""


def assert_readable(message: str) -> None:
    """Whether a message can be shown to anyone: short, and without control characters and halves of surrogates."""
    assert 0 < len(message) < 5000
    message.encode("utf-8")
    assert not [sign for sign in message if category(sign) in ("Cc", "Cs") and sign not in "\n\t"], message


def ended(make: Any, *args: Any) -> Any:
    """What comes of a call, None if it is refused with a sentence; and that neither takes much memory, where the system
    tells that."""
    if measurable():
        forget_peak()
        before = resident()
    try:
        return make(*args)
    except GSAError as error:
        assert_readable(str(error))
        return None
    finally:
        if measurable():
            assert peak() - before < 2**28, "more than 256 MB"
