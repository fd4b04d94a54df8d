"""Ids to text, one at a time: text is given as soon as no later id can change it."""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from gsa.data.tokenizer import Tokenizer
from gsa.data.vocabulary import vocabulary

CONTEXT = 4
"""Ids before the new ones that are decoded with them: a token's text depends on whether others stand before it."""


class Detokenizer:
    """Gives the text of ids that come one by one; all of it together is what `tokenizer.decode` gives of all ids.

    With `continues`, it is the text that these ids add to an earlier one: a space in front of the first word stays.
    An id that the tokenizer does not know (models may have room for more) is no text.

    >>> from gsa.data.tokenizer import load_tokenizer
    >>> text = Detokenizer(load_tokenizer("bytes"))
    >>> [text.add(id) for id in [72, 195, 169]], text.end()
    (['H', '', 'é'], '')
    """

    def __init__(self, tokenizer: Tokenizer, *, continues: bool = False) -> None:
        self._tokenizer, self._vocabulary = tokenizer, vocabulary(tokenizer)
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._context: list[int] = tokenizer.encode(["a"])[0].tolist() if continues else []
        self._waiting: list[int] = []

    def add(self, id_: int) -> str:
        """The text that has become final with this id; none if it may still change."""
        if id_ >= self._tokenizer.vocab_size:
            return ""
        if self._vocabulary.spelt is not None:
            return self._utf8.decode(self._vocabulary.spelt[id_])
        self._waiting.append(id_)
        return "" if id_ in self._vocabulary.in_runs else self._decoded(final=False)

    def end(self) -> str:
        """The rest: bytes that are no UTF-8 without more become U+FFFD. After it another text may begin."""
        if self._vocabulary.spelt is not None:
            return self._utf8.decode(b"", final=True)
        return self._decoded(final=True)

    def _decoded(self, *, final: bool) -> str:
        ids = self._context + self._waiting
        text = self._tokenizer.decode(ids)[len(self._tokenizer.decode(self._context)) :]
        if not final and self._vocabulary.joins_bytes and text.endswith("\ufffd"):
            return ""
        self._context, self._waiting = ids[-CONTEXT:], []
        return text


def detokenized(tokenizer: Tokenizer, ids: Iterable[int], *, continues: bool = False) -> str:
    """The text of all ids."""
    text = Detokenizer(tokenizer, continues=continues)
    return "".join([*map(text.add, ids), text.end()])
