"""What probes are made of: names, words, and sentences of a book."""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from itertools import product

from gsa import pretrained

FIRST_NAMES = """
Alice Bernard Carla Dennis Elena Felix Greta Harold Irene Jacob Kathleen Leonard Monica Norman Olivia Patrick Queenie
Raymond Sylvia Thomas Ursula Vincent Wanda Xavier Yvonne Zachary Amelia Bruno Cecilia Dominic Esther Frederick Gloria
Hector Ingrid Julian Kirsten Lawrence Miriam Nathan Ophelia Peter Rosalind Samuel Theresa Ulrich Valerie Walter
"""
LAST_NAMES = """
Abbott Barlow Chapman Dawson Ellison Fletcher Graham Hartley Irving Jennings Kendall Lambert Mercer Norris Osborne
Parker Quincy Ramsey Sanders Thornton Underwood Vaughan Wallace Young Archer Benson Carver Doyle Emerson Foster Goodwin
Holloway Ingram Jarvis Keller Lawson Morton Newman Oakley Preston Reeves Shelton Turner Upton Vickers Watkins Zimmer
"""
RARE = 3
"""A word that comes less often than so in the book may be a misprint."""


def full_names() -> list[str]:
    """Every first name with every last name."""
    return [f"{first} {last}" for first, last in product(FIRST_NAMES.split(), LAST_NAMES.split())]


@cache
def words() -> tuple[str, ...]:
    """Different English words of four to nine letters, in lower case, in alphabetical order: those of the book."""
    counts = Counter(re.findall(r"(?<![\w'-])[a-z]{4,9}(?![\w'-])", pretrained.book()))
    return tuple(sorted(word for word, count in counts.items() if count >= RARE))


def sentences(text: str) -> list[str]:
    """A text cut behind its sentences, with blanks and line ends within them as single spaces.

    >>> sentences("It rained.  She\\nstayed in! And then?")
    ['It rained.', 'She stayed in!', 'And then?']
    """
    return [part for part in re.split(r"(?<=[.!?]) ", " ".join(text.split())) if part]
