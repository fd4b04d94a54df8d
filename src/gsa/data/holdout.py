"""Documents that are kept from training, to evaluate on: the same ones each time, wherever the sources lie.

A document is held out by a hash: of its text for a row, so that copies stay together, and for a file of its path below
the source, since the text may be too long to be at hand as a whole.
"""

from __future__ import annotations

import hashlib
import heapq
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from gsa.data.documents import Findings, Text, no_text, texts
from gsa.data.portions import read_portions
from gsa.data.sources import Input
from gsa.errors import GSAError
from gsa.terminal import quoted

HELDOUT = "heldout"
"""The folder of held-out tokens, within that of the others."""
_KEYS = 2**64


@dataclass(frozen=True)
class Side:
    """One side of the split."""

    threshold: int
    """Documents with a smaller key are held out."""
    heldout: bool
    """Whether this is the side of those."""

    def has(self, document: Text) -> bool:
        """Whether a document, or a stretch of one, is on this side."""
        return (key(document) < self.threshold) == self.heldout


@dataclass(frozen=True)
class Holdout:
    """What is to be held out: a share of the documents, or a number of them."""

    asked: str
    share: Fraction | None = None
    count: int = 0

    @classmethod
    def parse(cls, asked: str) -> Holdout:
        """What `1%` or `5` asks for.

        >>> Holdout.parse("0.5%").share
        Fraction(1, 200)
        """
        if found := re.fullmatch(r"(\d{1,9}(?:\.\d{1,18})?)%", asked):
            share = Fraction(found[1]) / 100
            if 0 < share < 1:
                return cls(asked, share=share)
        elif re.fullmatch(r"\d{1,18}", asked) and int(asked) > 0:
            return cls(asked, count=int(asked))
        raise GSAError(f"data: holdout must be a share as in 1%, or a number of documents as in 5, got {quoted(asked)}")

    def threshold(
        self, sources: Sequence[str], inputs: Sequence[Input], text_field: str, chat_field: str | None = None
    ) -> int:
        """The key below which documents are held out; for a number of them, all sources are read once.

        Raises if that number leaves none to train on.
        """
        if self.share is not None:
            return math.ceil(self.share * _KEYS)
        portions = read_portions(list(inputs), text_field)
        findings = Findings(False)
        found = (texts(portion.parts, text_field, findings, chat_field) for portion in portions)
        documents = (text for each in found for text in each)
        keys = {key(text) for text in documents if text.begins}
        if not keys:
            raise no_text(sources, inputs, text_field, findings.bad_rows)
        if self.count >= len(keys):
            have = "1 document" if len(keys) == 1 else f"{len(keys):,} documents"
            raise GSAError(f"data: holdout {self.asked}: the sources have {have}, and some must be left to train on")
        return heapq.nsmallest(self.count, keys)[-1] + 1

    def tokens(self, max_tokens: int | None) -> int | None:
        """How many tokens to hold out of so many at most."""
        if max_tokens is None:
            return None
        if self.share is None:
            raise GSAError(f"data: holdout {self.asked} documents does not go with max_tokens; give a share, as in 1%")
        return max(math.ceil(self.share * max_tokens), 1)


def key(document: Text) -> int:
    """A number below 2**64 that is spread evenly over documents."""
    content = document.text if document.file is None else document.file
    return int.from_bytes(hashlib.blake2b(content.encode(), digest_size=8).digest(), "big")
