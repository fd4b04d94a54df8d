"""Documents of local files for evaluation, whole, one after another; and lists of lengths as people write them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from gsa.errors import GSAError
from gsa.options import MOST
from gsa.terminal import quoted

_LENGTH = re.compile(r"(?P<number>\d{1,12})(?P<unit>[kKmM]?)")
_UNITS = {"": 1, "k": 2**10, "m": 2**20}


class Document(NamedTuple):
    """A text, and where it comes from: a file's name, or that of a file of rows with the number of the row."""

    name: str
    text: str


def documents(sources: Sequence[str], field: str, say: Callable[[str], None]) -> Iterator[Document]:
    """Every document of files and folders as `gsa data prepare` takes them.

    Rows that cannot be read are left out, bytes that are not UTF-8 are replaced; both are counted, and told to `say`.
    """
    from gsa.data.documents import Findings, no_text, texts
    from gsa.data.portions import read_portions
    from gsa.data.sources import plan

    inputs = [entry for entries in plan(sources, field=field) for entry in entries]
    findings = Findings(strict=False)
    number, held = 0, ""
    for portion in read_portions(inputs, field):
        for found in texts(portion.parts, field, findings):
            held = found.text if found.begins else held + found.text
            if found.ends:
                number += 1
                yield Document(found.file or f"row {number}", held)
    if not number:
        raise no_text(sources, inputs, field, dict(findings.bad_rows))
    for line in findings.told():
        say(line)


def lengths_of(text: str, name: str, least: int = 1, most: int = MOST[int]) -> list[int]:
    """Whole numbers with commas between, in ascending order; K is 1024 and M is 1024 K.

    >>> lengths_of("2K, 512,64k", "lengths")
    [512, 2048, 65536]
    """
    numbers = set()
    for word in text.split(","):
        found = _LENGTH.fullmatch(word.strip())
        number = int(found["number"]) * _UNITS[found["unit"].lower()] if found else least - 1
        if not least <= number <= most:
            limit, example = f"from {least}", "512,1K,2K"
            if most != MOST[int]:
                limit, example = f"{limit} to {most}", f"{least},{most}"
            raise GSAError(
                f"{name} must be whole numbers {limit} with commas between, as in {example}, got {quoted(text)}"
            )
        numbers.add(number)
    return sorted(numbers)


def length_name(number: int) -> str:
    """A length as people write it.

    >>> length_name(65536), length_name(1000)
    ('64K', '1000')
    """
    return f"{number // 1024}K" if number % 1024 == 0 and number else str(number)
