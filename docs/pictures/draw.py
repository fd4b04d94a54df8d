"""`make pictures`: draws the pictures of the documents from the tables of docs/results.md and docs/results/, and from
nothing else.

The same tables give the same bytes, so that a test can tell whether a picture is still true.
"""

from __future__ import annotations

import csv
import re
from math import ceil, log2, log10
from pathlib import Path

HERE = Path(__file__).parent
RESULTS = HERE.parent / "results.md"
Lines = dict[str, dict[int, float]]
"""name -> {x: y}"""

WIDTH, HEIGHT = 760, 380
LEFT, RIGHT, TOP, BOTTOM = 70, 170, 56, 52
"""The margins around the plot; names of lines stand in the right one."""
COLOURS = {
    "gsa int4": "#0b3c8c",
    "gsa int8": "#1f6fd1",
    "gsa bf16": "#6aa9f0",
    "GSA, state": "#1f6fd1",
    "llama.cpp Q4_1": "#d9822b",
    "transformers bf16": "#b3261e",
    "Llama, KV cache": "#b3261e",
    "fp32": "#b3261e",
    "bf16": "#1f6fd1",
}


def lines_of(page: str, first_cell: str) -> Lines:
    """The table whose header begins with a cell; its other headers are the x, each row is a line, gaps are left out."""
    found = re.search(rf"^\| {re.escape(first_cell)} \|(.*)\|\n\|[-| :]+\|\n((?:\|.*\|\n)+)", page, re.MULTILINE)
    if found is None:
        raise ValueError(f"{RESULTS.name} has no table that begins with {first_cell!r}")
    places = [int(cell.replace(",", "")) for cell in found[1].split("|")]
    lines: Lines = {}
    for row in found[2].splitlines():
        name, *cells = (cell.strip() for cell in row.strip("|").split("|"))
        lines[name] = {x: float(cell.replace(",", "")) for x, cell in zip(places, cells, strict=True) if cell}
    return lines


def curves_of(path: Path, every: int) -> Lines:
    """The columns of a CSV file over its first one, each point the mean of so many rows."""
    with path.open() as file:
        first, *names = next(rows := csv.reader(file))
        table = [[float(cell) for cell in row] for row in rows]
    assert first == "step"
    pieces = [table[i : i + every] for i in range(0, len(table), every)]
    return {
        name: {int(piece[-1][0]): sum(row[column] for row in piece) / len(piece) for piece in pieces}
        for column, name in enumerate(names, 1)
    }


def curves(lines: Lines, title: str, x_name: str, y_name: str, least: int, most: int) -> str:
    """An SVG with a thin line for each name over an x that is not logarithmic; y goes from `least` to `most`."""
    longest = max(x for points in lines.values() for x in points)

    def across(x: float) -> float:
        return LEFT + x / longest * (WIDTH - LEFT - RIGHT)

    def down(y: float) -> float:
        return HEIGHT - BOTTOM - (y - least) / (most - least) * (HEIGHT - TOP - BOTTOM)

    parts = _frame(title, x_name, y_name)
    for mark in range(least, most + 1):
        parts += _mark(down(mark), str(mark))
    for x in range(0, longest + 1, 100):
        parts.append(f'<text x="{across(x):.1f}" y="{HEIGHT - BOTTOM + 20}" text-anchor="middle">{x}</text>')
    for i, (name, points) in enumerate(lines.items()):
        path = "L".join(f"{across(x):.1f} {down(y):.1f}" for x, y in points.items())
        dashes = ' stroke-dasharray="7 5"' if i else ""  # where lines lie on each other, both can be seen
        parts.append(f'<path d="M{path}" fill="none" stroke="{COLOURS[name]}" stroke-width="2.5"{dashes}/>')
        y = down(points[longest]) + 18 * i - 4
        said = f"{name}: {points[longest]:.4f}"
        parts.append(f'<text x="{across(longest) + 10:.1f}" y="{y:.1f}" fill="{COLOURS[name]}">{said}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _frame(title: str, x_name: str, y_name: str) -> list[str]:
    """The beginning of an SVG, with its words."""
    middle = (LEFT + WIDTH - RIGHT) / 2
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        'font-family="Helvetica, Arial, sans-serif" font-size="13" fill="#333">',
        f"<title>{title}</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="8" fill="#fff"/>',
        f'<text x="{LEFT}" y="26" font-size="16" font-weight="bold">{title}</text>',
        f'<text x="{LEFT}" y="45" fill="#666">{y_name}</text>',
        f'<text x="{middle:.1f}" y="{HEIGHT - 10}" text-anchor="middle" fill="#666">{x_name}</text>',
    ]


def _mark(y: float, said: str) -> list[str]:
    """A line across the plot, and what it stands for."""
    return [
        f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>',
        f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{said}</text>',
    ]


def picture(lines: Lines, title: str, x_name: str, y_name: str, logarithmic: bool) -> str:
    """An SVG with a line for each name, which stands at its end. x is logarithmic, y if wanted; from 0 if not."""
    places = sorted({x for points in lines.values() for x in points})
    highest = max(y for points in lines.values() for y in points.values())
    if logarithmic:
        marks = [10.0**power for power in range(6, ceil(log10(highest)) + 1)]
    else:
        marks = [100.0 * count for count in range(ceil(highest / 100) + 1)]

    def across(x: float) -> float:
        share = (log2(x) - log2(places[0])) / (log2(places[-1]) - log2(places[0]))
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def down(y: float) -> float:
        share = log10(y / marks[0]) / log10(marks[-1] / marks[0]) if logarithmic else y / marks[-1]
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)

    parts = _frame(title, x_name, y_name)
    for mark in marks:
        parts += _mark(down(mark), _short(mark) if mark else "0")
    last = float(WIDTH)
    for x in reversed(places):
        if last - across(x) > 40:  # or two numbers would touch
            last = across(x)
            parts.append(f'<text x="{last:.1f}" y="{HEIGHT - BOTTOM + 20}" text-anchor="middle">{x:,}</text>')
    for name, points in lines.items():
        colour = COLOURS[name]
        path = "L".join(f"{across(x):.1f} {down(y):.1f}" for x, y in points.items())
        parts.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2.5"/>')
        parts += [f'<circle cx="{across(x):.1f}" cy="{down(y):.1f}" r="4" fill="{colour}"/>' for x, y in points.items()]
        end = max(points)
        said = f"{name}: {_short(points[end])}"
        parts.append(f'<text x="{across(end) + 10:.1f}" y="{down(points[end]) + 4:.1f}" fill="{colour}">{said}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _short(y: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6)):
        if y >= size:
            return f"{y / size:.3g} {unit}"
    return f"{y:g}"


def pictures() -> dict[str, str]:
    """All pictures, by the names of their files."""
    page = RESULTS.read_text()
    return {
        "tokens.svg": picture(
            lines_of(page, "context"),
            "Tokens a second behind a context, models of 135M, 2 CPU cores",
            "tokens of context",
            "tokens a second",
            logarithmic=False,
        ),
        "memory.svg": picture(
            lines_of(page, "tokens read"),
            "What a sequence keeps in memory, models of 135M",
            "tokens read",
            "bytes",
            logarithmic=True,
        ),
        "precision.svg": curves(
            curves_of(HERE.parent / "results" / "precision.csv", every=10),
            "Losses of one run in fp32 and in bf16, 4.6M parameters",
            "steps of 1024 tokens",
            "nats a token, mean of 10 steps",
            least=4,
            most=9,
        ),
    }


if __name__ == "__main__":
    for name, content in pictures().items():
        (HERE / name).write_text(content)
        print(HERE / name)
