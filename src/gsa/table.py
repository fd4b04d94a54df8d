"""Tables of figures: columns and rows, shown as text, as Markdown, or as the JSON that they were made from."""

from __future__ import annotations

import json as json_module
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

GAP = 3
"""Spaces between columns, if the terminal is wide enough; one if not."""
EDGES = 2
"""Characters at the left and at the right of all columns."""


@dataclass(frozen=True)
class Column:
    """A header, and what stands beneath it."""

    header: str
    """It may have several lines."""
    value: str | int | Callable[[Any], Any]
    """Of a row: the key or the place of a value, or a function that finds it."""
    form: str = "{}"
    """How a value is written, for `str.format`; None leaves the cell empty."""
    left: bool = False
    """Names begin at the left, numbers end at the right."""

    def cell(self, row: Any) -> str:
        value = self.value(row) if callable(self.value) else row[self.value]
        return "" if value is None else self.form.format(value)


@dataclass(frozen=True)
class Table:
    """Rows of any kind that the columns can read.

    >>> ms = Table("Times", [Column("way", "name", left=True), Column("ms", "ms", "{:.1f}")], [{"name": "a", "ms": 2}])
    >>> print(ms.markdown())
    **Times**
    <BLANKLINE>
    | way | ms |
    | --- | ---: |
    | a | 2.0 |
    """

    title: str
    columns: Sequence[Column]
    rows: Sequence[Any]
    notes: Sequence[str] = field(default=())
    """Sentences beneath it."""

    def headers(self) -> list[str]:
        return [column.header for column in self.columns]

    def cells(self) -> list[list[str]]:
        """The text of every row."""
        return [[column.cell(row) for column in self.columns] for row in self.rows]

    def widths(self) -> list[int]:
        """Characters that the columns take."""
        return [
            max(map(len, "\n".join(texts).split("\n"))) for texts in zip(self.headers(), *self.cells(), strict=True)
        ]

    def width(self, gap: int = 1) -> int:
        """Characters that the table takes, if nothing is broken into lines."""
        widths = self.widths()
        return EDGES + sum(widths) + gap * (len(widths) - 1)

    def markdown(self) -> str:
        """The title in bold and the table, without the notes."""
        rules = ["---" if column.left else "---:" for column in self.columns]
        lines = [[header.replace("\n", " ") for header in self.headers()], rules, *self.cells()]
        return f"**{self.title}**\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines)

    def print(self, console: Console) -> None:
        """Shows the table and its notes; columns come closer together, and then wrap, if the terminal is narrow."""
        from rich.box import SIMPLE_HEAD
        from rich.table import Table as RichTable
        from rich.text import Text

        shown = RichTable(
            title=Text(self.title, style="table.title"),
            title_justify="left",
            box=SIMPLE_HEAD,
            pad_edge=False,
            padding=(0, GAP // 2 if self.width(GAP) <= console.width else 0),
        )
        for column in self.columns:
            shown.add_column(Text(column.header), justify="left" if column.left else "right", overflow="fold")
        for row in self.cells():
            shown.add_row(*map(Text, row))
        console.print(shown)
        for note in self.notes:
            # Nothing is broken into lines that goes into a file.
            console.print(note, highlight=False, markup=False, soft_wrap=not console.is_terminal)


def text_columns(first: str, *others: str) -> list[Column]:
    """Columns of rows that are lists of text: names in the first, numbers in the others."""
    return [Column(first, 0, left=True), *(Column(header, place) for place, header in enumerate(others, 1))]


def show(report: Any, tables: Iterable[Table], *, json: bool = False, markdown: bool = False) -> None:
    """Prints a report: all its numbers as JSON, or its tables as Markdown or text."""
    if json:
        print(json_module.dumps(report, indent=2))
    elif markdown:
        print("\n\n".join("\n\n".join([table.markdown(), *table.notes]) for table in tables))
    else:
        from rich.console import Console

        console = Console()
        for table in tables:
            table.print(console)
