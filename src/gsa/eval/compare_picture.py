"""The picture of `gsa compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gsa.chart import Bar, draw_bars, picture, plain


def save_picture(report: dict[str, Any], path: Path) -> None:
    """Writes a picture: values of the tasks in percent as bars, and differences to the first model with intervals."""
    labels = [model["label"] for model in report["models"]]
    shares = [task for task in report["tasks"] if task["higher_is_better"]]
    paired = [task for task in report["tasks"] if any(task["differences"])]
    panels = [draw for draw, tasks in ((_bars, shares), (_intervals, paired)) if tasks] or [_bars]
    width = max(7.0, 2 + 0.4 * len(labels) * len(shares))
    height = 4.5 * len(panels) + 0.2 * len(paired) * (len(labels) - 1)
    with picture(path, rows=len(panels), size=(min(width, 24), min(height, 40))) as axes:
        for draw, place in zip(panels, axes if len(panels) > 1 else [axes], strict=True):
            draw(place, labels, shares if draw is _bars else paired)


def _bars(axes: Any, labels: list[str], tasks: list[dict[str, Any]]) -> None:
    cells = {label: [task["values"][number] for task in tasks] for number, label in enumerate(labels)}
    series = {label: [bar_of(cell) for cell in values] for label, values in cells.items()}
    draw_bars(axes, [f"{task['header']}\n{task['metric']}" for task in tasks], series)
    axes.set(title="Results")
    axes.figure.legend(loc="outside upper center", ncols=4)


def _intervals(axes: Any, labels: list[str], tasks: list[dict[str, Any]]) -> None:
    """A line for each task and model: to the right of 0 it is better than the first model."""
    names: list[str] = []
    for task in tasks:
        scale, unit = _scale(task)
        for number, found in enumerate(task["differences"]):
            if found is None:
                continue
            low, value, high = sorted(scale * found[name] for name in ("low", "value", "high"))
            style = {"color": f"C{number}", "alpha": 0.4 if found["better"] is None else 1.0}
            axes.plot([low, high], [len(names)] * 2, linewidth=2, **style)
            axes.plot([value], [len(names)], "o", **style)
            names.append(f"{task['header']} {task['metric']}, {unit}: {labels[number]}")
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_yticks(range(len(names)), [plain(name) for name in names])
    axes.invert_yaxis()
    axes.set(xlabel="better to the right; pale where the interval has 0 in it", title=plain(f"Against {labels[0]}"))
    axes.grid(alpha=0.3, axis="x")


def _scale(task: dict[str, Any]) -> tuple[float, str]:
    """What a difference is multiplied by to be in percent, and larger where it is better; and the unit it has then."""
    if task["higher_is_better"]:
        return 100.0, "points"
    first = abs(task["values"][0]["value"])
    return -100.0 / first if first else -1.0, "% of the first"


def bar_of(cell: dict[str, Any] | None) -> Bar | None:
    """The bar of a metric; None if there is no value."""
    return None if cell is None or cell["value"] is None else Bar(cell["value"], cell["stderr"] or 0.0)
