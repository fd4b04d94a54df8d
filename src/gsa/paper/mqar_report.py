"""The tables and the picture of `gsa paper mqar`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gsa.paper.record import drawn
from gsa.table import Column, Table

PAPER: dict[str, dict[int, float]] = {
    "gsa": {64: 27.78, 128: 97.98, 256: 99.06, 512: 99.00},
    "mamba": {64: 0.01, 128: 99.02, 256: 99.05, 512: 100.0},
    "gla": {64: 4.12, 128: 85.05, 256: 98.72, 512: 99.11},
    "retnet": {64: 0.82, 128: 13.92, 256: 97.04, 512: 99.04},
    "hgrn2": {64: 0.01, 128: 0.01, 256: 99.0, 512: 99.0},
}
"""The paper's figure: accuracy in percent by model width, at 512 tokens and 64 pairs. Xfmr++ is near 100 everywhere."""


def mqar_tables(record: dict[str, Any]) -> list[Table]:
    """One for every width, the systems by accuracy; and the paper's."""
    base, tables = record["settings"]["base"], []
    task = f"{base['pairs']} pairs in {base['length']} tokens"
    for convolution in (True, False):
        for width in record["settings"]["widths" if convolution else "further"]:
            rows = [row for row in record["rows"] if row["width"] == width and row["convolution"] == convolution]
            if not rows:
                continue
            rows.sort(key=lambda row: -row["accuracy"])
            title = f"MQAR, {task}, width {width}{'' if convolution else ', without short convolution'}"
            tables.append(Table(title, _columns(record, convolution), rows, _notes(record)))
    return [*tables, _paper(record)]


def _paper(record: dict[str, Any]) -> Table:
    """The paper's own numbers, of the systems that were run."""
    run = {row["system"]: row["label"] for row in record["rows"]}
    rows = [{"label": run[system], **accuracies} for system, accuracies in PAPER.items() if system in run]
    columns = [
        Column("system", "label", left=True),
        *(Column(f"width {width}", width, "{:.2f}") for width in PAPER["gsa"]),
    ]
    return Table("The paper: 64 pairs in 512 tokens, accuracy %", columns, rows, ["Xfmr++ is near 100 at all widths."])


def _columns(record: dict[str, Any], convolution: bool) -> list[Column]:
    paper = bool(record["settings"]["setting"] == "full" and convolution)
    columns = [
        Column("system", "label", left=True),
        Column("heads", lambda row: None if row["system"] == "mamba" else row["heads"]),
        Column("slots", "slots"),
        Column("state", "state", "{:,}"),
        Column("accuracy %", lambda row: 100 * row["accuracy"], "{:.1f}"),
        Column("lowest", lambda row: 100 * min(row["accuracies"]), "{:.1f}"),
        Column("highest", lambda row: 100 * max(row["accuracies"]), "{:.1f}"),
        Column("rate", "lr", "{:.2g}"),
        Column("seconds", "seconds", "{:.0f}"),
    ]
    if paper:
        columns.append(Column("paper %", lambda row: PAPER.get(row["system"], {}).get(row["width"]), "{:.1f}"))
    return columns


def _notes(record: dict[str, Any]) -> list[str]:
    seeds, rates = record["settings"]["seeds"], len(record["settings"]["rates"])
    return [f"Mean over seeds ({seeds}) at the best rate (of {rates}); state in numbers."]


def mqar_picture(record: dict[str, Any], path: Path) -> None:
    """Accuracy against width and against the size of the state, and the paper's against width."""
    rows = [row for row in record["rows"] if row["convolution"] and not row["variant"]]
    varied = [row for row in record["rows"] if row["variant"]]
    systems = dict.fromkeys(row["system"] for row in rows)
    with drawn(path, columns=3, size=(15, 4.5)) as (by_width, by_state, paper):
        for place, system in enumerate(systems):
            own = sorted((row for row in rows if row["system"] == system), key=lambda row: row["width"])
            style = {"color": f"C{place}", "marker": "o", "markersize": 4, "label": own[0]["label"], "capsize": 2}
            for axes, key in ((by_width, "width"), (by_state, "state")):
                known = [row for row in own if row[key] is not None]
                if not known:
                    continue
                heights = [100 * row["accuracy"] for row in known]
                below = [height - 100 * min(row["accuracies"]) for height, row in zip(heights, known, strict=True)]
                above = [100 * max(row["accuracies"]) - height for height, row in zip(heights, known, strict=True)]
                axes.errorbar([row[key] for row in known], heights, yerr=[below, above], **style)
            others = [row for row in varied if row["system"] == system]
            by_state.plot(
                [row["state"] for row in others], [100 * row["accuracy"] for row in others], "x", color=f"C{place}"
            )
            if system in PAPER:
                paper.plot(*zip(*PAPER[system].items(), strict=True), color=f"C{place}", marker="o", markersize=4)
        for axes, name in ((by_width, "model width"), (by_state, "numbers in the state"), (paper, "model width")):
            axes.set_xscale("log", base=2)
            axes.set_xlabel(name)
            axes.set_ylim(-2, 102)
            axes.grid(alpha=0.3)
        by_width.set_ylabel("recalled, %")
        by_width.legend(fontsize=7)
        base = record["settings"]["base"]
        by_width.set_title(f"MQAR: {base['pairs']} pairs in {base['length']} tokens", fontsize=10)
        crosses = "; crosses: other slots or heads" if varied else ""
        by_state.set_title(f"the same by size of state{crosses}", fontsize=10)
        paper.set_title("the paper: 64 pairs in 512 tokens", fontsize=10)
