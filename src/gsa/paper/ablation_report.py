"""The tables and the picture of `gsa paper ablation`."""

from __future__ import annotations

from math import sqrt
from pathlib import Path
from typing import Any

from gsa.paper.record import drawn
from gsa.table import Column, Table


def ablation_tables(record: dict[str, Any]) -> list[Table]:
    """Every row beside the first, and beside the paper's."""
    settings, rows = record["settings"], record["rows"]
    first = rows[0]
    columns = [
        Column("", "label", left=True),
        Column("ppl", "perplexity", "{:.2f}"),
        Column("loss", "loss", "{:.4f}"),
        Column("Δ loss", lambda row: None if row is first else row["loss"] - first["loss"], "{:+.4f}"),
        Column("chance", lambda row: None if row is first else chance(row, first), "± {:.4f}"),
        Column("bits/byte", "bits_per_byte", "{:.3f}"),
    ]
    if settings["table"] == "paper":
        columns.append(Column("paper's ppl", "paper", "{:.2f}"))
    notes = [
        f"Mean over seeds ({settings['seeds']}), {settings['tokens']:,} tokens each. Δ loss is beside the first row; "
        "chance is its standard error, from the spread of the seeds."
    ]
    return [Table("Ablations" if settings["table"] == "paper" else "Recipes", columns, rows, notes)]


def chance(row: dict[str, Any], first: dict[str, Any]) -> float | None:
    """The standard error of the difference between the mean losses of two rows."""
    if row["spread"] is None or first["spread"] is None:
        return None
    return sqrt(row["spread"] ** 2 / len(row["losses"]) + first["spread"] ** 2 / len(first["losses"]))


def ablation_picture(record: dict[str, Any], path: Path) -> None:
    """Losses of all seeds, a line of points for every row; and the paper's order beside them."""
    rows = record["rows"]
    with_paper = record["settings"]["table"] == "paper" and any(row["paper"] for row in rows)
    labels, places = [row["label"] for row in rows], range(len(rows))
    with drawn(path, columns=2 if with_paper else 1, size=(10 if with_paper else 7, 0.6 + 0.35 * len(rows))) as axes:
        ours = axes[0] if with_paper else axes
        for place, row in enumerate(rows):
            ours.plot(row["perplexities"], [place] * len(row["perplexities"]), "o", color="C0", markersize=4, alpha=0.6)
            ours.plot([row["perplexity"]], [place], "|", color="C0", markersize=14)
        ours.set_yticks(list(places), labels, fontsize=8)
        ours.set_xlabel("perplexity here")
        if with_paper:
            known = [(place, row["paper"]) for place, row in enumerate(rows) if row["paper"] is not None]
            axes[1].plot([value for _, value in known], [place for place, _ in known], "s", color="C1", markersize=4)
            axes[1].set_yticks(list(places), [""] * len(rows))
            axes[1].set_xlabel("perplexity in the paper (340M, 10B tokens)")
        for one in axes if with_paper else [axes]:
            one.set_ylim(len(rows) - 0.5, -0.5)
            one.grid(alpha=0.3)
