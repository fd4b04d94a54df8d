"""Students of one teacher side by side, on tokens that none of them has learned from: one pass of the teacher for all.

    python docs/results/distilled.py OUT.json --teacher GGUF --tokens book=heldout-book --tokens squad=heldout-squad \
        --window window64 window64=students/window64 gsa-0=runs/gsa-0/model ...

Writes cross-entropy, KL and agreement by position for every student and set of tokens, and the share of the loss of the
student named with `--window` that each recovers, with intervals from drawing rows anew. `--pair A B` adds how far A is
ahead of B.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import re
import shlex
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gsa.convert.audit import Sizes, ahead, shares
from gsa.convert.by_position import Reading, compare_all
from gsa.convert.load import load_teacher
from gsa.data.shards import Tokens
from gsa.distill.prepare import spread_rows
from gsa.files import read_json, written
from gsa.models.checkpoint import read_model
from gsa.models.lm import LM
from gsa.table import Column, Table


def facts(folder: Path, model: LM) -> dict[str, Any]:
    """What a student is, and what it learned from."""
    distilled = read_json(folder / "convert.json").get("distilled") or {}
    settings = distilled.get("settings", {})
    return {
        "mixer": model.config.layers[0].mixer,
        "tokens": distilled.get("tokens", {}),
        "train": settings.get("train"),
        "seed": settings.get("seed"),
        "state_bytes": None if model.state_size is None else 4 * model.state_size,
    }


def measured(
    students: dict[str, LM], teacher: LM, rows: Tensor, window: str | None, pairs: list[list[str]]
) -> dict[str, Any]:
    """Everything about one set of tokens."""
    found = compare_all({name: Reading.of(model) for name, model in students.items()}, Reading.of(teacher), rows)
    whole = {name: compared.place(0) for name, compared in found.items()}
    report: dict[str, Any] = {
        "rows": list(rows.shape),
        "students": {
            name: {
                "perplexity": math.exp(place.student_ce),
                "teacher_perplexity": math.exp(place.teacher_ce),
                "places": [asdict(one) for one in found[name].places()],
            }
            for name, place in whole.items()
            if place is not None
        },
    }
    if window is not None:
        near = Sizes.of(students[window]).near
        report["recovered"] = [asdict(figure) for figure in shares(found, window, near)]
        report["ahead"] = [
            {"of": second, **asdict(figure)} for first, second in pairs for figure in ahead(found, first, second, near)
        ]
    return report


def table(name: str, report: dict[str, Any]) -> Table:
    """Perplexity, and cross-entropy by position."""
    students = report["students"]
    first = next(iter(students.values()))
    bins = [f"{place['begin']}-" + ("" if place["end"] is None else str(place["end"] - 1)) for place in first["places"]]
    teacher = ["teacher", first["teacher_perplexity"], *(place["teacher_ce"] for place in first["places"])]
    lines = [
        [name, found["perplexity"], *(place["student_ce"] for place in found["places"])]
        for name, found in students.items()
    ]
    columns = [Column("model", 0, left=True), Column("perplexity", 1, "{:.2f}")]
    columns += [Column(header, number, "{:.3f}") for number, header in enumerate(bins, 2)]
    return Table(f"Cross-entropy by position on {name}, {report['rows'][0]} rows", columns, [teacher, *lines])


def tables(record: dict[str, Any]) -> list[Table]:
    """Of every set of tokens, and what is recovered beyond the window."""
    found = []
    for name, report in record["tokens"].items():
        found.append(table(name, report))
        if report.get("recovered"):
            title = f"Recovered of what {record['window']} loses, on {name}"
            found.append(_figures(title, report["recovered"], "{:.0%}"))
        if report.get("ahead"):
            ahead = [{**one, "name": f"{one['name']} of {one['of']}"} for one in report["ahead"]]
            found.append(_figures(f"Ahead in cross-entropy, on {name}", ahead, "{:+.4f}"))
    return found


def _figures(title: str, figures: list[dict[str, Any]], form: str) -> Table:
    """Figures with their intervals."""
    columns = [
        Column("model", "name", left=True),
        Column("positions", lambda row: f"{row['begin']}-" + ("" if row["end"] is None else str(row["end"] - 1))),
        Column("value", "value", form),
        Column("from", "low", form),
        Column("to", "high", form),
    ]
    return Table(title, columns, figures, ["Intervals hold 95% of what comes of rows drawn anew."])


def main(args: list[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("students", nargs="+", metavar="NAME=FOLDER")
    parser.add_argument("--teacher", required=True)
    parser.add_argument("--tokens", action="append", required=True, metavar="NAME=FOLDER")
    parser.add_argument("--window", metavar="NAME", help="the student whose losses are to be recovered")
    parser.add_argument("--pair", nargs=2, action="append", default=[])
    parser.add_argument("--rows", type=int, default=24)
    parser.add_argument("--length", type=int, default=1024)
    given = parser.parse_args(args)
    began, teacher = time.time(), load_teacher(given.teacher)
    places = {name: Path(folder) for name, _, folder in (one.partition("=") for one in given.students)}
    students = {name: read_model(place, dtype=torch.float32).eval() for name, place in places.items()}
    report: dict[str, Any] = {
        "experiment": "distilled",
        "command": shlex.join(
            ["python", "docs/results/distilled.py", *(re.sub(r"[^=]*/", "", word) for word in args)]
        ),  # without the folders of this machine
        "date": time.strftime("%Y-%m-%d"),
        "machine": {"processor": platform.machine(), "threads": torch.get_num_threads(), "torch": torch.__version__},
        "window": given.window,
        "students": {name: facts(places[name], model) for name, model in students.items()},
        "tokens": {},
    }
    for one in given.tokens:
        name, _, folder = one.partition("=")
        rows = spread_rows(Tokens.open(folder), given.length, given.rows)
        report["tokens"][name] = measured(students, teacher, rows, given.window, given.pair)
    report["seconds"] = round(time.time() - began)
    print("\n\n".join(one.markdown() for one in tables(report)))
    with written(given.out) as file:
        file.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
