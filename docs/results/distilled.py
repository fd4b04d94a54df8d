"""Students of one teacher side by side, on tokens that none of them has learned from.

    python docs/results/distilled.py OUT.json --teacher GGUF --tokens book=heldout-book --tokens squad=heldout-squad \
        window64=students/window64 gsa-0=runs/gsa-0/model ... --window window64 --pair hybrid-0 window128-0

Writes cross-entropy, KL and agreement of every student and set of tokens, row by row and bin by bin of positions. From
these come the tables: means by position, the share of the loss of the student named with `--window` that each recovers,
and how far A is ahead of B for each `--pair A B`, with intervals from drawing rows anew.

Students that OUT.json has already are kept as they are, so that each can be measured when it is there.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gsa.convert.audit import Figure, ahead, shares
from gsa.convert.by_position import BORDERS, Compared, Reading, compare_all
from gsa.convert.load import load_teacher
from gsa.data.shards import Tokens
from gsa.distill.prepare import spread_rows
from gsa.errors import GSAError
from gsa.files import read_json, written
from gsa.models.checkpoint import read_model
from gsa.models.lm import LM
from gsa.table import Column, Table

Record = dict[str, Any]
HYBRID = "hybrid"
"""The mixer whose slots may recover what its window loses; others have no window."""
FIGURES = ("kl", "student_ce", "agreement")
"""What is kept of a student beside the teacher's own cross-entropy, as means [rows][bins]."""

NEAR, LENGTH = 68, 1024
"""Tokens that window and sinks hold, and of a row, unless others are asked for."""
SAME = 1e-3
"""Nats between two measurements of one teacher on one machine or another."""


def facts(folder: Path, model: LM) -> Record:
    """What a student is, and what it learned from."""
    distilled = read_json(folder / "convert.json").get("distilled") or {}
    settings, tokens = distilled.get("settings", {}), Counter[str]()
    for training in (*distilled.get("earlier", []), distilled):
        tokens.update(training.get("tokens", {}))
    return {
        "mixer": model.config.layers[0].mixer,
        "tokens": dict(tokens),
        "train": settings.get("train"),
        "seed": settings.get("seed"),
        "state_bytes": None if model.state_size is None else 4 * model.state_size,
    }


def borders(near: int, length: int) -> list[int]:
    """Where bins of positions begin and end; none holds positions both within and beyond a window."""
    return sorted({border for border in (*BORDERS, near, length) if border <= length})


def means(figures: Tensor, edges: list[int]) -> list[list[float]]:
    """Of figures [rows, positions], the mean of each bin."""
    bins = [figures[:, begin:end].double().mean(1) for begin, end in pairwise(edges)]
    return [[round(float(x), 6) for x in row] for row in torch.stack(bins, 1)]


def compared(found: Record, name: str) -> Compared:
    """A student's figures, each position with the mean of its bin: all sums over bins are as they were."""
    widths = torch.tensor(found["borders"]).diff()
    student = found["students"][name]
    spread = {
        figure: torch.tensor(values, dtype=torch.float64).repeat_interleave(widths, 1)
        for figure, values in (("teacher_ce", found["teacher_ce"]), *((figure, student[figure]) for figure in FIGURES))
    }
    return Compared(**spread)


def add(record: Record, name: str, rows: Tensor, students: dict[str, LM], teacher: LM) -> None:
    """Puts what students make of a set of tokens into the record."""
    found = compare_all({key: Reading.of(model) for key, model in students.items()}, Reading.of(teacher), rows)
    edges = borders(record["near"], rows.shape[1] - 1)
    theirs = means(next(iter(found.values())).teacher_ce, edges)
    new = {"rows": list(rows.shape), "borders": edges, "teacher_ce": theirs, "students": {}}
    report = record["tokens"].setdefault(name, new)
    if (report["rows"], report["borders"]) != (new["rows"], edges):
        raise GSAError(f"{name}: expected rows {report['rows']} as before, got {new['rows']}")
    if not torch.allclose(torch.tensor(report["teacher_ce"]), torch.tensor(theirs), rtol=0, atol=SAME):
        raise GSAError(f"{name}: the teacher has other losses than before: these are other tokens, or another teacher")
    for key, figures in found.items():
        report["students"][key] = {figure: means(getattr(figures, figure), edges) for figure in FIGURES}


def tables(record: Record) -> list[Table]:
    """Of every set of tokens: means by position, what is recovered beyond the window, and who is ahead of whom."""
    shown, window = [], record["window"]
    for name, found in record["tokens"].items():
        students = {student: compared(found, student) for student in found["students"]}
        shown.append(_by_position(f"Cross-entropy by position on {name}, {found['rows'][0]} rows", students))
        if window not in students:
            continue
        near = record["near"]
        hybrids = {student: students[student] for student in students if record["students"][student]["mixer"] == HYBRID}
        recovered = [(figure.name, figure) for figure in shares(hybrids, window, near)]
        shown.append(_figures(f"Recovered of what {window} loses, on {name}", recovered, "{:.0%}"))
        pairs = [
            (f"{first} of {second}", figure)
            for first, second in record["pairs"]
            if first in students and second in students
            for figure in ahead(students, first, second, near)
        ]
        if pairs:
            shown.append(_figures(f"Ahead in cross-entropy, on {name}", pairs, "{:+.4f}"))
    return shown


