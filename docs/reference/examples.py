"""For the site: examples in docstrings (`>>> ...`) become blocks of code, which Markdown would take for quotations."""

from __future__ import annotations

from typing import Any

import griffe


class Examples(griffe.Extension):
    """Puts a fence around every example of every docstring."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)


def fenced(text: str) -> str:
    """A docstring with a fence around each example; an example ends where its paragraph ends.

    >>> print(fenced("One:\\n\\n>>> 1\\n1\\n\\nDone."))
    One:
    <BLANKLINE>
    ```pycon
    >>> 1
    1
    ```
    <BLANKLINE>
    Done.
    """
    paragraphs = text.split("\n\n")
    marked = [f"```pycon\n{p.rstrip()}\n```" if p.lstrip("\n").startswith(">>>") else p for p in paragraphs]
    return "\n\n".join(marked)
