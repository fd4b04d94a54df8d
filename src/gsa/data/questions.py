"""Questions to ask a model: the lines of text files, and a field of rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gsa.data.documents import Findings, no_text, texts
from gsa.data.portions import read_portions
from gsa.data.sources import plan


def read_questions(sources: Sequence[str], field: str, say: Callable[[str], None]) -> list[str]:
    """Each line of text files and the field of each row of .jsonl and .parquet files, in order; white space is one
    space, and what was there before is left out. Rows and bytes that cannot be read are told to `say`."""
    inputs = [entry for group in plan(sources, field=field) for entry in group]
    findings = Findings(strict=False)
    found: dict[str, None] = {}
    for portion in read_portions(inputs, field):
        for text in texts(portion.parts, field, findings):
            lines = [text.text] if text.file is None else text.text.splitlines()
            found |= dict.fromkeys(" ".join(line.split()) for line in lines)
    found.pop("", None)
    if not found:
        raise no_text(sources, inputs, field, findings.bad_rows)
    for line in findings.told():
        say(line)
    return list(found)
