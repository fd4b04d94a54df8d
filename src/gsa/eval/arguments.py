"""Options that several commands of evaluation have."""

from __future__ import annotations

from typing import Literal

from gsa.errors import GSAError

Dtype = Literal["auto", "fp32", "bf16", "fp16"]


def parsed_lengths(text: str) -> tuple[int, ...]:
    """Numbers of tokens with commas between them.

    >>> parsed_lengths("2048, 16384")
    (2048, 16384)
    """
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() and int(word[:9]) >= 2 for word in words):
        raise GSAError(f"eval: --max-length must be numbers of tokens with commas between them, got {text!r}")
    return tuple(dict.fromkeys(int(word[:9]) for word in words))
