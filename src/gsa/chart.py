"""Charts of one quantity against another, or of shares against two others, in the terminal and as pictures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from gsa.console import check_place
from gsa.errors import GSAError
from gsa.extras import imported
from gsa.files import written

Series = dict[str, dict[int, float]]
"""name -> {x: y}"""
Cells = dict[tuple[int, int], float]
"""(x, y) -> a share from 0 to 1"""
PALE = "~ "
"""What the label of pale bars begins with."""
FORMATS = ("png", "svg", "pdf")
"""Of pictures."""
_SHADES = " ░▒▓█"


class Bar(NamedTuple):
    """A share from 0 to 1, and how far it may be off."""

    value: float
    error: float = 0.0


def bars(series: Series, x_name: str, y_name: str, width: int = 40) -> str:
    """Horizontal bars, one per x and series, all on one linear scale."""
    longest = max(y for points in series.values() for y in points.values()) or 1
    names = max(map(len, series))
    lines = [f"{x_name:>7}  {y_name}"]
    for x in sorted({x for points in series.values() for x in points}):
        label = f"{x:>7}"
        for name, points in series.items():
            if x in points:
                bar = "█" * max(points[x] > 0, round(width * points[x] / longest))
                lines.append(f"{label}  {name:<{names}} {bar} {points[x]:.3g}")
                label = " " * 7
    return "\n".join(lines)


def check_picture(path: str) -> None:
    """Raises if a picture cannot be written there: better before long work than after it."""
    _format(Path(path))
    check_place(path)


def _format(path: Path) -> str:
    kind = path.suffix.lower().removeprefix(".")
    if kind not in FORMATS:
        raise GSAError(f"{str(path)!r} cannot be written, expected the name of a picture: .{', .'.join(FORMATS)}")
    return kind


@contextmanager
def picture(path: Path, rows: int = 1, size: tuple[float, float] = (7, 4.5)) -> Iterator[Any]:
    """The axes of matplotlib to draw in, or an array of `rows` of them, one above the other.

    When the block ends without an error, the picture is written to a file, complete or not at all, in the format that
    its name ends with.
    """
    kind = _format(path)
    imported("matplotlib", "chart: a picture").use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(rows, figsize=size, dpi=120, layout="constrained")
    try:
        yield axes
        path.parent.mkdir(parents=True, exist_ok=True)
        with written(path) as place:
            figure.savefig(place, format=kind)
    finally:
        pyplot.close(figure)


def draw_bars(axes: Any, names: Sequence[str], series: Mapping[str, Sequence[Bar | None]]) -> None:
    """Bars in percent, side by side for each name: one of each series, with its error, where there is a value.

    Series whose labels begin with PALE are drawn pale; the legend leaves that out.
    """
    from matplotlib import colormaps

    colours = colormaps["tab20"]
    for number, (label, bars) in enumerate(series.items()):
        known = [(place, bar) for place, bar in enumerate(bars) if bar is not None]
        axes.bar(
            [place + (number + 0.5) / len(series) * 0.8 - 0.4 for place, _ in known],
            [100 * bar.value for _, bar in known],
            width=0.8 / len(series),
            yerr=[100 * bar.error for _, bar in known],
            label=plain(label.removeprefix(PALE)),
            color=f"C{number}" if len(series) <= 10 else colours(number % 20),
            alpha=0.5 if label.startswith(PALE) else 1.0,
        )
    axes.set_xticks(range(len(names)), [plain(name) for name in names], rotation=30, ha="right")
    axes.set(ylabel="%, with standard errors")
    axes.grid(alpha=0.3, axis="y")


def plain(text: str) -> str:
    """Without the dollar sign's meaning in matplotlib, which is to begin a formula."""
    return text.replace("$", r"\$")


def save_lines(series: Series, path: Path, x_name: str, y_name: str, title: str) -> None:
    """Lines over a logarithmic x axis, written to a file (complete or not at all)."""
    with picture(path) as axes:
        for name, points in series.items():
            axes.plot(list(points), list(points.values()), marker="o", label=name)
        axes.set_xscale("log", base=2)
        ticks = sorted({x for points in series.values() for x in points})
        axes.set_xticks(ticks, [str(x) for x in ticks])
        if len(ticks) > 10:  # or their numbers would run into each other
            axes.tick_params(axis="x", labelsize=7)
        highest = max((y for points in series.values() for y in points.values()), default=0)
        axes.set(xlabel=x_name, ylabel=y_name, title=title, ylim=(0, 1.08 * highest or 1))
        axes.grid(alpha=0.3)
        axes.legend()


def heat_map(cells: Cells, x_name: str, y_name: str) -> str:
    """Shares from 0 to 1 as shades, a column for each x and a row for each y; a cell that is missing stays empty.

    >>> print(heat_map({(512, 0): 1.0, (512, 50): 0.5, (1024, 0): 0.0}, "length", "depth"))
        depth \\ length      512     1024
                     0 ████100%       0%
                    50 ▒▒▒▒ 50%
    """
    columns, rows = _axes(cells)
    head = f"{y_name} \\ {x_name}"
    width = max(len(head) + 2, 18)
    lines = [f"{head:>{width}}" + "".join(f"{x:>9}" for x in columns)]
    for y in rows:
        shown = " ".join(_shaded(cells.get((x, y))) for x in columns)
        lines.append(f"{y:>{width}} {shown}".rstrip())
    return "\n".join(lines)


def _shaded(share: float | None) -> str:
    """Four characters of a share's shade, and its percents."""
    return " " * 8 if share is None else _SHADES[round(share * (len(_SHADES) - 1))] * 4 + f"{share:>4.0%}"


def save_heat_map(cells: Cells, path: Path, x_name: str, y_name: str, title: str) -> None:
    """The same as colours, written to a file (complete or not at all)."""
    columns, rows = _axes(cells)
    with picture(path) as axes:
        shares = [[cells.get((x, y), float("nan")) for x in columns] for y in rows]
        image = axes.imshow(shares, cmap="RdYlGn", vmin=0, vmax=1, aspect="auto")
        for (x, y), share in cells.items():
            axes.text(columns.index(x), rows.index(y), f"{share:.0%}", ha="center", va="center")
        axes.set_xticks(range(len(columns)), [str(x) for x in columns])
        axes.set_yticks(range(len(rows)), [str(y) for y in rows])
        axes.set(xlabel=x_name, ylabel=y_name, title=title)
        axes.figure.colorbar(image)


def _axes(cells: Cells) -> tuple[list[int], list[int]]:
    return sorted({x for x, _ in cells}), sorted({y for _, y in cells})
