"""The picture of `gsa eval --tasks`: accuracies of a model as bars, those of the paper's models beside them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gsa.chart import PALE, Bar, draw_bars, picture
from gsa.eval.compare_picture import bar_of
from gsa.eval.groups import GROUPS, Group
from gsa.eval.paper_tables import Entry

Series = dict[str, list[Bar | None]]


def save_picture(groups: Sequence[str], entries: Sequence[Entry], path: Path) -> bool:
    """Writes a picture with a panel for each group and one for other tasks; False if there is nothing to draw.

    Metrics of which lower is better, such as perplexities, have other scales, and are left out.
    """
    panels = [_group(GROUPS[name], entries) for name in groups]
    of_groups = {task for name in groups for task in GROUPS[name].tasks}
    panels.append(_others([entry for entry in entries if entry.result["task"] not in of_groups]))
    panels = [panel for panel in panels if panel[1] and panel[2]]
    if not panels:
        return False
    width = max(7.0, *(2 + 0.12 * len(names) * len(series) for _, names, series in panels))
    with picture(path, rows=len(panels), size=(min(width, 24), 4.5 * len(panels))) as axes:
        for place, (title, names, series) in zip(axes if len(panels) > 1 else [axes], panels, strict=True):
            draw_bars(place, names, series)
            place.set(title=title)
            place.legend(ncols=1, fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5))
    return True


def _group(group: Group, entries: Sequence[Entry]) -> tuple[str, list[str], Series]:
    """The title, the columns in percent, and the rows: ours, and pale the paper's."""
    shown = [place for place, column in enumerate(group.columns) if column.percent]
    series: Series = {}
    for entry in entries:
        for place, number in enumerate(shown):
            column = group.columns[number]
            if column.task == entry.result["task"]:
                bars = series.setdefault(_label(entry), [None] * len(shown))
                bars[place] = bar_of(entry.result["metrics"][column.metric])
    if series:
        for row in group.rows:
            values = [row.values[number] if number < len(row.values) else None for number in shown]
            bars = [None if value is None else Bar(value / 100) for value in values]
            series[f"{PALE}{row.model} {row.size}, {row.tokens}"] = bars
    return group.title, [group.columns[number].title for number in shown], series


def _others(entries: Sequence[Entry]) -> tuple[str, list[str], Series]:
    """The same for tasks of no group, with their main metrics."""
    found: dict[str, dict[str, Any]] = {}
    for entry in entries:
        result = entry.result
        if result["metrics"][result["main"]]["higher_is_better"]:
            name = f"{result['title']} {result['main']}"
            found.setdefault(name, {})[_label(entry)] = bar_of(result["metrics"][result["main"]])
    labels = dict.fromkeys(label for bars in found.values() for label in bars)
    return "Tasks", list(found), {label: [bars.get(label) for bars in found.values()] for label in labels}


def _label(entry: Entry) -> str:
    name = Path(entry.result["model"]["name"]).name
    return name if entry.length is None else f"{name}, {entry.length:,} tokens"
