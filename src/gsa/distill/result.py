"""What a distillation leaves: a folder as `gsa convert` writes it, with trained weights and the record of how."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gsa.convert.card import UNTRAINED
from gsa.convert.run import RECORD, SHARD_BYTES
from gsa.distill.trained import plain_weights
from gsa.files import read_file, read_text, whole_folder
from gsa.models.checkpoint import described_weights, stored_weights, write_weights
from gsa.table import Column, Table
from gsa.train.export import CARD

if TYPE_CHECKING:
    from gsa.distill.prepare import Prepared

WHEN = {"before": "before", "align": "aligned", "distil": "distilled"}
Report = dict[str, list[dict[str, Any]]]


def write_result(
    prepared: Prepared, place: Path, trained: Sequence[str], tokens: dict[str, int], report: Report
) -> None:
    """Writes the distilled model beside the run's stages, in the dtype that the student came in."""
    student, source = prepared.student, prepared.folder
    dtype = next(iter(described_weights(source).values())).dtype
    weights = stored_weights(student.config, plain_weights(student))
    weights = {name: x.to(dtype) for name, x in weights.items()}
    settings = {name: value for name, value in asdict(prepared.settings).items() if name not in ("out", "json")}
    distilled = {"trained": list(trained), "tokens": tokens, "settings": settings, "by_position": report}
    before = prepared.record.get("distilled")
    with whole_folder(place, "distill", sum(x.nbytes for x in weights.values())) as folder:
        for file in sorted(source.iterdir()):
            if file.is_file() and file.name not in (RECORD, CARD) and ".safetensors" not in file.name:
                (folder / file.name).write_bytes(read_file(file))
        write_weights(folder, weights, shard_bytes=SHARD_BYTES)
        record = {**prepared.record, "distilled": distilled if before is None else _after(before, distilled)}
        (folder / RECORD).write_text(json.dumps(record, indent=2) + "\n")
        (folder / CARD).write_text(_card(source, distilled, again=before is not None), encoding="utf-8")


def _after(before: dict[str, Any], distilled: dict[str, Any]) -> dict[str, Any]:
    """The record of a training after others: `trained` is what any of them changed, `earlier` has theirs in order."""
    earlier = [*before.get("earlier", []), {name: value for name, value in before.items() if name != "earlier"}]
    trained = sorted({*before["trained"], *distilled["trained"]})
    return {**distilled, "trained": trained, "earlier": earlier}


def _card(source: Path, distilled: dict[str, Any], *, again: bool) -> str:
    """The student's card, with what was trained and what came of it; of a student that was distilled before, below."""
    before = read_text(source / CARD) if (source / CARD).exists() else f"# {source.name}\n\n{UNTRAINED}\n"
    steps = " and ".join(f"{count:,} tokens in stage `{name}`" for name, count in distilled["tokens"].items())
    told = f"Distilled {'again ' if again else ''}from its teacher on {steps}"
    told += f": {len(distilled['trained'])} tensors were trained."
    tables = [by_position(distilled["by_position"]).markdown()] if distilled["by_position"] else []
    parts = [before.rstrip(), told] if again else [before.replace(UNTRAINED, told).rstrip()]
    return "\n\n".join([*parts, *tables]) + "\n"


def by_position(report: Report) -> Table:
    """Before and after each stage, by position in the context."""
    first = next(iter(report.values()))

    def column(header: str, when: str, name: str, form: str) -> Column:
        return Column(header, lambda i: report[when][i][name], form)

    begin, end = next(iter(report)), list(report)[-1]
    columns = [
        Column("positions", lambda i: _name(first[i]), left=True),
        *(column(f"KL\n{WHEN[when]}", when, "kl", "{:.4f}") for when in report),
        column("CE\nteacher", begin, "teacher_ce", "{:.3f}"),
        *(column(f"CE\n{WHEN[when]}", when, "student_ce", "{:.3f}") for when in report),
        column("same top\ntoken", end, "agreement", "{:.1%}"),
    ]
    return Table("By position in the context, on texts that were not learned from", columns, range(len(first)))


def _name(place: dict[str, Any]) -> str:
    return f"{place['begin']}-" + ("" if place["end"] is None else str(place["end"] - 1))
