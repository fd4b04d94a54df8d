"""Sums of losses, by how much of a text stands before a token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

LARGEST = 1e300
"""What a sum of losses stays below that can be added to others."""


@dataclass
class Sums:
    """Tokens and their loss in nats, by the power of two in which the number of tokens before them lies."""

    tokens: NDArray[np.int64]
    nats: NDArray[np.float64]

    @classmethod
    def of(cls, nats: NDArray[np.float64], before: int) -> Sums:
        """Losses of tokens one after another, the first of which has so many before it."""
        if not len(nats):
            return NOTHING
        places = np.frexp(np.arange(before, before + len(nats)))[1] - 1  # the whole part of log2, exactly
        return cls(np.bincount(places), np.bincount(places, nats).astype(np.float64))

    @staticmethod
    def fits(answer: Any) -> bool:
        """Whether something from JSON is what `as_json` gives."""
        if not isinstance(answer, dict) or set(answer) != {"tokens", "nats"}:
            return False
        tokens, nats = answer["tokens"], answer["nats"]
        return (
            isinstance(tokens, list)
            and isinstance(nats, list)
            and len(tokens) == len(nats)
            and all(type(count) is int and 0 <= count < 2**63 for count in tokens)
            and all(type(value) in (int, float) and abs(value) < LARGEST for value in nats)
        )

    @classmethod
    def from_json(cls, answer: dict[str, Any]) -> Sums:
        return cls(np.array(answer["tokens"], np.int64), np.array(answer["nats"], np.float64))

    def as_json(self) -> dict[str, Any]:
        return {"tokens": self.tokens.tolist(), "nats": self.nats.tolist()}

    def __add__(self, other: Sums) -> Sums:
        size = max(len(self.tokens), len(other.tokens))
        tokens, nats = np.zeros(size, np.int64), np.zeros(size)
        for part in (self, other):
            tokens[: len(part.tokens)] += part.tokens
            nats[: len(part.nats)] += part.nats
        return Sums(tokens, nats)


NOTHING = Sums(np.zeros(0, np.int64), np.zeros(0))
