"""`make results`, of experiments: writes tables of docs/results.md from the JSON files that it names, and from nothing
else.

The page names a file in a mark, and the tables of that file stand between it and the next `<!-- to here -->`:

    <!-- from results/paper/mqar.json -->
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gsa.paper.ablation_report import ablation_tables
from gsa.paper.efficiency_report import efficiency_tables
from gsa.paper.mqar_report import mqar_tables
from gsa.table import Table

HERE = Path(__file__).parent
PAGE = HERE.parent / "results.md"
MARKED = re.compile(r"(<!-- from (\S+) -->\n).*?(<!-- to here -->)", re.DOTALL)


def _beside(name: str) -> Callable[[dict[str, Any]], list[Table]]:
    """What makes tables of a record in a script that lies beside this one."""

    def tables(record: dict[str, Any]) -> list[Table]:
        sys.path.insert(0, str(HERE))
        try:
            found: list[Table] = importlib.import_module(name).tables(record)
        finally:
            sys.path.remove(str(HERE))
        return found

    return tables


TABLES: dict[str, Callable[[dict[str, Any]], list[Table]]] = {
    "mqar": mqar_tables,
    "ablation": ablation_tables,
    "efficiency": efficiency_tables,
    "distilled": _beside("distilled"),
    "recurrence": _beside("recurrence"),
}


def section(path: Path) -> str:
    """The tables of a record, and how it was made."""
    record = json.loads(path.read_text())
    parts = []
    for table in TABLES[record["experiment"]](record):
        parts += [table.markdown(), *table.notes]
    unique = list(dict.fromkeys(parts))  # a note that several tables have is told once, behind the first
    return "\n\n".join([f"`{record['command']}`, {record['date']}:", *unique])


def updated(page: str, place: Path = PAGE.parent) -> str:
    """The page with the tables of all files that it names."""
    return MARKED.sub(lambda found: f"{found[1]}\n{section(place / found[2])}\n\n{found[3]}", page)


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text()))
    print(PAGE)
