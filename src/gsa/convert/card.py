"""The card of a converted model: README.md, with all that was decided."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from gsa.extras import DISTRIBUTION
from gsa.table import Column, Table

if TYPE_CHECKING:
    from gsa.convert.calibrate import Calibration
    from gsa.convert.run import Conversion


UNTRAINED = "Nothing has been trained: what is new is as it begins."


def card(conversion: Conversion, name: str, companions: Sequence[str], calibration: Calibration | None) -> str:
    """README.md in Markdown, with the front matter that the Hugging Face hub reads."""
    from gsa.convert.plan import cost_table, mapping_tables

    choices, teacher = conversion.choices, conversion.teacher
    mixers = sorted({options.mixer for options in conversion.student.layers})
    lines = ["---", "library_name: gsa", "pipeline_tag: text-generation", "tags:"]
    lines += [f"- {json.dumps(tag)}" for tag in dict.fromkeys(("gated-slot-attention", *mixers))]
    source = conversion.source.place.name
    chosen = ", ".join(f"{key} {value}" for key, value in vars(choices).items() if value not in (None, False))
    parts = [
        "\n".join([*lines, "---"]),
        f"# {name}",
        f"Converted with {DISTRIBUTION} from `{source}`, a model of the kind {teacher.family}. {UNTRAINED}",
        f"Chosen: {chosen}.",
        *("\n\n".join([table.markdown(), *table.notes]) for table in mapping_tables(conversion)),
        *([] if calibration is None else [_calibrated(calibration)]),
        cost_table(conversion).markdown(),
        "## Use",
        _use(name, "tokenizer.json" in companions),
    ]
    return "\n\n".join(parts) + "\n"


def _calibrated(calibration: Calibration) -> str:
    """What the teacher's attention says of each layer."""
    columns, told = [Column("layer", "layer")], []
    if "half_lives" in calibration.facts[0]:
        marks = enumerate(("10%", "median", "90%"))
        columns += [Column(f"half-life, {mark}", _half_life(i), "{:g}") for i, mark in marks]
        told.append("half-lives of gates, in tokens")
    if "output_norm" in calibration.facts[0]:
        columns.append(Column("norm of outputs", "output_norm", "{:.3f}"))
        told.append("weights of norms, means over features")
    if "beyond" in calibration.facts[0]:
        told.append("shares of the softmax, means over heads")
        columns += [
            Column("teacher beyond the window", _mean("beyond"), "{:.3f}"),
            Column("slots", _mean("slots"), "{:.3f}"),
            Column("slot_bias", _mean("slot_bias"), "{:.2f}"),
        ]
    title = f"Calibrated on {calibration.tokens:,} tokens of {calibration.text}: {'; '.join(told)}"
    return Table(title, columns, calibration.facts).markdown()


def _half_life(place: int) -> Callable[[dict[str, Any]], float]:
    return lambda fact: fact["half_lives"][place]


def _mean(name: str) -> Callable[[dict[str, Any]], float]:
    return lambda fact: sum(fact[name]) / len(fact[name])


def _use(name: str, with_tokenizer: bool) -> str:
    folder = json.dumps(name)
    if with_tokenizer:
        code = ["import gsa", "", f"model = gsa.load({folder})", 'print(model.generate("It was", max_tokens=20))']
    else:
        code = ["import gsa", "", f"model = gsa.LM.from_pretrained({folder})"]
    return "\n".join(["```python", *code, "```"])
