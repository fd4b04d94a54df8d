"""The tables and the picture of `gsa paper efficiency`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from gsa.paper.record import drawn
from gsa.table import Column, Table

LABELS = {"xfmr": "Xfmr++", "mamba": "Mamba", "retnet": "RetNet", "gla": "GLA", "hgrn2": "HGRN2", "gsa": "GSA"}
PAPER_MEMORY = {"xfmr": 35.9, "mamba": 37.4, "gla": 36.2, "gsa": 38.0, "gsa, no recomputation": 41.4}
"""GiB in training, 1.3B parameters, 16K tokens, H800."""
PAPER_DECODING = {
    "xfmr": {2048: 54.1, 4096: 94.1, 8192: 189.3, 16384: 418.3},
    "mamba": {2048: 31.1, 4096: 61.3, 8192: 117.3, 16384: 236.6},
    "retnet": {2048: 44.9, 4096: 86.5, 8192: 172.0, 16384: 347.8},
    "gla": {2048: 38.4, 4096: 63.2, 8192: 125.3, 16384: 240.4},
    "gsa": {2048: 29.4, 4096: 55.3, 8192: 112.8, 16384: 211.0},
}
"""Seconds, 1.3B parameters, behind 2K tokens, H800."""
PAPER_TRAINING = {32: 46.7, 64: 44.1, 128: 37.1}
"""Thousands of tokens a second of GSA by its slots, 1.3B parameters, H800; the figure has no other numbers."""
PAPER = {"training": PAPER_TRAINING, "memory": PAPER_MEMORY, "decoding": PAPER_DECODING}


def label(system: str) -> str:
    return LABELS.get(system, system.replace("gsa", "GSA"))


def efficiency_tables(record: dict[str, Any]) -> list[Table]:
    """Training, memory, decoding."""
    settings = record["settings"]
    return [_training(record, settings), _memory(record), _decoding(record, settings)]


def _by(rows: list[dict[str, Any]], key: str, value: str) -> dict[str, dict[int, Any]]:
    found: dict[str, dict[int, Any]] = {}
    for row in rows:
        found.setdefault(row["system"], {})[row[key]] = row[value]
    return found


def _at(place: int) -> Callable[[Any], Any]:
    """What a row (system, {place: value}) has there."""
    return lambda row: row[1][place]


def _training(record: dict[str, Any], settings: dict[str, Any]) -> Table:
    speeds = _by(record["training"], "length", "tokens_per_second")
    lengths = settings["lengths"]
    columns = [
        Column("system", lambda row: label(row[0]), left=True),
        *(Column(f"{length} x {lengths[-1] // length}", _at(length), "{:,.0f}") for length in lengths),
    ]
    first = record["training"][0]
    slots, speeds_by_slots = (", ".join(map(str, part)) for part in (PAPER_TRAINING, PAPER_TRAINING.values()))
    notes = [
        f"Presets {settings['size']} ({first['parameters'] / 1e6:.0f}M parameters), {first['precision']}, "
        f"{settings['device']}, {settings['threads']} threads. The paper's figure has no numbers in its source but "
        f"these, of GSA with {slots} slots: {speeds_by_slots} thousand tokens a second (1.3B, H800)."
    ]
    return Table("Training, tokens a second", columns, list(speeds.items()), notes)


def _memory(record: dict[str, Any]) -> Table:
    columns = [
        Column("system", lambda row: label(row["system"]), left=True),
        Column("GiB", lambda row: None if row["peak_bytes"] is None else row["peak_bytes"] / 2**30, "{:.2f}"),
        Column("paper's GiB", lambda row: PAPER_MEMORY.get(row["system"]), "{:.1f}"),
    ]
    title = f"Memory of a training step, {record['memory'][0]['length']:,} tokens"
    return Table(title, columns, record["memory"], ["The paper's: 1.3B parameters on an H800."])


def _decoding(record: dict[str, Any], settings: dict[str, Any]) -> Table:
    seconds, states = (_by(record["decoding"], "decoded", value) for value in ("seconds", "state_bytes"))
    marks = settings["decoded"]
    last = marks[-1]
    columns = [
        Column("system", lambda row: label(row[0]), left=True),
        Column(
            "state, KB", lambda row: None if states[row[0]][last] is None else states[row[0]][last] / 1e3, "{:,.0f}"
        ),
        *(Column(f"{mark:,}", _at(mark), "{:.3g}") for mark in marks),
    ]
    if last in PAPER_DECODING["gsa"]:
        columns.append(Column(f"paper's, {last:,}", lambda row: PAPER_DECODING.get(row[0], {}).get(last), "{:.1f}"))
    rows = sorted(seconds.items(), key=lambda row: row[1][last])
    notes = [
        f"One sequence behind {settings['prompt']:,} tokens, weights in {record['decoding'][0]['weights']}; every "
        "system's step is compiled by the same engine on a CPU. The paper's: 1.3B parameters on an H800."
    ]
    return Table("Decoding, seconds for so many tokens", columns, rows, notes)


def efficiency_picture(record: dict[str, Any], path: Path) -> None:
    """The three parts of the paper's figure."""
    settings = record["settings"]
    with drawn(path, columns=3, size=(13, 4)) as (speed, memory, latency):
        for place, (system, points) in enumerate(_by(record["training"], "length", "tokens_per_second").items()):
            names = [f"{length}\nx {settings['lengths'][-1] // length}" for length in points]
            speed.plot(names, list(points.values()), "o-", markersize=4, color=f"C{place}", label=label(system))
        speed.set_ylabel("tokens a second, training")
        speed.set_ylim(bottom=0)
        speed.legend(fontsize=7)
        known = [row for row in record["memory"] if row["peak_bytes"] is not None]
        memory.barh([label(row["system"]) for row in known], [row["peak_bytes"] / 2**30 for row in known])
        memory.invert_yaxis()
        memory.set_xlabel("GiB, a training step")
        for place, (system, points) in enumerate(_by(record["decoding"], "decoded", "seconds").items()):
            latency.plot(
                list(points), list(points.values()), "o-", markersize=4, color=f"C{place}", label=label(system)
            )
        latency.set_xlabel(f"tokens decoded behind {settings['prompt']:,}")
        latency.set_ylabel("seconds")
        latency.set_ylim(bottom=0)
        for axes in (speed, memory, latency):
            axes.grid(alpha=0.3)