def _by_position(title: str, students: dict[str, Compared]) -> Table:
    """Perplexity and cross-entropy; KL and agreement where the context is longest."""
    first = next(iter(students.values()))
    rows: list[list[Any]] = [["teacher", *_losses(first, "teacher_ce"), None, None]]
    for name, figures in students.items():
        last = figures.places()[-1]
        rows.append([name, *_losses(figures, "student_ce"), last.kl, last.agreement])
    bins = [place.name for place in first.places()]
    forms = ["{}", "{:.2f}", *("{:.3f}" for _ in bins), "{:.3f}", "{:.1%}"]
    headers = ["model", "perplexity", *bins, f"KL, {bins[-1]}", f"same top token, {bins[-1]}"]
    columns = [Column(header, i, form, left=not i) for i, (header, form) in enumerate(zip(headers, forms, strict=True))]
    return Table(title, columns, rows)


def _losses(figures: Compared, of: str) -> list[float]:
    """Perplexity over all positions, and the cross-entropy of each bin."""
    return [math.exp(float(getattr(figures, of).mean())), *(getattr(place, of) for place in figures.places())]


def _figures(title: str, rows: list[tuple[str, Figure]], form: str) -> Table:
    """Figures with their intervals."""
    columns = [
        Column("model", 0, left=True),
        Column("positions", lambda row: row[1].positions),
        Column("value", lambda row: row[1].value, form),
        Column("from", lambda row: row[1].low, form),
        Column("to", lambda row: row[1].high, form),
    ]
    return Table(title, columns, rows, ["Intervals hold 95% of what comes of rows drawn anew."])


def begun(out: Path, teacher: str, tokens: dict[str, str], near: int, length: int) -> Record:
    """The record that a file has, or a new one."""
    names = " ".join(f"--tokens {name}={Path(folder).name}" for name, folder in tokens.items())
    names += "" if near == NEAR else f" --near {near}"
    names += "" if length == LENGTH else f" --length {length}"
    record = {
        "experiment": "distilled",
        "command": f"python docs/results/distilled.py {out.name} NAME=FOLDER ... --teacher {Path(teacher).name} "
        + names,
        "date": time.strftime("%Y-%m-%d"),
        "machine": {"processor": platform.machine(), "torch": torch.__version__},
        "near": near,
        "window": None,
        "pairs": [],
        "students": {},
        "tokens": {},
    }
    if not out.exists():
        return record
    old = read_json(out)
    if (old["command"], old["near"]) != (record["command"], near):
        raise GSAError(f"{out} is of other tokens or another window: {old['command']}, near {old['near']}")
    return old | {"date": record["date"]}


def named(text: str) -> tuple[str, str]:
    """What stands before and behind an equals sign."""
    name, equals, folder = text.partition("=")
    if not (name and equals and folder):
        raise argparse.ArgumentTypeError(f"expected NAME=FOLDER, got {text!r}")
    return name, folder


def main(args: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("students", nargs="*", type=named, metavar="NAME=FOLDER")
    parser.add_argument("--teacher", required=True)
    parser.add_argument("--tokens", action="append", required=True, type=named, metavar="NAME=FOLDER")
    parser.add_argument("--window", metavar="NAME", help="the student whose losses are to be recovered")
    parser.add_argument("--pair", nargs=2, action="append", default=[], metavar=("A", "B"))
    parser.add_argument("--near", type=int, default=NEAR, help="tokens that the window and its sinks hold")
    parser.add_argument("--rows", type=int, default=24)
    parser.add_argument("--length", type=int, default=LENGTH)
    given = parser.parse_intermixed_args(args)
    record = begun(given.out, given.teacher, dict(given.tokens), given.near, given.length)
    folders = {name: Path(folder) for name, folder in given.students if name not in record["students"]}
    if folders:
        teacher = load_teacher(given.teacher)
        models = {name: read_model(folder, dtype=torch.float32).eval() for name, folder in folders.items()}
        known = {name: facts(folder, models[name]) for name, folder in folders.items()}  # first: measuring takes long
        for name, folder in given.tokens:
            rows = spread_rows(Tokens.open(folder), given.length, given.rows)
            add(record, name, rows, models, teacher)
        record["students"] |= known
    record["window"] = given.window or record["window"]
    record["pairs"] += [pair for pair in given.pair if pair not in record["pairs"]]
    for name in {record["window"] or "", *(name for pair in record["pairs"] for name in pair)} - {""}:
        if name not in record["students"]:
            raise GSAError(f"{name} is no student of {given.out}; it has {', '.join(record['students'])}")
    with written(given.out) as file:
        file.write_text(json.dumps(record) + "\n")
    print("\n\n".join(one.markdown() for one in tables(record)))


if __name__ == "__main__":
    main()
