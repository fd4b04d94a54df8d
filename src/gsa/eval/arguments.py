"""Options that several commands of evaluation have."""

from __future__ import annotations

from typing import Literal

from gsa.eval.texts import lengths_of

Dtype = Literal["auto", "fp32", "bf16", "fp16"]

MaxLengths = tuple[int | None, ...]


def max_lengths(text: str | None) -> MaxLengths:
    """What --max-length asks for: lengths, a run of each; None is each task's own."""
    return (None,) if text is None else tuple(lengths_of(text, "eval: --max-length", least=2))
