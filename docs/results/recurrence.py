"""Where slots are worth more than a longer window, and where less: losses by how far back the next token stood last.

    python docs/results/recurrence.py OUT.json --teacher GGUF --tokens book=heldout-book --tokens squad=heldout-squad \
        window64=students/window64 window128=students/window128 hybrid=students/hybrid \
        --near 68 --far 132 --pair hybrid window128

A token that stood last within `--near` tokens is seen by all students, one between `--near` and `--far` by the longer
window alone, one further back by none exactly; and there are tokens that the text has not had yet. Positions before
`--far`, where the longer window has lost nothing, do not count. Writes sums of cross-entropy, row by row, of every
student and of the teacher; for each `--pair A B`, the tables tell how far A is ahead of B, with intervals from drawing
rows anew, and how much of that is due to each kind of token.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gsa.convert.audit import CONFIDENCE, RESAMPLES
from gsa.convert.by_position import Reading, compare_all
from gsa.convert.load import load_teacher
from gsa.data.shards import Tokens
from gsa.distill.prepare import spread_rows
from gsa.errors import GSAError
from gsa.eval.paired import Parts, mean_of, paired_difference
from gsa.files import written
from gsa.models.checkpoint import read_model
from gsa.paper.record import machine
from gsa.table import Column, Table

Record = dict[str, Any]
NEVER = 2**30
"""Tokens back, where there was no such token."""


def tokens_back(row: Tensor) -> Tensor:
    """Of each token of a row [T] but the first, how far back the same token stood last.

    >>> tokens_back(torch.tensor([5, 6, 5, 5, 7])).tolist() == [NEVER, 2, 1, NEVER]
    True
    """
    last: dict[int, int] = {}
    found = []
    for place, token in enumerate(row.tolist()):
        found.append(place - last.get(token, place - NEVER))
        last[token] = place
    return torch.tensor(found[1:])


def kinds(near: int, far: int) -> dict[str, tuple[int, int]]:
    """The name of every kind of token, and how far back it stood at least, and at most."""
    return {
        f"1 to {near} back": (1, near),
        f"{near + 1} to {far} back": (near + 1, far),
        f"more than {far} back": (far + 1, NEVER - 1),
        "not yet": (NEVER, NEVER),
    }


def sums(figures: Tensor, back: Tensor, near: int, far: int) -> list[list[float]]:
    """Of figures [N, T - 1], those of each kind of token added up row by row: [kinds][N]."""
    chosen = []
    for least, most in kinds(near, far).values():
        of_kind = (back >= least) & (back <= most)
        of_kind[:, :far] = False
        chosen.append((figures.double() * of_kind).sum(1).tolist())
    return [[round(x, 5) for x in row] for row in chosen]


def measured(rows: Tensor, models: dict[str, Any], teacher: Any, near: int, far: int) -> Record:
    """What the record has of a set of tokens."""
    found = compare_all({name: Reading.of(model) for name, model in models.items()}, Reading.of(teacher), rows)
    back = torch.stack([tokens_back(row) for row in rows])
    first = next(iter(found.values()))
    return {
        "rows": list(rows.shape),
        "counts": sums(torch.ones_like(first.kl), back, near, far),
        "teacher": sums(first.teacher_ce, back, near, far),
        "students": {name: sums(figures.student_ce, back, near, far) for name, figures in found.items()},
    }


def tables(record: Record) -> list[Table]:
    """Of every set of tokens: cross-entropy by kind, and who is ahead of whom by kind."""
    return [
        table
        for name, found in record["tokens"].items()
        for table in (_losses(name, found, record), *(_ahead(name, found, pair, record) for pair in record["pairs"]))
    ]


def _losses(name: str, found: Record, record: Record) -> Table:
    counts = np.array(found["counts"]).sum(1)
    models = {"teacher": found["teacher"], **found["students"]}
    rows = [
        [kind, counts[i] / counts.sum(), *(np.sum(losses[i]) / counts[i] for losses in models.values())]
        for i, kind in enumerate(kinds(record["near"], record["far"]))
    ]
    columns = [Column("the next token stood last", 0, left=True), Column("tokens", 1, "{:.0%}")]
    columns += [Column(model, i, "{:.3f}") for i, model in enumerate(models, 2)]
    return Table(f"Cross-entropy by recurrence on {name}, {found['rows'][0]} rows", columns, rows)


def _ahead(name: str, found: Record, pair: list[str], record: Record) -> Table:
    ahead, behind = (np.array(found["students"][student]) for student in pair)
    counts = np.array(found["counts"])
    every = counts.sum()
    rows = []
    for i, kind in enumerate(kinds(record["near"], record["far"])):
        rows.append([kind, *_difference(behind[i], ahead[i], counts[i]), float((behind[i] - ahead[i]).sum() / every)])
    whole = _difference(behind.sum(0), ahead.sum(0), counts.sum(0))
    rows.append(["all", *whole, whole[0]])
    columns = [
        Column("the next token stood last", 0, left=True),
        Column("nats ahead", 1, "{:+.3f}"),
        Column("from", 2, "{:+.3f}"),
        Column("to", 3, "{:+.3f}"),
        Column("of all nats ahead", 4, "{:+.4f}"),
    ]
    note = "Intervals hold 95% of what comes of rows drawn anew."
    return Table(f"{pair[0]} ahead of {pair[1]}, on {name}", columns, rows, [note])


def _difference(behind: Any, ahead: Any, counts: Any) -> list[float]:
    """The mean difference of sums over rows [N], and its interval."""
    parts = Parts(np.stack([behind, ahead], 1), counts.astype(np.float64), lambda means: means[..., 0] - means[..., 1])
    nothing = mean_of(np.zeros(len(counts)))
    found = paired_difference(nothing, parts, resamples=RESAMPLES, confidence=CONFIDENCE, seed=0)
    return [found.value, found.low, found.high]


def named(text: str) -> tuple[str, str]:
    """What stands before and behind an equals sign."""
    name, equals, folder = text.partition("=")
    if not (name and equals and folder):
        raise argparse.ArgumentTypeError(f"expected NAME=FOLDER, got {text!r}")
    return name, folder


def main(args: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("students", nargs="+", type=named, metavar="NAME=FOLDER")
    parser.add_argument("--teacher", required=True)
    parser.add_argument("--tokens", action="append", required=True, type=named, metavar="NAME=FOLDER")
    parser.add_argument("--near", type=int, default=68, help="tokens that all students see")
    parser.add_argument("--far", type=int, default=132, help="tokens that the longer window sees")
    parser.add_argument("--pair", nargs=2, action="append", default=[], metavar=("A", "B"))
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--length", type=int, default=1024)
    given = parser.parse_intermixed_args(args)
    if not 1 <= given.near < given.far < given.length - 1:
        raise GSAError(f"expected near < far < length - 1, got {given.near}, {given.far} and {given.length}")
    students = dict(given.students)
    for name in (name for pair in given.pair for name in pair):
        if name not in students:
            raise GSAError(f"{name} is none of the students {', '.join(students)}")
    teacher = load_teacher(given.teacher)
    models = {name: read_model(Path(folder), dtype=torch.float32).eval() for name, folder in students.items()}
    tokens = {
        name: measured(
            spread_rows(Tokens.open(folder), given.length, given.rows), models, teacher, given.near, given.far
        )
        for name, folder in given.tokens
    }
    record = {
        "experiment": "recurrence",
        "command": f"python docs/results/recurrence.py {given.out.name} NAME=FOLDER ... "
        f"--teacher {Path(given.teacher).name} --near {given.near} --far {given.far} --length {given.length}",
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        "near": given.near,
        "far": given.far,
        "pairs": [list(pair) for pair in given.pair],
        "tokens": tokens,
    }
    with written(given.out) as file:
        file.write_text(json.dumps(record) + "\n")
    print("\n\n".join(one.markdown() for one in tables(record)))


if __name__ == "__main__":
    main()
