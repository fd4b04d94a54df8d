"""What a conversion would do, as tables: tensor by tensor, and what the student costs beside its teacher."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from gsa.convert.mapping import Pattern, checked, grouped
from gsa.convert.run import Conversion
from gsa.convert.students import left_out
from gsa.convert.teacher import Teacher
from gsa.files import byte_count
from gsa.models.config import ModelConfig
from gsa.models.init import without_memory
from gsa.models.lm import LM
from gsa.models.sizes import parameter_count
from gsa.table import Column, Table

_HALF_LIVES = "half-lives as far back as the teacher looks; without calibration 16 to 1024 tokens"
_BEGINNINGS = {
    "f_proj.bias": _HALF_LIVES,
    "gk_proj.1.bias": _HALF_LIVES,
    "slot_router.weight": "clusters of the teacher's keys (gates: normal); without calibration normal",
    "slot_router.bias": "the same (gates: half-lives); without calibration 0 (gates: 16 to 1024 tokens)",
    "slot_router.log_rate": "alone, a slot would come to stand for 64 tokens",
    "slot_router.log_fade": "half of a slot is gone after 512 tokens",
    "slot_bias": "outputs are as close to the teacher's as they can be; without calibration 0",
    "slot_query": "0",
    "slot_scale": "0",
    "slot_mass": "1",
    "feature_map.layer.weight": "the identity",
    "norm.weight": "1",
}
"""How new weights begin, in words; the others are normal."""
LENGTHS = (2**10, 2**13, 2**16)
STATE_BYTES = 4
"""States and caches are fp32 here."""


@dataclass(frozen=True)
class Cost:
    """What a model needs behind so many tokens."""

    tokens: int
    cache: int
    """Bytes of the teacher's keys and values."""
    state: int
    """Bytes of the student's state."""
    teacher_flops: float
    """Floating-point operations for the next token."""
    student_flops: float


def costs(teacher: Teacher, student: ModelConfig) -> list[Cost]:
    """Bytes and operations behind each of `LENGTHS`.

    A weight costs two operations. A number of the state costs two for each query head that reads it; and three, for
    decay and writing, where it is not a key or value of a cache.
    """
    with without_memory():
        size = LM(student).state_size
    fixed = {name: 2 * (parameter_count(config) - _embedding(config)) for name, config in _both(teacher, student)}
    readers = teacher.heads // teacher.kv_heads
    found = []
    for tokens in LENGTHS:
        cached = sum(min(tokens, window or tokens) for window in teacher.windows)
        cache = 2 * cached * teacher.kv_heads * teacher.head_dim
        state = cache if size is None else size
        written = 0 if size is None else 3 * state
        found.append(
            Cost(
                tokens,
                cache * STATE_BYTES,
                state * STATE_BYTES,
                fixed["teacher"] + 2 * readers * cache,
                fixed["student"] + 2 * readers * state + written,
            )
        )
    return found


def _both(teacher: Teacher, student: ModelConfig) -> tuple[tuple[str, ModelConfig], ...]:
    return ("teacher", teacher.config), ("student", student)


def _embedding(config: ModelConfig) -> int:
    """Numbers of an embedding of its own, of which a token reads a row; a tied one is the head too."""
    return 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size


def seconds(conversion: Conversion) -> float:
    """About how long the conversion takes without calibration: one tensor is read for it, and writing takes as long."""
    name, own = max(conversion.mapping.copied.items(), key=lambda pair: conversion.sizes[pair[0]])
    began = time.monotonic()
    checked(conversion.source.read(own), own, conversion.source, conversion.dtype)
    return 2 * (time.monotonic() - began) * conversion.nbytes / conversion.sizes[name]


def mapping_tables(conversion: Conversion) -> list[Table]:
    """The tensors that are copied and that are new; and in notes what is dropped."""
    mapping, teacher = conversion.mapping, conversion.teacher
    theirs = {pattern.name: pattern for pattern in grouped(mapping.copied.values(), _shapes(conversion))}
    copied = list(zip(theirs.values(), grouped(mapping.copied, mapping.shapes), strict=True))
    columns = [
        Column("in the source", lambda row: row[0].name, left=True),
        Column("here", lambda row: row[1].name, left=True),
        Column("tensors", lambda row: row[1].count),
        Column("shape", lambda row: _shape(row[1])),
    ]
    dropped = [f"{pattern.name} ({pattern.count})" for pattern in grouped(mapping.dropped, _shapes(conversion))]
    notes = [f"Tensors dropped: {', '.join(dropped) or 'none'}."]
    if missing := left_out(teacher, conversion.choices):
        notes.append(f"Not kept of the teacher: {', '.join(missing)}.")
    if teacher.unknown:
        told = ", ".join(f"{name} = {value}" for name, value in teacher.unknown.items())
        notes.append(f"Fields of its config that are not known here: {told}.")
    new = list(grouped(mapping.new, mapping.shapes))
    of_new = [
        Column("new", lambda row: row.name, left=True),
        Column("tensors", lambda row: row.count),
        Column("shape", _shape),
        Column("begins", lambda row: beginning(row, conversion), left=True),
    ]
    tables = [
        Table(f"{conversion.source.place.name} to {conversion.choices.to}: copied as they are", columns, copied, notes)
    ]
    return [*tables, Table("New", of_new, new)] if new else tables


def beginning(pattern: Pattern, conversion: Conversion) -> str:
    """How a new tensor begins, in words."""
    if pattern.name.endswith("gk_proj.1.bias") and conversion.choices.paper:
        return "0"
    name = pattern.name.removeprefix("layers.*.mixer.")
    return _BEGINNINGS.get(name, f"normal, deviation {conversion.student.initializer_range:g}")


def cost_table(conversion: Conversion) -> Table:
    """Memory and operations beside the teacher's."""
    columns = [
        Column("tokens", lambda row: row.tokens, "{:,}"),
        Column("KV-cache of the teacher", lambda row: byte_count(row.cache)),
        Column("state", lambda row: byte_count(row.state)),
        Column("MFLOPs a token, teacher", lambda row: row.teacher_flops / 1e6, "{:,.0f}"),
        Column("MFLOPs a token", lambda row: row.student_flops / 1e6, "{:,.0f}"),
    ]
    parameters = sum(conversion.sizes.values()) // conversion.dtype.itemsize
    dtype = str(conversion.dtype).removeprefix("torch.")
    notes = [f"{parameters:,} parameters, {byte_count(conversion.nbytes)} in {dtype}; state and cache in fp32."]
    notes.append(f"Without calibration, the conversion takes about {seconds(conversion):.0f} s.")
    return Table("Memory and operations", columns, costs(conversion.teacher, conversion.student), notes)


def report(conversion: Conversion) -> dict[str, Any]:
    """The plan as JSON has it."""
    from dataclasses import asdict

    mapping = conversion.mapping
    return {
        "copied": mapping.copied,
        "new": {name: list(mapping.shapes[name]) for name in mapping.new},
        "dropped": list(mapping.dropped),
        "not_kept": left_out(conversion.teacher, conversion.choices),
        "unknown_fields": conversion.teacher.unknown,
        "bytes": conversion.nbytes,
        "costs": [asdict(cost) for cost in costs(conversion.teacher, conversion.student)],
        "seconds": seconds(conversion),
    }


def _shapes(conversion: Conversion) -> dict[str, tuple[int, ...]]:
    return {name: tuple(x.shape) for name, x in conversion.source.tensors.items()}


def _shape(pattern: Pattern) -> str:
    return " x ".join(map(str, pattern.shape))
