"""Scores of a text that a model wrote, against the texts that would have been right; each between 0 and 1."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from gsa.extras import require

Score = Callable[[str, Sequence[str]], float]

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def contains(text: str, right: Sequence[str]) -> float:
    """Whether any of them stands in the text, case ignored.

    >>> contains(" in Paris, France", ["paris"])
    1.0
    """
    return float(any(answer.strip().lower() in text.lower() for answer in right))


def exact_match(text: str, right: Sequence[str]) -> float:
    """Whether the text is one of them, word for word."""
    return float(any(text.split() == answer.split() for answer in right))


def f1(text: str, right: Sequence[str]) -> float:
    """Words in common, as SQuAD counts them: the harmonic mean of precision and recall, for the best of them.

    >>> round(f1("The red house.", ["a red car", "blue"]), 2)
    0.5
    """
    return max(_f1(_words(text), _words(answer)) for answer in right)


def _f1(words: list[str], right: list[str]) -> float:
    if not words or not right:
        return float(words == right)
    common = sum((Counter(words) & Counter(right)).values())
    return 2 * common / (len(words) + len(right))


def _words(text: str) -> list[str]:
    """Words in lower case, without punctuation and articles."""
    return _ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split()


def rouge(kind: str) -> Score:
    """ROUGE as F1 of stemmed words, for the best of them: rouge1, rouge2 or rougeL."""
    return lambda text, right: max(float(_scorer(kind).score(answer, text)[kind].fmeasure) for answer in right)


@cache
def _scorer(kind: str) -> Any:
    require("rouge_score", "ROUGE")
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer([kind], use_stemmer=True)
