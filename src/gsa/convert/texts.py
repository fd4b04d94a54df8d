"""Pieces of texts, all of one length, that students and teachers are compared on.

Shape letters: N pieces, T time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch
from torch import Tensor

from gsa.data.tokenizer import Tokenizer
from gsa.errors import GSAError
from gsa.eval.perplexity import FIELD
from gsa.eval.texts import documents

CHARACTERS = 16
"""Of a token, at most, on the average of a piece."""
USUAL_CHARACTERS = 6
"""Of a token, in a long text."""


@dataclass(frozen=True)
class Pieces:
    """Pieces of texts, in turn from each of them."""

    ids: Tensor
    """[N, T]"""
    texts: list[int]
    """The number of the text that each piece is from."""
    names: list[str]

    def others(self) -> list[int]:
        """For each piece, the next one that is from another text; just the next one, if there is one text alone."""
        count = len(self.texts)
        return [
            next(
                (j % count for j in range(i + 1, i + count) if self.texts[j % count] != self.texts[i]),
                (i + 1) % count,
            )
            for i in range(count)
        ]


def read_pieces(
    tokenizer: Tokenizer, sources: Sequence[str], *, length: int, tokens: int, say: Callable[[str], None]
) -> Pieces:
    """About so many tokens of files, in pieces of `length` that lie far apart, as many from one text as from another.

    Texts that are shorter than a piece are left out, and told to `say`.
    """
    wanted = max(tokens // length, 1)
    found = list(documents(sources, FIELD, say))
    long = [document for document in found if len(document.text) >= length]  # no token is less than a character
    share = -(-wanted // max(len(long), 1))
    parts = {document.name: _spread(tokenizer, document.text, share, length) for document in long[:wanted]}
    used = {name: pieces for name, pieces in parts.items() if pieces}
    if not used:
        raise GSAError(f"verify: no text of {', '.join(sources)} has the {length:,} tokens of a piece")
    short = len(found) - len(long) + len(parts) - len(used)
    if short:
        say(f"left out {short} of {len(found)} texts, which have fewer than {length:,} tokens")
    turns = [(i, piece) for turn in zip_longest(*used.values()) for i, piece in enumerate(turn) if piece is not None]
    del turns[wanted:]
    return Pieces(torch.stack([piece for _, piece in turns]), [i for i, _ in turns], list(used))


def _spread(tokenizer: Tokenizer, text: str, count: int, length: int) -> list[Tensor]:
    """Pieces [T] of a text, at the beginnings of equal parts of it."""
    count = max(min(count, len(text) // (USUAL_CHARACTERS * length)), 1)
    size, found = len(text) // count, []
    for number in range(count):
        part = text[number * size : (number + 1) * size]
        begin = part.find(" ") + 1 if number else 0  # a word that is cut is no beginning
        (ids,) = tokenizer.encode([part[begin : begin + CHARACTERS * length]])
        if len(ids) >= length:
            found.append(torch.tensor(ids[:length].astype("int64")))
    return found
