"""What a table looks like."""

import io

from rich.console import Console

from gsa.table import Table


def printed(*tables: Table, width: int = 80) -> str:
    """The text of tables on paper of this width, on which nothing may be cut off."""
    paper = Console(width=width, file=io.StringIO(), record=True)
    for table in tables:
        table.print(paper)
    shown = paper.export_text()
    assert "…" not in shown
    return shown
