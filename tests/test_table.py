"""Tables say the same as text, as Markdown and as JSON, on paper of any width."""

import json

import pytest

from gsa.table import Column, Table, show, text_columns

from .tables import printed

ROWS = [{"name": "long [name]", "ms": 12.345, "share": 0.5}, {"name": "b", "ms": None, "share": None}]
COLUMNS = [
    Column("way", "name", left=True),
    Column("ms", "ms", "{:.1f}"),
    Column("share", "share", "{:.0%}"),
    Column("twice", lambda row: None if row["ms"] is None else 2 * row["ms"], "{:.2f}x"),
]
TABLE = Table("Times [s]", COLUMNS, ROWS, ["a note: [really] 1.0"])


def test_text() -> None:
    title, _, header, _, first, second, _, note = (line.rstrip() for line in printed(TABLE).splitlines())
    assert title == "Times [s]"
    assert header == " way             ms   share    twice"
    assert first == " long [name]   12.3     50%   24.69x"
    assert second == " b"
    assert note == "a note: [really] 1.0"


def test_narrow_paper_loses_nothing() -> None:
    tight = printed(TABLE, width=32)
    assert " long [name] 12.3   50% 24.69x" in tight
    cramped = printed(TABLE, width=20)
    whole = "".join(cramped.split())
    assert all(part in whole for part in ("12.3", "50%", "note"))


def test_markdown_and_json(capsys: pytest.CaptureFixture) -> None:
    show(ROWS, [TABLE, TABLE], markdown=True)
    one = (
        "**Times [s]**\n\n| way | ms | share | twice |\n| --- | ---: | ---: | ---: |\n"
        "| long [name] | 12.3 | 50% | 24.69x |\n| b |  |  |  |\n\na note: [really] 1.0"
    )
    assert capsys.readouterr().out == f"{one}\n\n{one}\n"
    show(ROWS, [TABLE], json=True)
    assert json.loads(capsys.readouterr().out) == ROWS
    show(ROWS, [TABLE])
    assert "Times [s]" in capsys.readouterr().out


def test_headers_of_several_lines() -> None:
    table = Table("", [Column("way", 0, left=True), Column("time\nms", 1)], [["a", "1"]])
    assert (table.widths(), table.width()) == ([3, 4], 10)
    assert [line.split() for line in printed(table).splitlines()[1:3]] == [["time"], ["way", "ms"]]
    assert "| way | time ms |" in table.markdown()


def test_rows_of_text() -> None:
    table = Table("", text_columns("of", "a", "b"), [["x", "1", "2"]])
    assert table.cells() == [["x", "1", "2"]]
    assert [column.left for column in table.columns] == [True, False, False]
