"""The report of `gsa bench traffic` as tables, for the terminal and for the documentation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gsa.errors import GSAError
from gsa.table import Table, text_columns

BEGIN, END = "<!-- traffic: written by gsa bench traffic -->", "<!-- end of traffic -->"
NAMES = {"ours": "ours", "fla": "FLA"}
PARTS = {"forward": "forward", "both": "forward + backward"}


def tables(report: dict[str, Any]) -> Iterator[Table]:
    """Bytes, what is saved, the model, and the kernels of the first size on the first machine."""
    yield traffic_table(report)
    yield saved_table(report)
    for part in PARTS:
        yield model_table(report, part)
    for who in _contenders(report):
        for part in ("forward", "backward"):
            yield kernel_table(report, who, part)


def _rows(report: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Machine and size, and what contenders do there."""
    for machine, facts in report["machines"].items():
        for size, contenders in facts["sizes"].items():
            yield f"{machine}, {size}", contenders


def _tokens(report: dict[str, Any], label: str) -> int:
    """Tokens of all heads."""
    B, T = label.split(", ")[-1].split(" x ")
    return int(B) * int(T) * report["heads"]


def _contenders(report: dict[str, Any]) -> list[str]:
    _, first = next(_rows(report))
    return list(first)


def traffic_table(report: dict[str, Any]) -> Table:
    """Bytes per token and head."""
    who = _contenders(report)
    columns = [f"{PARTS[part]}: {NAMES[name]}" for part in PARTS for name in who]
    rows = []
    for label, found in _rows(report):
        models = [found[name]["model"][part] for part in PARTS for name in who]
        per = _tokens(report, label)
        rows.append([label, *(f"{m['once'] / per:,.0f} ({m['asked'] / per:,.0f})" for m in models)])
    return Table(
        "Bytes moved per token and head (in brackets: asked for by programs)", text_columns("", *columns), rows
    )


def saved_table(report: dict[str, Any]) -> Table:
    """Bytes that wait for backward."""
    who = _contenders(report)
    rows = []
    for label, found in _rows(report):
        per = _tokens(report, label)
        saved = [f"{found[name]['saved'][kind] / per:,.0f}" for kind in ("inputs", "extra") for name in who]
        rows.append([label, *saved])
    columns = [f"{kind}: {NAMES[name]}" for kind in ("inputs", "beside them") for name in who]
    return Table("Bytes saved for backward per token and head", text_columns("", *columns), rows)


def model_table(report: dict[str, Any], part: str) -> Table:
    """What the machines could make of it."""
    rows = []
    for label, found in _rows(report):
        for name, row in found.items():
            m = row["model"][part]
            rows.append(
                [
                    f"{label}: {NAMES[name]}",
                    f"{m['matrix_flops'] / m['once']:.0f}",
                    f"{1e3 * m['seconds']:.2f}",
                    f"{1e3 * m['seconds_uncached']:.2f}",
                    f"{100 * m['bandwidth_share']:.0f}%",
                    f"{100 * m['matrix_share']:.0f}%",
                ]
            )
    columns = ["flops per byte", "ms", "ms, uncached", "of bandwidth", "of matrix units"]
    return Table(
        f"Model of one layer's operator, {PARTS[part]}: the least time, and shares of the limits",
        text_columns("", *columns),
        rows,
    )


def kernel_table(report: dict[str, Any], who: str, part: str) -> Table:
    """Kernel by kernel, at the first size of the first machine; what comes to nothing per token has no line."""
    label, found = next(_rows(report))
    processors = next(iter(report["machines"].values()))["processors"]
    per, rows = _tokens(report, label), []
    for work in found[who][part]:
        bytes_ = [work["read_once"], work["written_once"], work["read"] + work["written"]]
        flops = [sum(work["products"].values()) / 1e3, work["flops"] / 1e3]
        rounds = f"{work['programs'] / processors:,.1f}" if work["programs"] else ""
        cells = [*(f"{n / per:,.0f}" for n in bytes_), *(f"{n / per:,.1f}" for n in flops)]
        if any(cell.strip("0.") for cell in cells):
            rows.append([work["name"], rounds, *cells])
    columns = ["rounds", "read", "written", "asked for", "matrix kflops", "other kflops"]
    title = f"{part.capitalize()} kernel by kernel, {NAMES[who]}, per token and head ({label})"
    return Table(title, text_columns("", *columns), rows)


def written_into(text: str, content: list[str]) -> str:
    """The document with this content between its markers."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise GSAError(f"bench: the document needs the lines {BEGIN} and {END} to write between")
    return "\n\n".join([before + begin, *content, end + after])
