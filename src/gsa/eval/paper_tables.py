"""The tables of `gsa eval`: a group's in the layout of the paper, its rows beside ours; and one for other tasks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gsa.eval.groups import GROUPS, Group, GroupColumn
from gsa.eval.paper_rows import PaperRow
from gsa.eval.results import Result
from gsa.eval.tasks.jobs import Missing
from gsa.table import Column, Table

Row = dict[str, Any]
SHORTEST_NAME = 4
"""Characters that are left of a name at least that is cut."""


class Entry(NamedTuple):
    """A result, and the length that was asked for; None, where it is the task's own."""

    length: int | None
    result: Result


def tables(
    groups: Sequence[str], entries: Sequence[Entry], missing: Sequence[Missing], width: int | None = None
) -> list[Table]:
    """A table for each group that was asked for, and one for tasks of no group.

    In tables of groups that would take more than `width` characters, names of models are cut.
    """
    shown = [_group_table(GROUPS[name], entries, missing) for name in groups]
    shown = shown if width is None else [_fitted(table, width) for table in shown]
    of_groups = {task for name in groups for task in GROUPS[name].tasks}
    others = [entry.result for entry in entries if entry.result["task"] not in of_groups]
    return [*shown, _other_table(others)] if others else shown


def _group_table(group: Group, entries: Sequence[Entry], missing: Sequence[Missing]) -> Table:
    ours = [entry for entry in entries if entry.result["task"] in group.tasks]
    done = {entry.result["task"] for entry in ours}
    columns = [column for column in group.columns if column.of_paper or column.task in done]
    lengths = list(dict.fromkeys(entry.length for entry in ours))
    rows = [
        row
        for length in lengths
        for row in _our_rows(group, columns, length, [entry.result for entry in ours if entry.length == length])
    ]
    rows += [_paper_row(group, columns, row) for row in group.rows]
    shown = [
        Column("model", "model", left=True),
        Column("size", "size"),
        Column("tokens", "tokens"),
        *(Column(column.header, column.header) for column in columns),
        *([Column("Avg.", "average")] if group.has_average else []),
    ]
    notes = _notes(group, done, [entry.result for entry in ours], missing)
    return Table(f"{group.name}: {group.title}", shown, rows, notes)


def _our_rows(group: Group, columns: Sequence[GroupColumn], length: int | None, results: Sequence[Result]) -> list[Row]:
    """The values, and their standard errors beneath them."""
    by_task = {result["task"]: result for result in results}
    model = results[0]["model"]
    suffix = "" if length is None else f", {length:,} tokens"
    name = Path(model["name"]).name + suffix
    unknown: Row = {"size": None, "tokens": None, "average": None}
    row: Row = {**unknown, "model": name, "suffix": suffix, "size": _size(model.get("parameters"))}
    errors: Row = {**unknown, "model": "±"}
    values: list[float | None] = []
    for column in columns:
        result = by_task.get(column.task)
        found: dict[str, Any] = {"value": None, "stderr": None} if result is None else result["metrics"][column.metric]
        for place, key in ((row, "value"), (errors, "stderr")):
            place[column.header] = None if found[key] is None else _number(found[key] * (100 if column.percent else 1))
        if result is not None and found["value"] is None:
            row[column.header] = "inf"
        if column.averaged:
            values.append(found["value"])
    known = [value for value in values if value is not None]
    if group.has_average and len(known) == len(values):
        row["average"] = f"{100 * sum(known) / len(known):.1f}"
    return [row, errors]


def _paper_row(group: Group, columns: Sequence[GroupColumn], row: PaperRow) -> Row:
    of_paper = [column for column in columns if column.of_paper]
    values = [None if value is None else f"{value:.1f}" for value in row.values]
    cells: Row = dict.fromkeys((column.header for column in columns), None)
    cells |= dict(zip((column.header for column in of_paper), values, strict=False))
    average = values[len(of_paper)] if group.has_average else None
    return {"model": row.model, "size": row.size, "tokens": row.tokens, "average": average} | cells


def _fitted(table: Table, width: int) -> Table:
    """The table with names of our models cut, if it would be too wide; a note has them whole."""
    room = width - (table.width() - table.widths()[0])
    rows, notes = [], list(table.notes)
    for row in table.rows:
        name, suffix = row["model"], row.get("suffix", "")
        left = room - len(suffix) - 1
        if len(name) > room and left >= SHORTEST_NAME:
            cut = f"{name[:left]}…"
            notes.append(f"{cut} is {name.removesuffix(suffix)}.")
            row = row | {"model": cut + suffix}
        rows.append(row)
    return Table(table.title, table.columns, rows, list(dict.fromkeys(notes)))


def _number(value: float) -> str:
    """A number in five characters.

    >>> _number(99.96), _number(6.2e8), _number(1724.3)
    ('100.0', '6.2e8', '1,724')
    """
    if value < 1000:
        return f"{value:.1f}"
    return f"{value:,.0f}" if value < 9999.5 else f"{value:.1e}".replace("e+0", "e").replace("e+", "e")


def _size(parameters: Any) -> str | None:
    if not isinstance(parameters, int):
        return None
    return f"{parameters / 1e9:.1f}B" if parameters >= 1e9 else f"{parameters / 1e6:.1f}M"


def _notes(group: Group, done: set[str], results: Sequence[Result], missing: Sequence[Missing]) -> list[str]:
    notes = ["± stands before standard errors; rows with a number of tokens are the paper's."] if results else []
    if limits := sorted({result["limit"] for result in results if result["limit"] is not None}):
        notes.append(f"Only the first {' or '.join(map(str, limits))} documents of a task were used.")
    notes += dict.fromkeys(note for result in results for note in result["notes"])
    notes += [str(each) for each in missing if each.task in group.tasks]
    lacking = [column.title for column in group.columns if column.averaged and column.task not in done]
    if group.has_average and lacking:
        notes.append(f"There is no average of ours, since these columns are missing: {', '.join(lacking)}.")
    return notes


def _other_table(results: Sequence[Result]) -> Table:
    """Every metric of tasks that stand in none of the groups."""
    rows = [
        {"title": result["title"], "shots": result["shots"], "metric": name, "main": name == result["main"], **found}
        for result in results
        for name, found in result["metrics"].items()
    ]
    columns = [
        Column("task", "title", left=True),
        Column("shots", "shots"),
        Column("metric", lambda row: row["metric"] + (" *" if row["main"] else ""), left=True),
        Column("value", "value", "{:.4f}"),
        Column("stderr", "stderr", "{:.4f}"),
    ]
    notes = ["* is the metric that stands for the task.", *dict.fromkeys(n for r in results for n in r["notes"])]
    return Table(f"Tasks, {Path(results[0]['model']['name']).name}", columns, rows, notes)
