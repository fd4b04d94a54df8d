"""Charts of one quantity against another, in the terminal and as PNG."""

from __future__ import annotations

from pathlib import Path

from gsa.extras import imported
from gsa.files import written

Series = dict[str, dict[int, float]]
"""name -> {x: y}"""


def bars(series: Series, x_name: str, y_name: str, width: int = 40) -> str:
    """Horizontal bars, one per x and series, all on one linear scale."""
    longest = max(y for points in series.values() for y in points.values())
    names = max(map(len, series))
    lines = [f"{x_name:>7}  {y_name}"]
    for x in sorted({x for points in series.values() for x in points}):
        label = f"{x:>7}"
        for name, points in series.items():
            if x in points:
                bar = "█" * max(1, round(width * points[x] / longest))
                lines.append(f"{label}  {name:<{names}} {bar} {points[x]:.3g}")
                label = " " * 7
    return "\n".join(lines)


def save_lines(series: Series, path: Path, x_name: str, y_name: str, title: str) -> None:
    """Lines over a logarithmic x axis, written to a PNG file (complete or not at all)."""
    imported("matplotlib", "chart: a picture").use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5), dpi=120, layout="constrained")
    for name, points in series.items():
        axes.plot(list(points), list(points.values()), marker="o", label=name)
    axes.set_xscale("log", base=2)
    ticks = sorted({x for points in series.values() for x in points})
    axes.set_xticks(ticks, [str(x) for x in ticks])
    axes.set(xlabel=x_name, ylabel=y_name, title=title, ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with written(path) as place:
            figure.savefig(place, format="png")
    finally:
        pyplot.close(figure)
